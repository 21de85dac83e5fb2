"""Which faults are injected, and what is each expected to do?"""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.marker import MARKER
from rayserve.plan import NamedValue, Plan
from rayserve.serve_config import DEPLOYMENT
from tests.served import Served, own_port

DEAD_S = 10.0
HANG_MARGIN_S = 15.0
HOG_BYTES = 4 * 2**30
"""Bounded by the hog's own limit: whether the host runs short of memory depends on the host."""
DISK_BYTES = 256 * 2**20
REFUSED = "400 with its id"
CORE, WORKER = "VLLM::EngineCore", "VLLM::Worker"


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica that runs."""

    pid: int
    port: int
    """Its own HTTP port, to which HAProxy sends."""


def replicas(served: Served) -> list[Replica]:
    """Replicas that Serve calls running and whose port is open."""
    found = []
    for one in served.ray.replicas(served.application["name"], DEPLOYMENT):
        if one["state"] == "RUNNING":
            with contextlib.suppress(psutil.Error, ValueError):
                found.append(Replica(one["pid"], own_port(one["pid"])))
    return found


def child(replica: Replica, title: str) -> psutil.Process:
    """The engine's process of this title."""
    for process in psutil.Process(replica.pid).children(recursive=True):
        if process.cmdline()[:1] and process.cmdline()[0].startswith(title):
            return process
    raise LookupError(f"replica {replica.pid} has no {title}")


Undo = Callable[[], str]
"""Takes a fault back; what it has to tell of it, or nothing."""


def _nothing() -> str:
    """Nothing to undo."""
    return ""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: `inject` does it and returns what takes it back at the end of the trial."""

    name: str
    inject: Callable[[Served, Replica], Undo]
    hang: bool = False
    replaces: bool = True
    """The replica is to be given up and replaced; else it must go on serving."""
    watch_s: float = 0.0
    """How long a replica that is to go on is watched, or a fault stands before it is mended."""
    mend: Callable[[Served, Replica], None] | None = None
    disk_bytes: int = 0
    """Ray's temporary folder lies on a file system of its own of this size; takes root."""
    crashes_on_marker: bool = False
    """The engine has `crash_marker` in it."""
    tells: str = ""
    """What `Undo` must end with."""
    deaths: int = 1
    """Verdicts that there may be for it at most."""

    def prepared(self, plan: Plan) -> Plan:
        """The plan with what the fault needs in the engine."""
        if not self.crashes_on_marker:
            return plan
        hook = NamedValue(name="logits_processors", value=["benchmarks.crash_marker:CrashOnMarker"])
        arguments = [*plan.replica.engine_args, hook]
        replica = plan.replica.model_copy(update={"engine_args": arguments})
        return plan.model_copy(update={"replica": replica, "revision": replica.revision})

    def detect_max_s(self, stall_s: float) -> float:
        """The bar."""
        return stall_s + HANG_MARGIN_S if self.hang else DEAD_S


def _signal(title: str, number: signal.Signals) -> Callable[[Served, Replica], Undo]:
    def inject(_: Served, replica: Replica) -> Undo:
        process = child(replica, title)
        process.send_signal(number)

        def undo() -> str:
            with contextlib.suppress(psutil.Error):
                if number == signal.SIGSTOP:
                    process.kill()
            return ""

        return undo

    return inject


def _folder(served: Served) -> tuple[Path, Path]:
    model = Path(served.plan.replica.model)
    return model, model.with_name(model.name + ".away")


def _lose_model(served: Served, replica: Replica) -> Undo:
    core = child(replica, CORE)
    model, away = _folder(served)
    model.rename(away)
    core.kill()
    return _nothing


def _bring_model_back(served: Served, _: Replica) -> None:
    model, away = _folder(served)
    away.rename(model)


_HOG = """
import resource, sys, time
most = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (most, most))
held = []
try:
    while True:
        held.append(bytearray(64 * 2**20))
except MemoryError:
    print("full", flush=True)
time.sleep(3600)
"""


def _hog(_: Served, __: Replica) -> Undo:
    process = subprocess.Popen(
        [sys.executable, "-c", _HOG, str(HOG_BYTES)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()

    def undo() -> str:
        process.kill()
        process.wait()
        return ""

    return undo


def _fill_ray_disk(served: Served, _: Replica) -> Undo:
    """Fill the small file system that holds Ray's temporary folder."""
    path = served.ray.temp_dir / "filler"
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(2**20)):
            pass

    def undo() -> str:
        path.unlink(missing_ok=True)
        return ""

    return undo


INSIST_S = 300.0
AGAIN_S = 1.0


def _send_poison(served: Served, replica: Replica) -> Undo:
    """A client that sends the request which kills the worker, again and again, until it is told why not.

    The first goes to the replica itself, the others through the ingress.
    """
    ports = [replica.port]
    told: list[str] = []
    deadline = time.monotonic() + INSIST_S

    def insist() -> None:
        while not told or (told[-1] != REFUSED and time.monotonic() < deadline):
            told.append(_post(served, ports.pop() if ports else served.plan.endpoint.port))
            time.sleep(AGAIN_S)

    thread = threading.Thread(target=insist)
    thread.start()

    def undo() -> str:
        thread.join()
        return " ".join(told)

    return undo


def _post(served: Served, port: int) -> str:
    """The status that the poison is answered with, or the error."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"model": served.model, "prompt": MARKER, "max_tokens": 64, "ignore_eos": True}
    headers = {"Content-Type": "application/json", **served.headers}
    path = f"{served.application['route_prefix']}/v1/completions"
    try:
        connection.request("POST", path, json.dumps(body), headers)
        reply = connection.getresponse()
        said = REFUSED if b"its id is" in reply.read() and reply.status == 400 else ""
        return said or str(reply.status)
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    finally:
        connection.close()


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A file system of `size` bytes in memory, mounted at a folder below; no size: /tmp as it is."""
    if not size:
        yield Path("/tmp")
        return
    mount = folder / "s"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", mount], check=True)
    try:
        yield mount
    finally:
        # Lazily: a process that still ends must not keep it mounted.
        subprocess.run(["umount", "--lazy", mount], check=True)


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("worker-killed", _signal(WORKER, signal.SIGKILL)),
        Fault("core-killed", _signal(CORE, signal.SIGKILL)),
        Fault("worker-stopped", _signal(WORKER, signal.SIGSTOP), hang=True),
        Fault("core-stopped", _signal(CORE, signal.SIGSTOP), hang=True),
        Fault("poison-request", _send_poison, crashes_on_marker=True, tells=REFUSED, deaths=3),
        Fault("model-gone", _lose_model, watch_s=45.0, mend=_bring_model_back),
        Fault("memory-hog", _hog, replaces=False, watch_s=45.0),
        Fault("ray-disk-full", _fill_ray_disk, replaces=False, watch_s=60.0, disk_bytes=DISK_BYTES),
    )
}
