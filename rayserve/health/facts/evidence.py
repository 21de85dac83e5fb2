"""What a replica leaves behind before it is given up: one file, of bounded size, without prompts.

Serve kills a replica whose health check fails, and with it all that could tell why. So its processes,
their stacks, the last lines of their logs, the engine's metrics, the kernel's log and the GPUs' state
are written first. Each is asked with a deadline of its own, since the host may hang as the engine does;
what does not answer is left out, and says so in its place.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import sys
import tarfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from rayserve.doctor.masks import masked
from rayserve.health.facts.run import Runner, run
from rayserve.health.readings.ranks import Sight, Silent, silent_ranks
from rayserve.units import MIB

FOLDER: Final = "evidence"
"""Below the plan's `state_dir`."""
MOST_PART: Final = MIB
"""Bytes of one part; of a longer one the end is kept."""
MOST_BUNDLES: Final = 10
"""Older ones go when a new one is written."""
MOST_LINES: Final = 200
"""Of a rank's log."""
MOST_LOG: Final = 8 * MIB
"""Bytes at the end of a log file that are looked at."""
STACK_S: Final = 4.0
COMMAND_S: Final = 4.0
_PROMPT = re.compile(r"(\bprompt\w*['\"]?\s*[=:]).*", re.IGNORECASE)
_RANK = re.compile(r"^(?:\x1b\[[\d;]*m)*\((?P<rank>\w+)(?: pid=\d+)?\)")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


@dataclass(frozen=True, slots=True)
class Member:
    """A process of the engine, and its title while it lived: one that has ended has none."""

    name: str
    process: psutil.Process


def members(processes: Sequence[psutil.Process]) -> tuple[Member, ...]:
    """The processes by name; to be asked while all of them run."""
    return tuple(Member(_title(process), process) for process in processes)


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        return " ".join(process.cmdline()).strip()[:80] or process.name()
    return f"pid {process.pid}"


def read_sights(engine: Sequence[Member], *, run: Runner = run) -> tuple[Sight, ...]:
    """The engine's processes: name, state, stack. Asked side by side, since each may not answer."""
    if not engine:
        return ()
    with ThreadPoolExecutor(min(16, len(engine)), "evidence") as pool:
        return tuple(pool.map(lambda member: _sight(member, run), engine))


def _sight(member: Member, run: Runner) -> Sight:
    name, process, state = member.name, member.process, ""
    # A process id is given anew; psutil compares the time of the start.
    with contextlib.suppress(psutil.Error, OSError):
        if not process.is_running():
            return Sight(name, process.pid, "")
        # psutil's word for the state has no letter for some; the kernel's own is what readers know.
        stat = Path("/proc", str(process.pid), "stat").read_text(encoding="utf-8", errors="replace")
        state = stat.rpartition(") ")[2][:1]
    # --nonblocking: py-spy would else stop the process to read it, and leave it stopped if it is
    # killed meanwhile; one that a signal stopped already it would refuse.
    spy = shutil.which("py-spy", path=os.pathsep.join((*_own_bin(), os.environ.get("PATH", ""))))
    if not state or spy is None:
        return Sight(name, process.pid, state)
    out = run((spy, "dump", "--nonblocking", "--pid", str(process.pid)), STACK_S)
    return Sight(name, process.pid, state, out.text if out.ok else "")


def _own_bin() -> tuple[str, ...]:
    return (str(Path(sys.executable).parent),)


def collect(
    sights: Sequence[Sight],
    *,
    logs: Iterable[Path],
    metrics: Callable[[], str],
    run: Runner = run,
) -> dict[str, str]:
    """The parts of a bundle by their names. What could not be read says so in its place."""
    commands = {
        "kernel.txt": ("dmesg", "--time-format", "iso"),
        "gpu.txt": ("nvidia-smi", "-q"),
    }
    with ThreadPoolExecutor(len(commands), "evidence") as pool:
        asked = {name: pool.submit(run, line, COMMAND_S) for name, line in commands.items()}
        parts = {"processes.txt": _processes(sights)}
        for sight in sights:
            text = sight.stack or "no stack: py-spy did not answer, or is not installed\n"
            parts[f"stacks/{sight.pid}.txt"] = f"{sight.name}\n{text}"
        for path in logs:
            for rank, lines in last_lines(path).items():
                name = f"logs/{rank}.txt"
                parts[name] = parts.get(name, "") + "".join(lines)
        parts["metrics.txt"] = metrics()
        for name, answer in asked.items():
            out = answer.result()
            parts[name] = out.text if out.ok else f"not read: {out.ending}\n{out.text}"
    return parts


def _processes(sights: Sequence[Sight]) -> str:
    rows = [f"{sight.pid}\t{sight.state or '-'}\t{sight.name}\n" for sight in sights]
    return "pid\tstate\tname\n" + "".join(rows)


def own_logs() -> tuple[Path, ...]:
    """The files that this process, and so its children, write to: none where it is no file."""
    found: dict[Path, None] = {}
    for descriptor in ("1", "2"):
        with contextlib.suppress(OSError):
            path = Path("/proc/self/fd", descriptor).readlink()
            if path.is_file():
                found[path] = None
    return tuple(found)


def last_lines(path: Path) -> Mapping[str, Sequence[str]]:
    """The last lines of each rank in a log that all of them write, without keys and prompts.

    Keyed by vLLM's prefix of the rank, `EngineCore` or `Worker_TP3`; lines without one are `replica`'s.
    """
    ranks: dict[str, deque[str]] = {}
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MOST_LOG))
            text = file.read(MOST_LOG).decode(errors="replace")
    except OSError as error:
        return {"replica": [f"{path}: {error.strerror}\n"]}
    for line in text.splitlines():
        match = _RANK.match(line)
        rank = match["rank"] if match else "replica"
        ranks.setdefault(rank, deque(maxlen=MOST_LINES)).append(without_prompt(line) + "\n")
    return ranks


def without_prompt(line: str) -> str:
    """A line of a log without colours, keys, passwords, and without what follows the word `prompt`."""
    return _PROMPT.sub(r"\1 (left out)", masked(_COLOUR.sub("", line)))


def write_bundle(
    folder: Path, name: str, verdict: Mapping[str, Any], parts: Mapping[str, str], *, now_s: float
) -> Path:
    """Write the parts as `folder/name.tar.gz`, whole or not at all, and drop the oldest bundles.

    Readable only by this user. `now_s` in Unix seconds.

    Raises:
        OSError: the folder does not take it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.tar.gz"
    draft = folder / f".{name}.{os.getpid()}.part"
    whole = {"verdict.json": json.dumps(verdict, indent=1) + "\n", **parts}
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as tar:
            for part, text in whole.items():
                data = text.encode(errors="replace")[-MOST_PART:]
                entry = tarfile.TarInfo(f"{name}/{part}")
                entry.size, entry.mtime, entry.mode = len(data), int(now_s), 0o600
                tar.addfile(entry, io.BytesIO(data))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    _drop_old(folder)
    return path


def _drop_old(folder: Path) -> None:
    with contextlib.suppress(OSError):
        bundles = sorted(folder.glob("*.tar.gz"), key=lambda path: path.stat().st_mtime)
        for path in bundles[:-MOST_BUNDLES]:
            path.unlink(missing_ok=True)


def bundle(
    folder: Path,
    verdict: Mapping[str, Any],
    engine: Sequence[Member],
    *,
    logs: Iterable[Path],
    metrics: Callable[[], str],
) -> tuple[Path, tuple[Silent, ...]]:
    """Look at the engine's processes and write the bundle: its file, and the ranks that are silent.

    Takes some ten seconds at most; meant for a thread.

    Raises:
        OSError: the folder does not take it.
    """
    sights = read_sights(engine)
    silent = silent_ranks(sights)
    parts = collect(sights, logs=logs, metrics=metrics)
    now_s = time.time()
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_s))
    known = {**verdict, "silent": [str(rank) for rank in silent]}
    # Two replicas of one host may fail within one second.
    name = f"{stamp}-{verdict.get('revision', 'engine')}-{os.getpid()}"
    return write_bundle(folder, name, known, parts, now_s=now_s), silent
