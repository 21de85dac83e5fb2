"""Can this machine run a demo: system, memory, shared memory and ports?"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path

import psutil

from rayserve.errors import HostError
from rayserve.ports import RANGES
from rayserve.units import MIB

OBJECT_STORE_BYTES = 128 * MIB
"""Ray's object store; Serve passes nothing large through it. Ray refuses less than 75 MiB."""
MESSAGE_QUEUE_BYTES = 192 * MIB
"""Shared memory of vLLM's message queues for one group of workers, measured and rounded up."""
RAY_BYTES = 1536 * MIB
RANK_BYTES = 1536 * MIB
"""Resident memory of Ray with Serve, and of one rank of the demo's engine."""
TEMP_PREFIX = "rsd-"
LONGEST_TEMP = 12
"""Characters of TMPDIR. HAProxy takes socket paths of 97, and ours add 85 with Ray's node id."""


def check_host(ranks: int) -> None:
    """Refuse at once what would fail only after a minute.

    Raises:
        HostError: not Linux, or too little memory or shared memory.
    """
    if sys.platform != "linux":
        raise HostError("Linux: Ray's HAProxy and vLLM's CPU engine run there", found=sys.platform)
    need = RAY_BYTES + ranks * RANK_BYTES
    available = psutil.virtual_memory().available
    if available < need:
        raise HostError(
            f"{need / 1024**3:.1f} GiB of free memory",
            found=f"{available / 1024**3:.1f} GiB",
            do="close something large, or use a larger machine",
        )
    need = OBJECT_STORE_BYTES + MESSAGE_QUEUE_BYTES
    free = shutil.disk_usage("/dev/shm").free
    if free < need:
        raise HostError(
            f"{need // MIB} MiB of free shared memory in /dev/shm, for Ray and for vLLM's workers",
            found=f"{free // MIB} MiB",
            do="give the machine more; in a container: --shm-size=1g",
        )


def check_port(port: int, name: str) -> None:
    """Refuse a port that something listens on already.

    Raises:
        HostError: with the name of the port and, where it can be seen, of its holder.
    """
    refusal = _try_port(port)
    if refusal is None:
        return
    if refusal.errno == errno.EADDRINUSE:
        found = port_holder(port) or "in use by a process of another user"
    else:
        found = refusal.strerror or str(refusal)
    raise HostError(
        f"a free port {port} for {name}",
        found=found,
        do="choose another one: .venv/bin/rayserve demo --port PORT",
    )


def port_holder(port: int) -> str:
    """The process that listens on a TCP port, as text; empty if it cannot be seen."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return ""
    for connection in connections:
        if connection.status != psutil.CONN_LISTEN or not connection.laddr:
            continue
        if connection.laddr.port == port and connection.pid is not None:
            try:
                name = psutil.Process(connection.pid).name()
            except psutil.Error:
                name = "a process"
            return f"in use by {name} (pid {connection.pid})"
    return ""


def free_ports(names: list[str]) -> dict[str, int]:
    """A free TCP port for each name. All are held until all are found, so that they differ."""
    sockets: list[socket.socket] = []
    ports: list[int] = []
    try:
        while len(ports) < len(names):
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            sockets.append(sock)
            sock.bind(("", 0))
            port = sock.getsockname()[1]
            if not any(port in taken for taken in RANGES):
                ports.append(port)
        return dict(zip(names, ports, strict=True))
    finally:
        for sock in sockets:
            sock.close()


def make_temp_dir() -> Path:
    """A new private folder with a short path.

    Raises:
        HostError: it cannot be made.
    """
    base = tempfile.gettempdir()
    if len(base) > LONGEST_TEMP:
        base = "/tmp"
    try:
        return Path(tempfile.mkdtemp(prefix=TEMP_PREFIX, dir=base))
    except OSError as error:
        raise HostError(
            f"to make a folder in {base}, for Ray's session",
            found=error.strerror or str(error),
            do="free some space there, or make it writable",
        ) from error


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _try_port(port: int) -> OSError | None:
    # Without SO_REUSEADDR a port in TIME_WAIT looks taken; with it, one that is listened on does.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("", port))
            sock.listen(1)
        except OSError as error:
            return error
        return None


def remove_tree(path: Path) -> None:
    """Remove a folder of ours; what cannot be removed is left to the system's own cleaning."""
    shutil.rmtree(path, ignore_errors=True)
