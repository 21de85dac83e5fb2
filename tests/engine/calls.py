"""How do tests ask a replica, and know its processes?"""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import psutil

from rayserve.serve_config import DEPLOYMENT
from tests.served import Served


class Call:
    """One request on a connection of its own, so that a test can break it off."""

    def __init__(self, served: Served, path: str, body: dict[str, Any], key: str = "") -> None:
        url = urlsplit(served.url)
        self._connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=60)
        headers = {"Content-Type": "application/json", "x-api-key": key or served.key}
        text = json.dumps({"model": served.model, **body})
        self._connection.request("POST", url.path + path, text, headers)
        self.reply = self._connection.getresponse()

    def close(self) -> None:
        """Hang up, whatever is still to come."""
        self._connection.close()
        self.reply.close()

    def json(self) -> Any:
        """The whole answer."""
        with self.reply:
            answer = json.loads(self.reply.read())
        self._connection.close()
        return answer

    def events(self) -> list[str]:
        """The data of all events of a stream, to its end."""
        with self.reply:
            lines = self.reply.read().decode().splitlines()
        self._connection.close()
        return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def stream(served: Served, tokens: int) -> Call:
    """A stream of exactly so many tokens."""
    body = {"prompt": "once upon a time", "max_tokens": tokens, "ignore_eos": True}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    return Call(served, "/v1/completions", {**body, **options})


def tokens_of(call: Call) -> int:
    """Tokens of a whole stream, as the engine counts them: a busy one may send two in an event."""
    *_, usage, end = call.events()
    assert end == "[DONE]"
    return int(json.loads(usage)["usage"]["completion_tokens"])


def replica_pid(served: Served) -> int:
    """Process of the one running replica."""
    replicas = served.ray.replicas(served.application["name"], DEPLOYMENT)
    (pid,) = [replica["pid"] for replica in replicas if replica["state"] == "RUNNING"]
    return int(pid)


def family(pid: int) -> list[psutil.Process]:
    """All processes below a replica: fork server, engine core, workers."""
    return psutil.Process(pid).children(recursive=True)


def all_gone(processes: list[psutil.Process]) -> bool:
    """Whether none of them runs any more."""
    _, alive = psutil.wait_procs(processes, timeout=0)
    return not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]
