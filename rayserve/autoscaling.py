"""How many replicas should there be now, given the load and the gangs of GPUs that are free?

    replica: report(ReplicaLoad, ScalingPlan) ──> Serve ──> policy: parse_report ──> Load ┐
    Ray: rayserve.gangs ───────────> Capacity ─────────────────────────────────────────── decide
                                                                                          │
                                                              Decision(target, reason, state)

A replica that cannot be placed stays pending for ever, so `decide` never asks for more replicas
than there are gangs free. It grows when the load has been above a target for `upscale_delay_s`,
and gives back one replica at a time when the load has for `downscale_delay_s` been so low that the
others stay clearly below every target. Where the load is not known it changes nothing.

The adapter to Ray Serve is `rayserve.serving.autoscaling`. Numbers that people may edit travel as
part of each replica's report (see `report`), because Serve restarts a model whose autoscaling
policy, arguments included, changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rayserve.gangs import Capacity
from rayserve.plan import Placement, ScalingPlan

POLICY = "rayserve.serving.autoscaling:CapacityPolicy"

# Keys of a replica's report, which is what its `record_autoscaling_stats()` returns.
IN_FLIGHT = "in_flight"
"""Requests that the door has let in and that are not finished."""
RUNNING = "running"
"""Requests in the engine's batch."""
WAITING = "waiting"
"""Requests in the engine's queue."""
KV_USAGE = "kv_usage"
"""Share of the KV cache in use, 0 to 1."""
TTFT_MS = "ttft_ms"
"""Recent mean time to first token; 0 or NaN: no request had its first token recently."""
TARGET_KV_USAGE = "target_kv_usage"
TTFT_SLO_MS = "ttft_slo_ms"
UPSCALE_DELAY_S = "upscale_delay_s"
DOWNSCALE_DELAY_S = "downscale_delay_s"
LOAD_KEYS = (IN_FLIGHT, RUNNING, WAITING, KV_USAGE, TTFT_MS)
SETTING_KEYS = (TARGET_KV_USAGE, TTFT_SLO_MS, UPSCALE_DELAY_S, DOWNSCALE_DELAY_S)

HEADROOM = 0.8
"""A replica is given back only if the others then carry at most this share of each target."""
PLACEMENT_GRACE_S = 5.0
"""A replica that has waited this long for a gang is taken back; Ray places one within a second."""

_MAX_REPORT_INTERVAL_S = 10.0  # Serve's default
_MIN_REPORT_INTERVAL_S = 0.5
_REPORTS_PER_DELAY = 3
_ROUNDING = 1e-9  # sums of shares such as 0.1 + 0.2 are not exact


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What one running replica reports; the fields are the report's keys."""

    in_flight: float
    running: float
    waiting: float
    kv_usage: float
    ttft_ms: float = 0.0

    @property
    def requests(self) -> float:
        """Requests that the replica carries, whichever counter has seen more of them."""
        return max(self.in_flight, self.running + self.waiting)


@dataclass(frozen=True, slots=True)
class Load:
    """Load of all running replicas; None stands for one whose load is not known."""

    replicas: tuple[ReplicaLoad | None, ...]

    def known(self) -> list[ReplicaLoad] | None:
        """The loads, or None unless every running replica's is known."""
        loads = [load for load in self.replicas if load is not None]
        return loads if loads and len(loads) == len(self.replicas) else None


@dataclass(frozen=True, slots=True)
class Replicas:
    """Replicas now: those that run, and those that were asked for."""

    running: int
    target: int


@dataclass(frozen=True, slots=True)
class State:
    """What one decision leaves for the next: since when each condition holds, on `now_s`'s clock."""

    above_since_s: float | None = None
    below_since_s: float | None = None
    unplaced_since_s: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """Replicas to ask for, and why in a few words that do not vary with the numbers."""

    target: int
    reason: str
    state: State


def decide(
    load: Load,
    capacity: Capacity,
    replicas: Replicas,
    plan: ScalingPlan,
    state: State,
    now_s: float,
) -> Decision:
    """The number of replicas to ask for.

    A pure function of its arguments; `now_s` is any clock that does not jump. To be called every
    second or faster, with the state of the decision before.
    """
    bounded = min(max(replicas.target, plan.min_replicas), plan.max_replicas)
    if bounded != replicas.target:
        return Decision(bounded, "outside the plan's bounds", State())
    unplaced = replicas.target > replicas.running and capacity.unplaced > 0
    since = _since(state.unplaced_since_s, now_s) if unplaced else None
    if since is not None and now_s - since >= PLACEMENT_GRACE_S:
        kept = max(plan.min_replicas, replicas.running, replicas.target - capacity.unplaced)
        if kept < replicas.target:
            return Decision(kept, "taken back: no gang for it", State())
    state = replace(state, unplaced_since_s=since)
    idle = replace(state, above_since_s=None, below_since_s=None)
    loads = load.known()
    if loads is None or len(loads) < replicas.running:
        # A delay counts only time in which the load was known.
        return Decision(replicas.target, "load not known", idle)
    wanted, why = _wanted(loads, replicas, plan)
    if wanted > replicas.target:
        return _grow(wanted, why, capacity, replicas, plan, state, now_s)
    if _may_shrink(loads, replicas, plan):
        return _shrink(replicas, plan, state, now_s)
    return Decision(replicas.target, "load fits", idle)


def _wanted(loads: Sequence[ReplicaLoad], replicas: Replicas, plan: ScalingPlan) -> tuple[int, str]:
    """Replicas that would carry this load, and the signal that asks for the most."""
    requests = sum(load.requests for load in loads)
    kv_usage = sum(load.kv_usage for load in loads)
    by_signal = [
        (math.ceil(requests / plan.target_in_flight), "requests above target"),
        (math.ceil(kv_usage / plan.target_kv_usage - _ROUNDING), "KV cache above target"),
    ]
    # First tokens that are late with at most one request a replica are no matter of load; and
    # while a replica is on its way, lateness says nothing about whether it will be enough.
    spread = requests > replicas.running and replicas.running >= replicas.target
    if spread and _mean_ttft_ms(loads) > plan.ttft_slo_ms > 0:
        by_signal.append((replicas.target + 1, "first tokens later than the objective"))
    return max(by_signal, key=lambda entry: entry[0])


def _mean_ttft_ms(loads: Sequence[ReplicaLoad]) -> float:
    seen = [load.ttft_ms for load in loads if load.ttft_ms > 0]
    return sum(seen) / len(seen) if seen else 0.0


def _grow(
    wanted: int,
    why: str,
    capacity: Capacity,
    replicas: Replicas,
    plan: ScalingPlan,
    state: State,
    now_s: float,
) -> Decision:
    since = _since(state.above_since_s, now_s)
    waiting = replace(state, above_since_s=since, below_since_s=None)
    if now_s - since < plan.upscale_delay_s:
        return Decision(replicas.target, why, waiting)
    if replicas.target >= plan.max_replicas:
        return Decision(replicas.target, f"{why}, but at max_replicas", waiting)
    if capacity.free_gangs <= 0:
        lack = "no gang is free" if capacity.known else "free gangs are not known"
        return Decision(replicas.target, f"{why}, but {lack}", waiting)
    target = min(wanted, plan.max_replicas, replicas.target + capacity.free_gangs)
    return Decision(target, why, State())


def _may_shrink(loads: Sequence[ReplicaLoad], replicas: Replicas, plan: ScalingPlan) -> bool:
    """Whether one replica fewer would still leave every target clearly unreached."""
    left = replicas.target - 1
    if left < plan.min_replicas or replicas.running > replicas.target:
        return False
    requests = sum(load.requests for load in loads)
    if left == 0:
        return requests == 0
    kv_usage = sum(load.kv_usage for load in loads)
    late = 0 < plan.ttft_slo_ms * HEADROOM < _mean_ttft_ms(loads)
    return (
        requests <= HEADROOM * left * plan.target_in_flight
        and kv_usage <= HEADROOM * left * plan.target_kv_usage
        and not late
    )


def _shrink(replicas: Replicas, plan: ScalingPlan, state: State, now_s: float) -> Decision:
    since = _since(state.below_since_s, now_s)
    if now_s - since < plan.downscale_delay_s:
        waiting = replace(state, above_since_s=None, below_since_s=since)
        return Decision(replicas.target, "load low", waiting)
    return Decision(replicas.target - 1, "load low", State())


def _since(since_s: float | None, now_s: float) -> float:
    return now_s if since_s is None else min(since_s, now_s)


# -- What replicas report


def report(load: ReplicaLoad, plan: ScalingPlan) -> dict[str, float]:
    """What a replica's `record_autoscaling_stats()` returns: its load, and the plan it was given.

    Only floats: Serve turns the reports off for good at the first value that is no number.
    """
    return {
        IN_FLIGHT: float(load.in_flight),
        RUNNING: float(load.running),
        WAITING: float(load.waiting),
        KV_USAGE: float(load.kv_usage),
        TTFT_MS: float(load.ttft_ms),
        TARGET_KV_USAGE: float(plan.target_kv_usage),
        TTFT_SLO_MS: float(plan.ttft_slo_ms),
        UPSCALE_DELAY_S: float(plan.upscale_delay_s),
        DOWNSCALE_DELAY_S: float(plan.downscale_delay_s),
    }


def parse_report(values: Mapping[str, float | None]) -> ReplicaLoad | None:
    """The load in a report, or None where a value is missing, not finite or negative.

    Only the time to first token may be absent or NaN: then no request had its first token lately.
    """
    ttft_ms = values.get(TTFT_MS)
    amounts = {**values, TTFT_MS: 0.0 if ttft_ms is None or math.isnan(ttft_ms) else ttft_ms}
    numbers = []
    for key in LOAD_KEYS:
        value = amounts.get(key)
        if value is None or not math.isfinite(value) or value < 0:
            return None
        numbers.append(value)
    return ReplicaLoad(*numbers)


def autoscaling_config(plan: ScalingPlan, placement: Placement) -> dict[str, Any]:
    """Serve's `autoscaling_config` for the `deployments:` override.

    Also where `min_replicas` equals `max_replicas`: the first override of a deployment that had
    none restarts it, and so does any change of `policy`, which therefore holds nothing but the
    placement; a change of that is a new revision anyway. Serve's own delays are 0 because the
    policy waits itself: it must be able to take back at once what cannot be placed.
    """
    config: dict[str, Any] = {
        "min_replicas": plan.min_replicas,
        "max_replicas": plan.max_replicas,
        "target_ongoing_requests": plan.target_in_flight,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "policy": {
            "policy_function": POLICY,
            "policy_kwargs": {"placement": placement.model_dump(mode="json")},
        },
    }
    delay_s = min(plan.upscale_delay_s, plan.downscale_delay_s)
    interval_s = max(_MIN_REPORT_INTERVAL_S, delay_s / _REPORTS_PER_DELAY)
    if interval_s < _MAX_REPORT_INTERVAL_S:
        # Serve calls this field deprecated, but it is the only one that Serve 2.60 reads.
        config["metrics_interval_s"] = interval_s
    config["look_back_period_s"] = 1.5 * min(interval_s, _MAX_REPORT_INTERVAL_S)
    return config
