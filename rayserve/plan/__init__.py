"""What is computed: the plan, which Ansible, the Serve application and the rollout read.

cluster.yml --(planner)--> plan.yml: Plan --(parse)--> Plan
"""

from __future__ import annotations

from rayserve.plan.estimates import (
    FirstTokenTime,
    LatencyEstimate,
    LatencyTerm,
    MemoryEstimate,
    MemoryTerm,
    NextTokenTime,
    StartEstimate,
)
from rayserve.plan.model import (
    PLAN_KEY,
    PLAN_VERSION,
    DoorPlan,
    Endpoint,
    LivePlan,
    LoraAdapter,
    NodePoolPlan,
    Placement,
    Plan,
    ReplicaPlan,
    ScalingPlan,
    StoredBytes,
    Timeouts,
)
from rayserve.plan.parse import parse_plan
from rayserve.plan.record import NamedValue, Record

__all__ = [
    "PLAN_KEY",
    "PLAN_VERSION",
    "DoorPlan",
    "Endpoint",
    "FirstTokenTime",
    "LatencyEstimate",
    "LatencyTerm",
    "LivePlan",
    "LoraAdapter",
    "MemoryEstimate",
    "MemoryTerm",
    "NamedValue",
    "NextTokenTime",
    "NodePoolPlan",
    "Placement",
    "Plan",
    "Record",
    "ReplicaPlan",
    "ScalingPlan",
    "StartEstimate",
    "StoredBytes",
    "Timeouts",
    "parse_plan",
]
