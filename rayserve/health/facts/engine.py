"""What does the plan's endpoint answer on this host? /health and /ready need no key."""

from __future__ import annotations

import http.client
from collections.abc import Callable
from pathlib import Path

from rayserve.health.checks.engine import EngineFacts
from rayserve.health.checks.wanted import Wanted
from rayserve.health.facts.plan_files import ray_folder
from rayserve.health.facts.ray_unit import RAY, read_ray_unit, read_units, this_process
from rayserve.health.facts.run import run

ANSWER_S = 2.0


def ray_sessions() -> str:
    """Folder in which the Ray of this host keeps its sessions, and with them the replicas' logs."""
    unit = read_ray_unit(read_units(run).get(RAY), Path("/"), this_process())
    return f"{ray_folder(unit)}/ray"


def read_engine_facts(wanted: Wanted, sessions: Callable[[], str] = ray_sessions) -> EngineFacts:
    """Ask the revision's own route, at the address that Serve binds; `sessions`: asked in trouble."""
    port, route = wanted.port, wanted.route
    host = "127.0.0.1" if wanted.host in ("", "0.0.0.0") else wanted.host
    url = f"http://{host}:{port}{route}"
    health, ending = _status(host, port, f"{route}/health")
    if not health:
        return EngineFacts(url, ending=ending, sessions=sessions())
    ready, ending = _status(host, port, f"{route}/ready")
    return EngineFacts(url, health, ready, ending, "" if health == 200 else sessions())


def _status(host: str, port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status, ""
    except (OSError, http.client.HTTPException) as error:
        return 0, f"{host}:{port}: {str(error) or type(error).__name__}"
    finally:
        connection.close()
