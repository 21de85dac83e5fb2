"""A scaling plan, and the load of a replica."""

from __future__ import annotations

from rayserve.autoscaling import (
    ReplicaLoad,
)
from rayserve.plan import ScalingPlan

PLAN = ScalingPlan(
    min_replicas=1,
    max_replicas=4,
    target_in_flight=10,
    target_kv_usage=0.8,
    upscale_delay_s=30,
    downscale_delay_s=300,
    ttft_slo_ms=500,
)


def replica(requests: float = 0, kv_usage: float = 0, ttft_ms: float = 0) -> ReplicaLoad:
    """A replica on which door and engine agree."""
    return ReplicaLoad(requests, requests, 0, kv_usage, ttft_ms)
