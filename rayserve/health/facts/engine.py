"""What does the plan's endpoint answer on this host? /health and /ready need no key."""

from __future__ import annotations

import http.client

from rayserve.health.checks.engine import EngineFacts
from rayserve.plan import Plan

ANSWER_S = 2.0


def read_engine_facts(plan: Plan) -> EngineFacts:
    """Ask the revision's own route, by loopback."""
    port, route = plan.endpoint.port, f"/{plan.revision}"
    url = f"http://127.0.0.1:{port}{route}"
    health, ending = _status(port, f"{route}/health")
    if not health:
        return EngineFacts(url, ending=ending)
    ready, ending = _status(port, f"{route}/ready")
    return EngineFacts(url, health, ready, ending)


def _status(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status, ""
    except (OSError, http.client.HTTPException) as error:
        return 0, f"127.0.0.1:{port}: {str(error) or type(error).__name__}"
    finally:
        connection.close()
