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

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20
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
    """Largest resident size, as the kernel counted it."""


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
        killed = False
        # wait4 alone tells the resources of this one child.
        while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
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
            peak_mib=usage.ru_maxrss * 1024 / MIB,
        )
