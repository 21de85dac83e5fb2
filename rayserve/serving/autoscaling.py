"""How does Ray Serve ask `rayserve.autoscaling` for the number of replicas?

Serve instantiates `CapacityPolicy` in its controller, again after every change of the deployment's
config, and calls it at each turn of its control loop, twice a second. So it never waits: loads come
from the replicas' last reports, free gangs from the watcher's last view of the cluster.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, Protocol

from pydantic import ValidationError

from rayserve import autoscaling
from rayserve.autoscaling import Decision, Load, ReplicaLoad, Replicas, State
from rayserve.gangs import Claim, capacity_of
from rayserve.plan import Placement, ScalingPlan
from rayserve.serving import capacity

logger = logging.getLogger("ray.serve")

REPORT_MAX_AGE_S = 30.0
"""A replica whose report has not changed for this long has no known load."""

_STATE_KEY = "rayserve"


class _Sample(Protocol):
    """One point of Serve's time series."""

    timestamp: float
    value: float


_Series = Iterable[_Sample]
_RawMetrics = Mapping[str, Mapping[Hashable, _Series]]


class CapacityPolicy:
    """Serve's autoscaling policy for one deployment: replicas as load asks and free gangs allow."""

    def __init__(self, placement: dict[str, Any]) -> None:
        self._placement = Placement.model_validate(placement)
        self._reports: dict[Hashable, tuple[float, float]] = {}
        self._reason = ""

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        """Serve's entry: from an AutoscalingContext, the replicas to ask for and a state."""
        try:
            decision = self._decide(ctx, time.monotonic())
        except Exception:
            # Entry of Serve's controller into our code: what is raised here would stop its control
            # loop from updating any application, so the number of replicas just stays as it is.
            if self._reason != "failed":
                logger.exception("autoscaling of %s failed; its replicas stay", ctx.deployment_id)
            self._reason = "failed"
            return ctx.target_num_replicas, {}
        self._log(ctx, decision)
        return decision.target, {_STATE_KEY: asdict(decision.state)}

    def _decide(self, ctx: Any, now_s: float) -> Decision:
        replicas = Replicas(ctx.current_num_replicas, ctx.target_num_replicas)
        raw: _RawMetrics = ctx.raw_metrics or {}
        plan = _plan(ctx, raw)
        if plan is None:
            return Decision(replicas.target, "no replica has reported the plan", State())
        owner = f"SERVE_REPLICA::{ctx.app_name}#{ctx.deployment_name}#"
        watcher = capacity.watcher()
        snapshot, claims = watcher.read(now_s)
        room = capacity_of(
            snapshot,
            claims,
            owner=owner,
            running=frozenset(replica.to_full_id_str() for replica in ctx.running_replicas),
            target=replicas.target,
            placement=self._placement,
            now_s=now_s,
        )
        state = State(**ctx.policy_state.get(_STATE_KEY, {}))
        load = self._load(ctx.running_replicas, raw, now_s)
        decision = autoscaling.decide(load, room, replicas, plan, state, now_s)
        grown = decision.target - replicas.target
        if grown > 0:
            watcher.claim(Claim(owner, grown, self._placement, now_s))
        return decision

    def _load(self, replicas: Iterable[Hashable], raw: _RawMetrics, now_s: float) -> Load:
        reports: dict[Hashable, tuple[float, float]] = {}
        loads: list[ReplicaLoad | None] = []
        for replica in replicas:
            newest = _newest(raw.get(autoscaling.IN_FLIGHT, {}).get(replica, ()))
            if newest is None:
                loads.append(None)
                continue
            # Age on this process's clock, since the clock of another host may differ.
            known = self._reports.get(replica)
            seen_s = known[1] if known and known[0] == newest.timestamp else now_s
            reports[replica] = (newest.timestamp, seen_s)
            fresh = now_s - seen_s <= REPORT_MAX_AGE_S
            loads.append(_replica_load(raw, replica) if fresh else None)
        self._reports = reports
        return Load(tuple(loads))

    def _log(self, ctx: Any, decision: Decision) -> None:
        if decision.reason == self._reason and decision.target == ctx.target_num_replicas:
            return
        self._reason = decision.reason
        logger.info(
            "autoscaling of %s: %d running, %d asked for, now %d: %s",
            ctx.deployment_id,
            ctx.current_num_replicas,
            ctx.target_num_replicas,
            decision.target,
            decision.reason,
        )


def _plan(ctx: Any, raw: _RawMetrics) -> ScalingPlan | None:
    """The plan: bounds and target from Serve's config, the rest from the newest report."""
    by_replica = raw.get(autoscaling.TARGET_KV_USAGE, {})
    newest = {replica: _newest(series) for replica, series in by_replica.items()}
    dated = {replica: sample.timestamp for replica, sample in newest.items() if sample is not None}
    if not dated:
        return None
    replica = max(dated, key=lambda candidate: dated[candidate])
    settings = {}
    for key in autoscaling.SETTING_KEYS:
        sample = _newest(raw.get(key, {}).get(replica, ()))
        if sample is None:
            return None
        settings[key] = sample.value
    try:
        return ScalingPlan(
            min_replicas=ctx.capacity_adjusted_min_replicas,
            max_replicas=ctx.capacity_adjusted_max_replicas,
            target_in_flight=ctx.config.target_ongoing_requests,
            **settings,
        )
    except ValidationError:
        return None


def _replica_load(raw: _RawMetrics, replica: Hashable) -> ReplicaLoad | None:
    values = {key: _mean(raw.get(key, {}).get(replica, ())) for key in autoscaling.LOAD_KEYS}
    return autoscaling.parse_report(values)


def _newest(series: _Series) -> _Sample | None:
    return max(series, key=lambda sample: sample.timestamp, default=None)


def _mean(series: _Series) -> float | None:
    """Mean of the samples, which cover Serve's look-back period; NaN samples are left out."""
    values = [sample.value for sample in series if not math.isnan(sample.value)]
    return sum(values) / len(values) if values else None
