"""Does the installed Ray Serve treat the autoscaling policy as `rayserve.autoscaling` expects?"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from rayserve.autoscaling import ReplicaLoad, autoscaling_config, report
from rayserve.gangs import Claim, Snapshot
from rayserve.plan import Placement, ScalingPlan

pytestmark = [
    pytest.mark.contract,
    # `metrics_interval_s` is deprecated in words only: see the test on it below.
    pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning"),
]

PLACEMENT = Placement(
    tensor_parallel_size=8,
    pipeline_parallel_size=1,
    strategy="STRICT_PACK",
    bundles=[{"GPU": 8}],
    executor="mp",
)
PLAN = ScalingPlan(
    min_replicas=1,
    max_replicas=3,
    target_in_flight=4,
    target_kv_usage=0.9,
    upscale_delay_s=0,
    downscale_delay_s=0,
)


@dataclass
class FakeWatcher:
    """A watcher that says what the test says."""

    nodes: tuple[dict[str, float], ...] = ()
    claims: list[Claim] = field(default_factory=list)

    def read(self, now_s: float) -> tuple[Snapshot, list[Claim]]:
        """A view taken just now."""
        return Snapshot(now_s, self.nodes, ()), []

    def claim(self, claim: Claim) -> None:
        """Remember a claim for the test to look at."""
        self.claims.append(claim)


@pytest.fixture
def watcher(monkeypatch: pytest.MonkeyPatch) -> FakeWatcher:
    """Stands in for the thread that asks Ray."""
    from rayserve.serving import capacity

    fake = FakeWatcher()
    monkeypatch.setattr(capacity, "watcher", lambda: fake)
    return fake


class Deployment:
    """Serve's own autoscaling state of one deployment, fed as its controller feeds it."""

    def __init__(self, plan: ScalingPlan, running: int) -> None:
        from ray.serve._private.autoscaling_state import DeploymentAutoscalingState
        from ray.serve._private.common import DeploymentID, ReplicaID
        from ray.serve._private.config import DeploymentConfig
        from ray.serve.config import AutoscalingConfig

        name = DeploymentID("Engine", "chat")
        self.target = running
        self.replicas = [ReplicaID(f"r{number}", name) for number in range(running)]
        self.state = DeploymentAutoscalingState(name)
        config = AutoscalingConfig(**autoscaling_config(plan, PLACEMENT))
        info: Any = SimpleNamespace(
            deployment_config=DeploymentConfig(autoscaling_config=config),
            target_capacity=None,
            target_capacity_direction=None,
            config_changed=lambda _: True,
        )
        self.state.register(info, running)
        self.state.update_running_replica_ids(self.replicas)

    def push(self, values: dict[str, float]) -> None:
        """A report with these values from every running replica."""
        from ray.serve._private.common import ReplicaMetricReport, TimeStampedValue

        now = time.time()
        metrics = {key: [TimeStampedValue(now, value)] for key, value in values.items()}
        for replica in self.replicas:
            self.state.record_request_metrics_for_replica(
                ReplicaMetricReport(replica, metrics, now)
            )

    def decide(self) -> int:
        """One tick of Serve's control loop."""
        self.target = self.state.get_decision_num_replicas(self.target)
        return self.target


def load(requests: float, plan: ScalingPlan = PLAN) -> dict[str, float]:
    """A replica's report."""
    return report(ReplicaLoad(requests, requests, 0, 0.1, float("nan")), plan)


def test_serve_follows_the_policy_up_and_down(watcher: FakeWatcher) -> None:
    """Serve takes the policy from the config, hands it the reports and applies what it returns."""
    watcher.nodes = ({"GPU": 8.0},)
    deployment = Deployment(PLAN, running=1)
    deployment.push(load(99))
    assert deployment.decide() == 2
    assert [claim.gangs for claim in watcher.claims] == [1]
    idle = Deployment(PLAN, running=2)
    idle.push(load(0))
    assert idle.decide() == 1


def test_serve_asks_for_nothing_without_a_gang(watcher: FakeWatcher) -> None:
    """The same load without free GPUs leaves the number of replicas alone."""
    watcher.nodes = ({"GPU": 7.0},)
    deployment = Deployment(PLAN, running=1)
    deployment.push(load(99))
    assert deployment.decide() == 1
    assert watcher.claims == []


def test_the_delays_are_those_that_replicas_report(watcher: FakeWatcher) -> None:
    """The delay in a report holds growth back, though Serve's own delay is 0."""
    watcher.nodes = ({"GPU": 8.0},)
    deployment = Deployment(PLAN, running=1)
    deployment.push(load(99, PLAN.model_copy(update={"upscale_delay_s": 600.0})))
    assert deployment.decide() == 1
    deployment.push(load(99, PLAN))
    assert deployment.decide() == 2


def test_replicas_without_reports_change_nothing(watcher: FakeWatcher) -> None:
    """A deployment whose replicas report nothing, or only their request count, stays as it is."""
    watcher.nodes = ({"GPU": 8.0},)
    deployment = Deployment(PLAN, running=2)
    assert deployment.decide() == 2
    deployment.push({"running_requests": 99.0})
    assert deployment.decide() == 2


def test_a_failure_inside_never_reaches_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception would stop Serve's loop from updating any application, so none gets out."""
    from rayserve.serving import capacity

    def broken() -> None:
        raise RuntimeError("no cluster")

    monkeypatch.setattr(capacity, "watcher", broken)
    deployment = Deployment(PLAN, running=2)
    deployment.push(load(99))
    assert deployment.decide() == 2


def test_the_policy_never_waits_for_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """While Ray's head does not answer, a decision still comes at once: no growth."""
    from rayserve.serving import capacity

    answer = threading.Event()
    asked = threading.Event()

    def take_snapshot() -> None:
        asked.set()
        answer.wait(30)

    monkeypatch.setattr(capacity, "PERIOD_S", 0.01)
    monkeypatch.setattr(capacity, "take_snapshot", take_snapshot)
    stuck = capacity.ClusterWatcher()
    monkeypatch.setattr(capacity, "watcher", lambda: stuck)
    deployment = Deployment(PLAN, running=1)
    deployment.push(load(99))
    assert asked.wait(5)
    start = time.monotonic()
    assert [deployment.decide() for _ in range(20)] == [1] * 20
    assert time.monotonic() - start < 1.0
    stuck.stop()
    answer.set()


def test_policies_share_one_watcher() -> None:
    """Serve pickles the policy's module by value, and its watcher's module by reference."""
    from ray.serve._private.autoscaling_state import _resolve_policy_callable
    from ray.serve.config import AutoscalingConfig

    from rayserve.serving import capacity

    config = AutoscalingConfig(**autoscaling_config(PLAN, PLACEMENT))
    policy = _resolve_policy_callable(config.policy)
    assert type(policy).__name__ == "CapacityPolicy"
    assert type(policy)._decide.__globals__["capacity"] is capacity


@pytest.fixture
def code_version() -> Iterator[Any]:
    """Serve's hash of what restarts an application, for a plan and a placement."""
    from ray.serve._private.deploy_utils import get_app_code_version
    from ray.serve.schema import ServeApplicationSchema

    def version(plan: ScalingPlan | None, placement: Placement = PLACEMENT) -> str:
        override: dict[str, Any] = {"name": "Engine"}
        if plan is not None:
            override |= {
                "autoscaling_config": autoscaling_config(plan, placement),
                "user_config": {"scaling": plan.model_dump()},
            }
        return get_app_code_version(
            ServeApplicationSchema(
                name="chat",
                route_prefix="/chat",
                import_path="rayserve.app:build",
                args={},
                deployments=[override],
            )
        )

    return version


def test_every_edit_of_the_plan_keeps_the_code_version(code_version: Any) -> None:
    """No field of the scaling plan takes part in what restarts the model."""
    before = code_version(PLAN)
    for name in ScalingPlan.model_fields:
        value = 0.5 if name == "target_kv_usage" else 3
        assert code_version(PLAN.model_copy(update={name: value})) == before, name


def test_a_first_override_or_another_gang_restarts(code_version: Any) -> None:
    """Why the override stands from the first day, and why its policy holds the placement alone."""
    before = code_version(PLAN)
    assert code_version(None) != before
    other = PLACEMENT.model_copy(update={"bundles": [{"GPU": 4}]})
    assert code_version(PLAN, other) != before


def test_serve_reads_the_interval_that_it_calls_deprecated() -> None:
    """The replica's report interval is the config's field, not the variable named in the warning."""
    from ray.serve._private.replica import ReplicaMetricsManager

    source = inspect.getsource(ReplicaMetricsManager.start_metrics_pusher)
    assert "autoscaling_config.metrics_interval_s" in source
    assert "PUSH_INTERVAL_S" not in source


def test_from_zero_serve_asks_for_one_by_itself(watcher: FakeWatcher) -> None:
    """With no replica running and a request waiting, Serve does not ask the policy."""
    from ray.serve.autoscaling_policy import _get_cold_start_scale_up_replicas

    context: Any = SimpleNamespace(
        current_num_replicas=0,
        total_num_requests=1,
        target_num_replicas=0,
        config=SimpleNamespace(get_upscaling_factor=lambda: 1.0),
    )
    assert _get_cold_start_scale_up_replicas(context) == 1
    to_zero = PLAN.model_copy(update={"min_replicas": 0})
    assert Deployment(to_zero, running=0).decide() == 0
