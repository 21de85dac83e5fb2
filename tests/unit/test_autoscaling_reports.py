"""Does a replica report its load as the policy reads it, and hold no opinion where it knows nothing?"""

from __future__ import annotations

import math

import pytest

from rayserve import autoscaling
from rayserve.autoscaling import (
    ReplicaLoad,
    autoscaling_config,
    parse_report,
    report,
)
from rayserve.plan import Placement, ScalingPlan
from tests.unit.scaling import PLAN, replica

PLACEMENT = Placement(
    tensor_parallel_size=8,
    pipeline_parallel_size=1,
    strategy="STRICT_PACK",
    bundles=[{"GPU": 8}],
    executor="mp",
)


def test_a_report_carries_load_and_plan_as_floats() -> None:
    """Serve turns reports off for good at the first value that is no number."""
    values = report(ReplicaLoad(3, 2, 1, 0.5, 120.0), PLAN)
    assert set(values) == {*autoscaling.LOAD_KEYS, *autoscaling.SETTING_KEYS}
    assert all(type(value) is float for value in values.values())
    assert parse_report(values) == ReplicaLoad(3, 2, 1, 0.5, 120.0)


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -1.0])
@pytest.mark.parametrize("key", ["in_flight", "running", "waiting", "kv_usage"])
def test_a_report_with_a_bad_value_is_no_report(key: str, bad: float | None) -> None:
    """Missing, not finite and negative counts make the load unknown."""
    values: dict[str, float | None] = dict(report(replica(3), PLAN))
    assert parse_report(values | {key: bad}) is None


@pytest.mark.parametrize(
    "ttft_ms, expected",
    [
        (math.nan, replica(3)),
        (None, replica(3)),
        (0.0, replica(3)),
        (-1.0, None),
        (math.inf, None),
    ],
)
def test_no_first_token_lately_is_not_a_fault(
    ttft_ms: float | None, expected: ReplicaLoad | None
) -> None:
    """Without a recent first token the load is known; with nonsense for it, it is not."""
    values: dict[str, float | None] = dict(report(replica(3), PLAN))
    assert parse_report(values | {"ttft_ms": ttft_ms}) == expected


def test_the_policy_in_serve_config_depends_on_the_placement_alone() -> None:
    """Serve restarts a model whose policy changes, so no number that people edit is in it."""
    edited = ScalingPlan(
        min_replicas=2,
        max_replicas=3,
        target_in_flight=1,
        target_kv_usage=0.1,
        upscale_delay_s=1,
        downscale_delay_s=2,
        ttft_slo_ms=3,
    )
    first, second = autoscaling_config(PLAN, PLACEMENT), autoscaling_config(edited, PLACEMENT)
    assert first["policy"] == second["policy"]
    assert first != second


def test_a_fixed_number_of_replicas_is_autoscaled_too() -> None:
    """With min = max the override stands as well, so that a later edit is not the first one."""
    fixed = PLAN.model_copy(update={"max_replicas": 1})
    config = autoscaling_config(fixed, PLACEMENT)
    assert (config["min_replicas"], config["max_replicas"]) == (1, 1)
    assert config["policy"]["policy_function"] == autoscaling.POLICY


@pytest.mark.parametrize("delay_s, interval_s", [(0, 0.5), (3, 1.0), (15, 5.0), (600, None)])
def test_a_delay_spans_several_reports(delay_s: float, interval_s: float | None) -> None:
    """Short delays get quicker reports; long ones keep Serve's default of 10 s."""
    plan = PLAN.model_copy(update={"upscale_delay_s": delay_s, "downscale_delay_s": 900})
    config = autoscaling_config(plan, PLACEMENT)
    assert config.get("metrics_interval_s") == interval_s
    assert config["look_back_period_s"] > (interval_s or 10)
