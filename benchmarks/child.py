"""What does one command of this package cost in a fresh process: time, processor time, peak memory?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rayserve.units import MIB

ROOT = Path(__file__).resolve().parents[1]
POLL_S = 0.005


@dataclass(frozen=True)
class Child:
    """How a process ended, and what it took."""

    code: int
    """Exit code; below 0: the signal that ended it."""
    out: str
    err: str
    wall_s: float
    cpu_s: float
    peak_mib: float
    """Largest resident size."""


def rayserve(*arguments: str, timeout_s: float = 60) -> Child:
    """Run `rayserve` with these arguments, interpreter start included."""
    return run([sys.executable, "-m", "rayserve.cli", *arguments], timeout_s=timeout_s)


def run(command: Sequence[str], *, timeout_s: float) -> Child:
    """Run a command in the repository; one that takes longer than `timeout_s` is killed."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        began = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )
        killed, peak_bytes = False, 0
        # wait4 alone tells the times of this one child; its memory would be ours before the exec.
        while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
            peak_bytes = _peak_bytes(process.pid) or peak_bytes
            if not killed and time.perf_counter() - began > timeout_s:
                os.kill(process.pid, signal.SIGKILL)
                killed = True
            time.sleep(POLL_S)
        wall_s = time.perf_counter() - began
        _, status, usage = ended
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        return Child(
            code=process.returncode,
            out=out.read().decode("utf-8", "replace"),
            err=err.read().decode("utf-8", "replace"),
            wall_s=wall_s,
            cpu_s=usage.ru_utime + usage.ru_stime,
            peak_mib=peak_bytes / MIB,
        )


def _peak_bytes(pid: int) -> int:
    """The high-water mark of a process's resident memory so far; 0 once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text("utf-8")
    except OSError:
        return 0
    line = next((line for line in status.splitlines() if line.startswith("VmHWM")), "")
    return int(line.split()[1]) * 1024 if line else 0
