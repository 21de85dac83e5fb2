"""Is a replica replaced when its engine dies or hangs, and what is left of it?"""

from __future__ import annotations

import http.client
import json
import os
import signal
import tarfile
from pathlib import Path
from typing import Any

from rayserve.health.facts import deaths, evidence
from tests.engine.calls import Call, all_gone, family, replica_pid, stream
from tests.ray_cluster import wait_until
from tests.served import Served, metrics, own_port

STALL_S = 8.0
STATE = "rayserve_engine_state"


def replaced(served: Served, pid: int) -> None:
    """Wait until another replica answers."""

    def answers() -> bool:
        try:
            if replica_pid(served) == pid:
                return False
            body = {"prompt": "a", "max_tokens": 1}
            return Call(served, "/v1/completions", body).reply.status == 200
        except (OSError, ValueError):  # none is running for a moment
            return False

    wait_until(answers, 180, "an answer of another replica")


def evidence_of(served: Served, pid: int) -> dict[str, Any]:
    """The verdict in the one bundle that this replica wrote, in which every rank has its log."""
    folder = Path(served.plan.replica.state_dir, evidence.FOLDER)
    (path,) = folder.glob(f"*-{pid}.tar.gz")
    name = path.name.removesuffix(".tar.gz")
    with tarfile.open(path) as tar:
        assert {f"{name}/logs/EngineCore.txt", f"{name}/logs/Worker.txt"} <= set(tar.getnames())
        file = tar.extractfile(f"{name}/verdict.json")
        assert file is not None
        return json.load(file)


def test_a_dead_engine_is_replaced(served):
    """When the engine's core dies its door closes, and a new replica takes over; evidence is left."""
    pid = replica_pid(served)
    port = own_port(pid)
    below = family(pid)
    (core,) = [process for process in below if "EngineCor" in process.name()]
    core.kill()
    wait_until(lambda: metrics(served, port, rayserve_engine_state="dead")[STATE] == 1, 10, "dead")
    replaced(served, pid)
    assert all_gone(below)
    verdict = evidence_of(served, pid)
    assert verdict["state"] == "dead"
    assert f"VLLM::EngineCore (pid {core.pid}) has ended" in verdict["silent"]


def test_a_hang_is_seen_while_vllm_calls_itself_healthy(served):
    """A stopped worker: vLLM's /health stays 200, our door closes, and the evidence names the rank."""
    pid = replica_pid(served)
    port = own_port(pid)
    (worker,) = [process for process in family(pid) if "Worker" in process.name()]
    served.change_stall(STALL_S)
    try:
        running = stream(served, 1500)
        worker.suspend()
        wait_until(
            lambda: metrics(served, port, rayserve_engine_state="hung")[STATE] == 1,
            STALL_S + 15,
            "the verdict",
        )
        assert ask_replica(served, port, "/health") == 200
        assert ask_replica(served, port, "/ready") == 503
        running.close()
        replaced(served, pid)
    finally:
        served.change_stall(served.plan.timeouts.stall_s)
    verdict = evidence_of(served, pid)
    assert verdict["state"] == "hung"
    assert verdict["silent"] == [f"VLLM::Worker (pid {worker.pid}) is stopped by a signal"]
    (name,) = verdict["running"]
    assert suspected(served, name)
    stream(served, 1500).events()
    wait_until(lambda: not suspected(served, name), 10, "the end of the suspicion")


def suspected(served: Served, name: str) -> bool:
    """Whether a request has run at a death and not ended well since."""
    record = Path(served.plan.replica.state_dir, deaths.FOLDER, deaths.FILE)
    known = json.loads(record.read_text())["deaths"]
    return any(name in one["running"] and name not in one["clear"] for one in known)


def ask_replica(served: Served, port: int, path: str) -> int:
    """The status of one of the door's open paths, past the ingress."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", served.application["route_prefix"] + path)
    status = connection.getresponse().status
    connection.close()
    return status


def test_nothing_survives_a_replica_that_is_killed_outright(served):
    """After SIGKILL of the replica its engine is gone at once: the GPUs are free for the next one."""
    pid = replica_pid(served)
    below = family(pid)
    assert len(below) >= 3
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: all_gone(below), 5, "the end of the whole family")
    replaced(served, pid)
