"""Do replicas with real engines come and go with the load, and is no stream cut when one goes?"""

from __future__ import annotations

import http.client
import json
import select
import tempfile
import threading
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from rayserve.serve_config import DEPLOYMENT
from tests.ray_cluster import wait_until
from tests.served import Served, make_plan, metrics, own_port

REPLICAS = {"min": 1, "max": 2, "upscale_delay_s": 1, "downscale_delay_s": 3}
STREAMS = 4
"""HAProxy shares them out; one replica can take them all."""
TOKENS = 3800
"""Of a stream: many times the seconds that a replica takes to go once the load is low."""


class Load:
    """Requests that are held open until `close`: their answers are not read, so they cost little."""

    def __init__(self, served: Served, requests: int) -> None:
        self.served = served
        self.open = [self.ask() for _ in range(requests)]

    def ask(self) -> http.client.HTTPConnection:
        """One request for an answer in one piece, on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.served.plan.endpoint.port)
        path = urlsplit(f"{self.served.url}/v1/completions").path
        headers = {"Content-Type": "application/json", **self.served.headers}
        connection.request("POST", path, json.dumps(question(self.served)), headers)
        return connection

    def keep(self) -> None:
        """Ask again in place of each request that has been answered."""
        answered, _, _ = select.select([one.sock for one in self.open], [], [], 0)
        for number, connection in enumerate(self.open):
            if connection.sock in answered:
                connection.close()
                self.open[number] = self.ask()

    def reach(self, pid: int) -> bool:
        """Whether that replica runs a request by now; else one request more.

        HAProxy learns of a new replica a moment after Serve calls it running.
        """
        self.keep()
        self.open.append(self.ask())
        return running(self.served, pid) > 0

    def close(self) -> None:
        """Go away, as clients do: the engine ends what they asked for."""
        for connection in self.open:
            connection.close()


def question(served: Served) -> dict[str, Any]:
    """A request of a fixed number of tokens."""
    return {
        "model": served.model,
        "prompt": "and then",
        "max_tokens": TOKENS,
        "ignore_eos": True,
    }


class Stream(threading.Thread):
    """One stream of a fixed number of tokens, read in a thread."""

    def __init__(self, served: Served) -> None:
        super().__init__(daemon=True)
        self.served = served
        self.events: list[str] = []
        self.error = ""
        self.start()

    def run(self) -> None:
        """Read to the end."""
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        request = urllib.request.Request(
            f"{self.served.url}/v1/completions",
            json.dumps(question(self.served) | streamed).encode(),
            {"Content-Type": "application/json", **self.served.headers},
        )
        try:
            with urllib.request.urlopen(request, timeout=240) as reply:
                for line in reply:
                    if line.startswith(b"data: "):
                        self.events.append(line.decode().strip())
        except OSError as error:
            self.error = repr(error)

    def tokens(self) -> int:
        """Tokens of a whole answer, as the engine counts them: a busy one may send two in an event."""
        assert self.events[-1] == "data: [DONE]"
        usage = json.loads(self.events[-2].removeprefix("data: "))["usage"]
        return int(usage["completion_tokens"])


def running(served: Served, pid: int) -> int:
    """Requests in the batch of a replica's engine."""
    return int(metrics(served, own_port(pid))["vllm:num_requests_running"])


def whole(served: Served, pid: int) -> int:
    """Answers of a replica that had all the tokens asked for."""
    figures = metrics(served, own_port(pid), finished_reason="length")
    return int(figures["vllm:request_success_total"])


def replicas(served: Served) -> list[dict[str, Any]]:
    """All replicas, those that come and go among them."""
    return served.ray.replicas(served.application["name"], DEPLOYMENT)


def states(served: Served) -> list[str]:
    """States of all replicas."""
    return sorted(replica["state"] for replica in replicas(served))


def second(served: Served, first: int, load: Load) -> int | None:
    """Process of the second replica, once it runs; the load is kept up meanwhile."""
    load.keep()
    if states(served) != ["RUNNING"] * 2:
        return None
    return next(pid for one in replicas(served) if (pid := int(one["pid"])) != first)


@pytest.mark.timeout(600)  # two engines start and run on what may be two cores
def test_a_second_engine_comes_with_the_load_and_goes_without_cutting_a_stream():
    """1 → 2 while requests are above the target and a gang is free; back to 1; each stream whole."""
    with tempfile.TemporaryDirectory(prefix="rse-", dir="/tmp") as name:
        plan = make_plan(
            Path(name),
            node_pools=[{"name": "local", "hosts": 1, "gpu": "cpu", "gpus_per_host": 2}],
            parallelism={"tensor": 1},
            replicas=REPLICAS,
            limits={"max_num_seqs": 8, "max_model_len": 4096, "kv_cache_gib": 1},
            timeouts={"drain_s": 200},
        )
        with Served(plan, Path(name), gangs=2) as served:
            first = int(replicas(served)[0]["pid"])
            assert running(served, first) == 0
            load = Load(served, plan.scaling.target_in_flight + 1)
            new = wait_until(lambda: second(served, first, load), 200, "two running replicas")
            wait_until(lambda: load.reach(new), 90, "a request on the second", period_s=1)
            streams = [Stream(served) for _ in range(STREAMS)]
            wait_until(lambda: any(stream.events for stream in streams), 60, "a first token")
            load.close()
            before = whole(served, first)
            wait_until(lambda: "STOPPING" in states(served), 60, "a replica that is given back")
            assert all(stream.is_alive() for stream in streams)
            for stream in streams:
                stream.join(200)
            assert [stream.error for stream in streams if stream.error] == []
            assert {stream.tokens() for stream in streams} == {TOKENS}
            assert whole(served, first) - before < STREAMS, "the one that left had none"
            wait_until(lambda: states(served) == ["RUNNING"], 60, "one replica again")
