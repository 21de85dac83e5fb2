"""Which ports of a host do Ray and Serve take? Spec, health checks and the role `ray` go by the same.

The role's own list (roles/ray/vars/main.yml) is for Ansible; a test holds it to this one.
"""

from __future__ import annotations

from typing import Final

RAY: Final = {
    "gcs": 6379,
    "node_manager": 6380,
    "object_manager": 6381,
    "dashboard": 8265,
    "agent": 52365,
    "agent_grpc": 52366,
    "runtime_env_agent": 52367,
    "metrics": 9080,
    "client": 10001,
}
"""What the role `ray` gives Ray's processes; the first and the dashboard on the head, the rest everywhere."""
WORKERS: Final = range(10002, 20000)
"""Of Ray's workers (--min-worker-port, --max-worker-port)."""
REPLICAS: Final = range(30000, 41001)
"""Of Serve's replicas behind its HAProxy."""
HAPROXY_STATISTICS: Final = 8404
HAPROXY_METRICS: Final = 9101
FALLBACK_PROXY: Final = 8500
"""Serve's own defaults (ray/serve/_private/constants.py)."""
NAMED: Final = {
    **{port: f"Ray's {name.replace('_', ' ')}" for name, port in RAY.items()},
    HAPROXY_STATISTICS: "HAProxy's statistics",
    FALLBACK_PROXY: "the proxy behind Serve's HAProxy",
    HAPROXY_METRICS: "HAProxy's metrics",
}
RANGES: Final = (WORKERS, REPLICAS)


def taken_by(port: int) -> str:
    """Who listens there already; empty: nobody."""
    if any(port in ports for ports in RANGES):
        return "Ray's own ranges, " + ", ".join(f"{one[0]}-{one[-1]}" for one in RANGES)
    return NAMED.get(port, "")
