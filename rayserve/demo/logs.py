"""What is the engine doing, and if it failed, which log lines explain it?"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

KEPT_LINES = 8
MAX_TAIL_BYTES = 256 * 1024

_PHASE_BEGINS = re.compile(r"phase=(\S+) begins")
_PHASE_ENDS = re.compile(r"phase=(\S+) seconds=([\d.]+)")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_LOG_PREFIX = re.compile(r"^(?:\([^)]*\) )?(?:ERROR|CRITICAL) [\d-]+ [\d:]+ \[[^\]]+\] ?")
"""What vLLM writes before each line of a traceback that it logs."""
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Killed)\b: *\S")
"""The last line of a traceback."""
_KILLED = re.compile(r"\b(?:SIGILL|SIGKILL|SIGSEGV|SIGBUS|SIGABRT|Killed|OOM|died)\b")
_TELLING = re.compile(r"\b(?:ERROR|CRITICAL|FATAL)\b|(?:Error|Exception|Failed|failed)\b")
_NOISE = re.compile(r"UserWarning|FutureWarning|DeprecationWarning|errors?=0\b")


def current_phase(lines: Iterable[str]) -> str:
    """What a replica's start log says is going on: `config 2.1 s · engine …`."""
    ended: dict[str, str] = {}
    running = ""
    for line in lines:
        if begins := _PHASE_BEGINS.search(line):
            running = begins.group(1)
        elif ends := _PHASE_ENDS.search(line):
            ended[ends.group(1)] = f"{ends.group(1)} {float(ends.group(2)):.1f} s"
            running = "" if running == ends.group(1) else running
    return " · ".join([*ended.values(), *([f"{running} …"] if running else [])])


def explaining_lines(lines: list[str], limit: int = KEPT_LINES) -> list[str]:
    """The lines that tell why something failed, the root cause first.

    The ends of tracebacks, in the order of time, since an engine's process fails first and those
    above it follow; without any, the last lines that speak of an error; without any, the last ones.
    """
    plain = [_LOG_PREFIX.sub("", _ANSI.sub("", line)).rstrip() for line in lines]
    plain = [line for line in plain if line.strip() and not _NOISE.search(line)]
    causes = [line for line in plain if _EXCEPTION.search(line) or _KILLED.search(line)]
    if causes:
        return list(dict.fromkeys(causes))[:limit]
    telling = [line for line in plain if _TELLING.search(line)]
    return list(dict.fromkeys(telling or plain))[-limit:]


def read_phase(session: Path) -> str:
    """The phases of the replica's start, with the running one."""
    return current_phase(_replica_lines(session))


def read_engine_phases(folder: Path) -> str:
    """Phases that the engine's own processes have finished, from their phase file in `folder`."""
    done: dict[str, float] = {}
    for file in folder.glob("rayserve-phases-*.jsonl"):
        for line in _tail(file):
            try:
                entry = json.loads(line)
                done[entry["phase"]] = float(entry["seconds"])
            except (ValueError, KeyError, TypeError):
                continue  # half a line: the engine is writing it
    return ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in done.items())


def read_explanation(session: Path) -> list[str]:
    """Why the replica failed, from its log and from the output of the engine's processes."""
    printed = [line for log in _logs(session, "worker-*.out") for line in _tail(log)]
    return explaining_lines(printed + _replica_lines(session)) if printed else []


def _replica_lines(session: Path) -> list[str]:
    # Both, since vLLM configures logging when it is imported, and that closes the handlers which
    # Serve's log file has by then: what the replica says later is only in its worker's output.
    logs = _logs(session, "serve/replica_*.log") + _logs(session, "worker-*.err")
    return [line for log in logs for line in _tail(log)]


def _logs(session: Path, pattern: str) -> list[Path]:
    return sorted((session / "logs").glob(pattern), key=_modified)


def save(session: Path, target: Path) -> None:
    """Copy the logs of a session to where they survive it, in place of those of an earlier run."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(session / "logs", target, ignore_dangling_symlinks=True)


def tail_of(file: Path, limit: int = KEPT_LINES) -> list[str]:
    """The last telling lines of one log; none if there is no such file."""
    return explaining_lines(_tail(file), limit)


def _tail(file: Path) -> list[str]:
    try:
        with file.open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - MAX_TAIL_BYTES))
            return stream.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def first_and_last(text: str, limit: int = 4) -> str:
    """A message; of a long one, such as a traceback, its first line and its last."""
    lines = [line for line in _ANSI.sub("", text).strip().splitlines() if line.strip()]
    if len(lines) > limit:
        lines = [lines[0], "…", lines[-1]]
    return "\n  ".join(lines)
