"""Does a real Serve grow and shrink as `rayserve.autoscaling` says, and never beyond the GPUs?

Ray and Serve are real; a light deployment stands in for the engine (`tests/engine/stand_in.py`),
since this is about Serve's control of replicas. The checks take a `Service`, so that the same can
be run on the real engine.
"""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import pytest

from rayserve.autoscaling import autoscaling_config
from rayserve.plan import Placement, ScalingPlan
from tests.ports import free_port
from tests.ray_cluster import RayCluster, wait_until

pytestmark = pytest.mark.engine

GANG = 8
PLACEMENT = Placement(
    tensor_parallel_size=GANG,
    pipeline_parallel_size=1,
    strategy="STRICT_PACK",
    bundles=[{"GPU": GANG}],
    executor="mp",
)
PLAN = ScalingPlan(
    min_replicas=1,
    max_replicas=2,
    target_in_flight=4,
    target_kv_usage=0.9,
    upscale_delay_s=1,
    downscale_delay_s=2,
)
DRAIN_S = 25.0


@dataclass
class Stream:
    """One streamed answer, read in a thread of its own."""

    url: str
    ticks: int
    lines: list[str] = field(default_factory=list)
    error: str = ""

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            with urllib.request.urlopen(f"{self.url}?ticks={self.ticks}", timeout=90) as reply:
                self.lines.extend(raw.decode().strip() for raw in reply)
        except OSError as error:
            self.error = repr(error)

    @property
    def running(self) -> bool:
        """Whether the end of the answer has not come yet."""
        return self._thread.is_alive()

    def pid(self) -> int:
        """Process that answers; waits for the first line."""
        wait_until(lambda: bool(self.lines or self.error), 20, "first line of a stream")
        assert not self.error
        return int(self.lines[0].split()[1])

    def assert_whole(self) -> None:
        """Wait for the end; every line must be there, in order."""
        self._thread.join(60)
        expected = [f"tick {number}" for number in range(self.ticks)] + ["done"]
        assert not self.error
        assert self.lines[1:] == expected


@dataclass
class Service:
    """A deployment under test and the cluster it runs on."""

    cluster: RayCluster
    port: int
    application: str = "chat"

    def config(self, plan: ScalingPlan, *, others: int = 0) -> dict[str, Any]:
        """The Serve config of this service, beside `others` applications that hold a gang each."""
        names = [self.application, *(f"other{number}" for number in range(others))]
        fixed = PLAN.model_copy(update={"max_replicas": 1})
        return {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": self.port},
            "applications": [
                self._application(name, plan if name == self.application else fixed)
                for name in reversed(names)
            ],
        }

    def _application(self, name: str, plan: ScalingPlan) -> dict[str, Any]:
        return {
            "name": name,
            "route_prefix": f"/{name}",
            "import_path": "tests.engine.stand_in:build",
            "args": {"gpus": GANG},
            "deployments": [
                {
                    "name": "Engine",
                    "max_ongoing_requests": 100,
                    "graceful_shutdown_timeout_s": DRAIN_S,
                    "graceful_shutdown_wait_loop_s": 0.2,
                    "user_config": {"scaling": plan.model_dump(mode="json")},
                    "autoscaling_config": autoscaling_config(plan, PLACEMENT),
                }
            ],
        }

    def stream(self, seconds: float) -> Stream:
        """Open an answer that takes this long."""
        return Stream(f"http://127.0.0.1:{self.port}/{self.application}", int(seconds * 10))

    def replicas(self, state: str, application: str = "") -> list[dict[str, Any]]:
        """Replicas in one of Serve's states."""
        replicas = self.cluster.replicas(application or self.application, "Engine")
        return [replica for replica in replicas if replica["state"] == state]

    def wait_running(self, count: int, timeout_s: float = 40, application: str = "") -> list[int]:
        """Wait until exactly `count` replicas run; returns their process ids."""

        def reached() -> list[int] | None:
            pids = [replica["pid"] for replica in self.replicas("RUNNING", application)]
            return pids if len(pids) == count else None

        return wait_until(reached, timeout_s, f"{count} running replicas")


class PlacementWatch:
    """Polls placement groups and keeps those that were seen waiting twice in a row."""

    def __init__(self, cluster: RayCluster) -> None:
        self.stuck: set[str] = set()
        self.polls = 0
        self._cluster = cluster
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(20)

    def _watch(self) -> None:
        before: set[str] = set()
        while not self._end.wait(0.5):
            groups = self._cluster.placement_groups()
            waiting = {group["name"] for group in groups if group["state"] != "CREATED"}
            self.stuck |= waiting & before
            self.polls += 1
            before = waiting


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """A Serve on two gangs of logical GPUs, stopped with everything that it started."""
    with RayCluster(num_gpus=2 * GANG, num_cpus=4) as cluster:
        yield Service(cluster, free_port())
    assert cluster.members() == []
    assert not cluster.temp_dir.exists()


def test_grows_under_load_and_shrinks_without_cutting_a_stream(service: Service) -> None:
    """With two gangs free: 1 → 2 under load, and back to 1 while streams on both run to their end."""
    service.cluster.deploy(service.config(PLAN))
    service.wait_running(1, 60)
    with PlacementWatch(service.cluster) as watch:
        load = [service.stream(6) for _ in range(10)]
        pids = service.wait_running(2)
        for stream in load:
            stream.assert_whole()
        # Low enough for one replica, but spread over both: one after the other, since Serve's proxy
        # sends those that come at once wherever it last heard of the shorter queue.
        kept = []
        for _ in range(3):
            kept.append(service.stream(14))
            kept[-1].pid()
        assert {stream.pid() for stream in kept} == set(pids)
        (survivor,) = service.wait_running(1)
        drained = [stream for stream in kept if stream.pid() != survivor]
        assert drained
        assert all(stream.running for stream in drained)
        late = service.stream(1)
        assert late.pid() == survivor
        for stream in [*kept, late]:
            stream.assert_whole()
    assert watch.polls > 10
    assert watch.stuck == set()


def test_editing_the_plan_keeps_the_process(service: Service) -> None:
    """Other bounds, targets and delays reach the policy, and no replica restarts."""
    service.cluster.deploy(service.config(PLAN))
    before = service.wait_running(1)
    edited = PLAN.model_copy(
        update={"max_replicas": 3, "target_in_flight": 8, "target_kv_usage": 0.5}
        | {"upscale_delay_s": 600.0, "downscale_delay_s": 900.0, "ttft_slo_ms": 100.0}
    )
    service.cluster.deploy(service.config(edited))
    deployed = wait_until(
        lambda: _deployed_max(service) == 3 or None, 20, "the edited config in Serve's status"
    )
    assert deployed
    # Load that PLAN would answer within 2 s; the edited delay of 600 s must hold it.
    load = [service.stream(6) for _ in range(10)]
    for stream in load:
        stream.assert_whole()
    assert service.wait_running(1) == before
    assert service.replicas("STARTING") == []


def test_asks_for_no_replica_without_a_gang(service: Service) -> None:
    """With one gang the same load never makes a pending replica; a freed gang is then taken."""
    service.cluster.deploy(service.config(PLAN))
    service.wait_running(1)
    service.cluster.deploy(service.config(PLAN, others=1))
    service.wait_running(1, application="other0")
    with PlacementWatch(service.cluster) as watch:
        load = [service.stream(20) for _ in range(10)]
        deadline = time.monotonic() + 8
        while time.monotonic() < deadline:
            assert service.replicas("STARTING") == []
            time.sleep(0.3)
        assert watch.stuck == set()
        service.cluster.deploy(service.config(PLAN))
        service.wait_running(2)
        assert watch.stuck == set()
    for stream in load:
        stream.assert_whole()
    service.wait_running(1)


def test_takes_back_a_replica_that_cannot_be_placed(service: Service) -> None:
    """A minimum beyond the GPUs leaves a pending replica; with the minimum gone, it is told to stop.

    Its group goes with the end of the drain limit: Serve waits that long for a replica that never ran.
    """
    # Ten minutes, so that what goes is taken back rather than given back for lack of load.
    patient = PLAN.model_copy(update={"max_replicas": 3, "downscale_delay_s": 600.0})
    service.cluster.deploy(service.config(patient))
    (pid,) = service.wait_running(1)
    service.cluster.deploy(service.config(patient.model_copy(update={"min_replicas": 3})))
    wait_until(lambda: _waiting(service.cluster) or None, 20, "a pending placement group")
    assert pid in service.wait_running(2)
    service.cluster.deploy(service.config(patient))
    wait_until(lambda: "STOPPING" in _states(service), 20, "a replica that is taken back")
    assert pid in service.wait_running(2)
    wait_until(lambda: not _waiting(service.cluster), DRAIN_S + 20, "no pending placement group")


def _states(service: Service) -> set[str]:
    return {replica["state"] for replica in service.cluster.replicas(service.application, "Engine")}


def _waiting(cluster: RayCluster) -> list[str]:
    groups = cluster.placement_groups()
    return [group["name"] for group in groups if group["state"] != "CREATED"]


def _deployed_max(service: Service) -> int:
    application = service.cluster.serve_status()["applications"][service.application]
    config = application["deployments"]["Engine"]["deployment_config"]
    return int(config["autoscaling_config"]["max_replicas"])
