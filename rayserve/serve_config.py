"""How the plan becomes Ray Serve's own language: a Serve config and a deployment's options.

What defines the replica (and so its revision) goes into the application's `args`; what may change
while the model keeps running goes into the `deployments:` override. Serve restarts a deployment
when `args` change, and keeps its replicas when only the override does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayserve.autoscaling import autoscaling_config
from rayserve.plan import LivePlan, NamedValue, Plan, ReplicaPlan

DEPLOYMENT = "Engine"
IMPORT_PATH = "rayserve.app:build"
HAPROXY_SWITCH = "RAY_SERVE_ENABLE_HA_PROXY"

_SPARE_SLOTS = 64
"""Requests beside inference (metrics, model lists, refusals) that Serve must never count as full."""


def replica_options(replica: ReplicaPlan) -> dict[str, Any]:
    """Options of the deployment that define a replica: its gang and its processes' environment.

    One host: the actor holds the whole gang and vLLM starts its workers as children. Across hosts:
    vLLM's Ray executor starts a worker actor in each one-GPU bundle, and the replica holds none.
    """
    placement = replica.placement
    first = placement.bundles[0]
    holds_gang = placement.executor == "mp"
    resources = {
        name: amount for name, amount in first.items() if name not in ("CPU", "GPU") and holds_gang
    }
    actor: dict[str, Any] = {
        "num_cpus": first.get("CPU", 0) if holds_gang else 0,
        "num_gpus": first.get("GPU", 0) if holds_gang else 0,
        "runtime_env": {"env_vars": {item.name: str(item.value) for item in replica.env}},
    }
    if resources:
        actor["resources"] = resources
    return {
        "ray_actor_options": actor,
        "placement_group_bundles": placement.bundles,
        "placement_group_strategy": placement.strategy,
    }


def live_options(plan: Plan) -> dict[str, Any]:
    """Options that may change while the model keeps running."""
    slots = 2 * (plan.door.max_in_flight + plan.door.max_queued) + _SPARE_SLOTS
    return {
        "autoscaling_config": autoscaling_config(plan.scaling, plan.replica.placement),
        # The door bounds the queue and answers in OpenAI's shape, so Serve's own bound lies beyond.
        "max_ongoing_requests": slots,
        "max_queued_requests": slots,
        "user_config": live_plan(plan).model_dump(mode="json"),
        "graceful_shutdown_timeout_s": plan.timeouts.drain_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": plan.timeouts.health_check_period_s,
        "health_check_timeout_s": plan.timeouts.health_check_timeout_s,
    }


def live_plan(plan: Plan) -> LivePlan:
    """What a running replica takes: Serve's `user_config`."""
    return LivePlan(door=plan.door, scaling=plan.scaling, stall_s=plan.timeouts.stall_s)


def serve_config(plan: Plan) -> dict[str, Any]:
    """A whole Serve config: one application, named and routed by its revision."""
    name = f"{plan.name}-{plan.revision}"
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": plan.endpoint.host, "port": plan.endpoint.port},
        "applications": [
            {
                "name": name,
                "route_prefix": f"/{plan.revision}",
                "import_path": IMPORT_PATH,
                "args": {
                    "revision": plan.revision,
                    "profile": plan.profile,
                    "environment": _required(plan.environment),
                    "replica": plan.replica.definition(),
                },
                "deployments": [{"name": DEPLOYMENT, **live_options(plan)}],
            }
        ],
    }


def _required(environment: list[NamedValue]) -> list[dict[str, Any]]:
    """What a replica looks for on its node: values, but of timers (…_S) only that they are set.

    Timers follow from limits that may change while the model runs, and a value that stood here
    would restart it.
    """
    return [
        {"name": item.name, "value": "" if item.name.endswith("_S") else item.value}
        for item in environment
    ]


def missing_environment(required: list[NamedValue], environ: Mapping[str, str]) -> list[str]:
    """Assignments of `required` that `environ` lacks or holds with another value; empty: any value."""
    return [
        f"{item.name}={item.value}"
        for item in required
        if item.name not in environ or not _same(item, environ[item.name])
    ]


def _same(item: NamedValue, value: str) -> bool:
    """Whether a node's value is the required one; a path is the node's own."""
    return item.name.endswith("_PATH") or str(item.value) in {"", value}
