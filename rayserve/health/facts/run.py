"""How is a command run that may hang, for ever, in the kernel?"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

MOST_CHARACTERS = 8 * 2**20
"""Of a command's output; a kernel log has a megabyte."""
AFTER_KILL_S = 1.0
_left_behind: list[subprocess.Popen[bytes]] = []
"""Processes that did not end with SIGKILL in time; kept, since Python warns of one that it forgets."""


@dataclass(frozen=True, slots=True)
class Output:
    """What a command printed. `ending` is empty where it ended well."""

    text: str = ""
    ending: str = ""

    @property
    def ok(self) -> bool:
        """It ended well."""
        return not self.ending


Runner = Callable[[Sequence[str], float], Output]
"""A command and its limit in seconds → its output."""


def run(
    command: Sequence[str], timeout_s: float, *, env: Mapping[str, str] | None = None
) -> Output:
    """Run a command in a process group of its own, and never wait longer than `timeout_s` for it.

    A process that is stuck in a driver ignores even SIGKILL; it is left behind, and its ending said.
    """
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "LC_ALL": "C", **(env or {})},
        )
    except FileNotFoundError:
        return Output(ending=f"{command[0]} is not installed")
    except OSError as error:
        return Output(ending=f"{command[0]}: {error.strerror}")
    try:
        data, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            process.wait(AFTER_KILL_S)
        except subprocess.TimeoutExpired:
            _left_behind.append(process)
        if process.stdout is not None:
            process.stdout.close()
        return Output(ending=f"no answer within {timeout_s:g} s")
    text = data[:MOST_CHARACTERS].decode(errors="replace")
    return Output(text, ending_of(process.returncode))


def ending_of(code: int) -> str:
    """How a process ended, empty when well."""
    if code >= 0:
        return f"exit code {code}" if code else ""
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"killed by {name}"
