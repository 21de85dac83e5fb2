"""Do replicas with real engines come and go with the load, and is no stream cut when one goes?"""

from __future__ import annotations

import json
import tempfile
import threading
import urllib.request
from pathlib import Path

from rayserve.serve_config import DEPLOYMENT
from tests.ray_cluster import wait_until
from tests.served import Served, make_plan

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


def states(served: Served) -> list[str]:
    """States of all replicas."""
    replicas = served.ray.replicas(served.application["name"], DEPLOYMENT)
    return sorted(replica["state"] for replica in replicas)


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
            streams = [Stream(served) for _ in range(plan.scaling.target_in_flight + 6)]
            wait_until(lambda: states(served) == ["RUNNING"] * 2, 200, "two running replicas")
            # These run while the second replica is told to go.
            streams += [Stream(served) for _ in range(2)]
            wait_until(lambda: "STOPPING" in states(served), 200, "a replica that is given back")
            for stream in streams:
                stream.join(240)
            assert [stream.error for stream in streams if stream.error] == []
            assert {stream.tokens() for stream in streams} == {TOKENS}
            wait_until(lambda: states(served) == ["RUNNING"], 60, "one replica again")
