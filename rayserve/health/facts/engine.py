"""What does the plan's endpoint answer on this host? /health and /ready need no key."""

from __future__ import annotations

import http.client

from rayserve.health.checks.engine import EngineFacts
from rayserve.health.checks.wanted import Wanted

ANSWER_S = 2.0


def read_engine_facts(wanted: Wanted) -> EngineFacts:
    """Ask the revision's own route, at the address that Serve binds."""
    port, route = wanted.port, wanted.route
    host = "127.0.0.1" if wanted.host in ("", "0.0.0.0") else wanted.host
    url = f"http://{host}:{port}{route}"
    health, ending = _status(host, port, f"{route}/health")
    if not health:
        return EngineFacts(url, ending=ending)
    ready, ending = _status(host, port, f"{route}/ready")
    return EngineFacts(url, health, ready, ending)


def _status(host: str, port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status, ""
    except (OSError, http.client.HTTPException) as error:
        return 0, f"{host}:{port}: {str(error) or type(error).__name__}"
    finally:
        connection.close()
