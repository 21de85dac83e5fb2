"""Do replicas with real engines come and go with the load, and is no stream cut when one goes?"""

from __future__ import annotations

import http.client
import json
import tempfile
import threading
import urllib.request
from pathlib import Path

import psutil
import pytest

from rayserve.serve_config import DEPLOYMENT
from tests.ray_cluster import wait_until
from tests.served import Served, make_plan

ROUNDS = 2
"""A replica may be told to stop at the moment in which its last stream ends: that shows nothing."""
REPLICAS = {"min": 1, "max": 2, "upscale_delay_s": 1, "downscale_delay_s": 3}
TOKENS = 1500


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
        body = {"model": self.served.model, "prompt": "and then", "max_tokens": TOKENS}
        request = urllib.request.Request(
            f"{self.served.url}/v1/completions",
            json.dumps(
                {
                    **body,
                    "ignore_eos": True,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
            ).encode(),
            {"Content-Type": "application/json", **self.served.headers},
        )
        try:
            with urllib.request.urlopen(request, timeout=240) as reply:
                self.events = [
                    line.decode().strip() for line in reply if line.startswith(b"data: ")
                ]
        except OSError as error:
            self.error = repr(error)

    def tokens(self) -> int:
        """Tokens of a whole answer, as the engine counts them: a busy one may send two in an event."""
        assert self.events[-1] == "data: [DONE]"
        usage = json.loads(self.events[-2].removeprefix("data: "))["usage"]
        return int(usage["completion_tokens"])


class Late:
    """A few streams at a time, begun while one of two replicas is about to go."""

    AT_ONCE = 4

    def __init__(self, served: Served) -> None:
        self.served = served
        self.streams: list[Stream] = []

    def pid_of_the_leaving(self) -> int | None:
        """Process of a replica that has been told to stop, once there is one; else more streams."""
        replicas = self.served.ray.replicas(self.served.application["name"], DEPLOYMENT)
        leaving = [int(replica["pid"]) for replica in replicas if replica["state"] == "STOPPING"]
        if leaving:
            return leaving[0]
        alive = sum(stream.is_alive() for stream in self.streams)
        self.streams += [Stream(self.served) for _ in range(self.AT_ONCE - alive)]
        return None


def runs_a_request(served: Served, pid: int) -> bool:
    """Whether the engine of one replica runs a request, asked of that replica past the ingress.

    A busy replica may not answer at once, or not at all: then it is not known.
    """
    path = f"{served.application['route_prefix']}/metrics"
    connections = psutil.Process(pid).net_connections("tcp")
    for port in {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=15)
        try:
            connection.request("GET", path, headers=served.headers)
            lines = connection.getresponse().read().decode(errors="replace").splitlines()
        except (OSError, http.client.HTTPException):
            continue  # a port of Ray's own
        finally:
            connection.close()
        values = [x.rsplit(" ", 1)[1] for x in lines if x.startswith("vllm:num_requests_running{")]
        if values:
            return float(values[0]) > 0
    return False


def held_a_stream(served: Served, pid: int) -> bool:
    """Whether a replica that was told to stop is seen to run a request before its process ends."""
    try:
        return wait_until(
            lambda: runs_a_request(served, pid), 60, "a stream on the leaving replica"
        )
    except psutil.NoSuchProcess:
        return False


def states(served: Served) -> list[str]:
    """States of all replicas."""
    replicas = served.ray.replicas(served.application["name"], DEPLOYMENT)
    return sorted(replica["state"] for replica in replicas)


@pytest.mark.timeout(ROUNDS * 300)
def test_a_second_engine_comes_with_the_load_and_goes_without_cutting_a_stream():
    """1 → 2 while requests are above the target and a gang is free; back to 1; each stream whole."""
    with tempfile.TemporaryDirectory(prefix="rse-", dir="/tmp") as name:
        plan = make_plan(
            Path(name),
            node_pools=[{"name": "local", "hosts": 1, "gpu": "cpu", "gpus_per_host": 2}],
            parallelism={"tensor": 1},
            replicas=REPLICAS,
            limits={"max_num_seqs": 8, "max_model_len": 2048, "kv_cache_gib": 1},
        )
        with Served(plan, Path(name), gangs=2) as served:
            streams: list[Stream] = []
            for _ in range(ROUNDS):
                streams += [Stream(served) for _ in range(plan.scaling.target_in_flight + 6)]
                wait_until(lambda: states(served) == ["RUNNING"] * 2, 200, "two running replicas")
                late = Late(served)
                pid = wait_until(late.pid_of_the_leaving, 200, "a replica that is given back")
                streams += late.streams
                if held := held_a_stream(served, pid):
                    break
            assert held
            for stream in streams:
                stream.join(240)
            assert [stream.error for stream in streams if stream.error] == []
            assert {stream.tokens() for stream in streams} == {TOKENS}
            wait_until(lambda: states(served) == ["RUNNING"], 60, "one replica again")
