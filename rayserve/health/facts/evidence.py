"""What a replica leaves behind before it is given up: one file, of bounded size.

Serve kills a replica whose health check fails, and with it all that could tell why. So its processes,
their stacks, the last lines of their logs, the engine's metrics, the kernel's log and the GPUs' state
are written first. Each command is given a deadline, since the host may hang as the engine does; what
does not answer is left out, and says so in its place.

Prompts are kept out: stacks are taken without local variables, and log lines end at the words after
which vLLM and its libraries print what a client sent. A line that only continues a prompt cannot be
told; vLLM logs prompts when it is asked to (`enable_log_requests` at level DEBUG).
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

from rayserve.doctor.lines import without_colours
from rayserve.doctor.masks import masked
from rayserve.health.facts.run import Runner, run
from rayserve.health.readings.ranks import GONE, UNREAD, Sight, Silent, silent_ranks
from rayserve.units import MIB

FOLDER: Final = "evidence"
"""Below the plan's `state_dir`."""
MOST_PART: Final = MIB
"""Bytes of one part; of a longer one the end is kept."""
MOST_BUNDLES: Final = 10
"""Older ones go when a new one is written."""
DRAFT_S: Final = 600.0
"""A draft is nobody's after so long."""
MOST_LINES: Final = 200
"""Of a rank's log."""
MOST_LINE: Final = 4096
"""Characters of a line that are kept."""
MOST_RANKS: Final = 256
REPLICA: Final = "replica"
"""Whose lines carry no rank's name."""
MOST_LOG: Final = 8 * MIB
"""Bytes at the end of a log file that are looked at."""
STACK_S: Final = 4.0
COMMAND_S: Final = 4.0
TWICE_S: Final = 0.5
"""A process in the kernel is looked at once more: any page that is read puts it there for a moment."""
_PROMPT = re.compile(
    r"((?:prompt\w{0,40}|messages|content|input|input_value|output|query|documents|generated[ _]text)"
    r"['\"]?\s*[=:'\"]).*",
    re.IGNORECASE,
)
_RANK = re.compile(r"^\((?P<rank>(?:EngineCore|Worker|VllmWorker|APIServer)[\w-]*)(?: pid=\d+)?\)")
_ACCESS = re.compile(r" -- [A-Z]+ \S+ \d{3} [\d.]+ms$")
"""Serve's line of a request: they would push out all others."""
_BUNDLE = re.compile(r"\d{8}T\d{6}Z-.*\.tar\.gz")


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
    name, process = member.name, member.process
    state = _state(process)
    if state == "D":
        time.sleep(TWICE_S)
        state = _state(process)
    spy = shutil.which("py-spy", path=os.pathsep.join((*_own_bin(), os.environ.get("PATH", ""))))
    if state == GONE or spy is None:
        why = "py-spy is not installed" if state != GONE else "the process has ended"
        return Sight(name, process.pid, state, no_stack=why)
    # --nonblocking: py-spy would else stop the process to read it, and this one may be killed meanwhile.
    out = run((spy, "dump", "--nonblocking", "--pid", str(process.pid)), STACK_S)
    if out.ok:
        return Sight(name, process.pid, state, out.text)
    return Sight(name, process.pid, state, no_stack=f"py-spy: {out.ending}\n{out.text}")


def _state(process: psutil.Process) -> str:
    """The kernel's letter: psutil's word for the state has none for some."""
    try:
        # A process id is given anew; psutil compares the time of the start.
        if not process.is_running():
            return GONE
        stat = Path("/proc", str(process.pid), "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):
        return GONE
    except (OSError, psutil.Error):
        return UNREAD
    return stat.rpartition(") ")[2][:1]


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
            text = sight.stack or f"no stack: {sight.no_stack}\n"
            parts[f"stacks/{sight.pid}.txt"] = f"{sight.name}\n{text}"
        for path in logs:
            for rank, lines in last_lines(path).items():
                name = f"logs/{rank}.txt"
                parts[name] = parts.get(name, "") + "".join(lines)
        parts["metrics.txt"] = _told(metrics)
        for name, answer in asked.items():
            out = answer.result()
            parts[name] = out.text if out.ok else f"not read: {out.ending}\n{out.text}"
    return parts


def _told(ask: Callable[[], str]) -> str:
    """A part that is asked in this process: a collector that fails must not cost the others."""
    try:
        return ask()
    except (ValueError, RuntimeError, OSError) as error:
        return f"not read: {error!r}\n"


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
            # The first line may be the rest of one, and so of a prompt.
            cut = file.tell() and file.readline(MOST_LOG)
            lines = file.read(MOST_LOG).decode(errors="replace").splitlines()
    except OSError as error:
        return {REPLICA: [f"{path}: {error.strerror}\n"]}
    if cut and not lines:
        return {REPLICA: [f"{path}: one line of more than {MOST_LOG // MIB} MiB\n"]}
    for line in map(without_colours, lines):
        if _ACCESS.search(line):
            continue
        match = _RANK.match(line)
        rank = match["rank"] if match else REPLICA
        if rank not in ranks and len(ranks) >= MOST_RANKS:
            rank = REPLICA
        ranks.setdefault(rank, deque(maxlen=MOST_LINES)).append(line)
    return {rank: [without_prompt(line) + "\n" for line in last] for rank, last in ranks.items()}


def without_prompt(line: str) -> str:
    """A line of a log without keys, passwords, and without what a client sent."""
    return _PROMPT.sub(r"\1 (left out)", masked(line[:MOST_LINE]))


def write_bundle(
    folder: Path, name: str, verdict: Mapping[str, Any], parts: Mapping[str, str], *, now_s: float
) -> Path:
    """Write the parts as `folder/name.tar.gz`, whole or not at all, and drop the oldest bundles.

    Readable only by this user. `now_s` in Unix seconds.

    Raises:
        OSError: the folder does not take it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{name}.tar.gz"
    draft = folder / f".{name}.part"
    whole = {"verdict.json": json.dumps(verdict, indent=1) + "\n", **parts}
    # Of two writers of one name the second ends here, and leaves the first's draft alone.
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as tar:
            for part, text in whole.items():
                data = text.encode(errors="replace")[-MOST_PART:]
                entry = tarfile.TarInfo(f"{name}/{part}")
                entry.size, entry.mtime, entry.mode = len(data), int(now_s), 0o600
                tar.addfile(entry, io.BytesIO(data))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    _drop_old(folder, path)
    return path


def _drop_old(folder: Path, newest: Path) -> None:
    """Leave the newest bundles, by the time in their names, and what is none."""
    entries: list[Path] = []
    with contextlib.suppress(OSError):  # the bundle is written, whatever becomes of older ones
        entries = list(folder.iterdir())
    others = sorted(path for path in entries if _BUNDLE.fullmatch(path.name) and path != newest)
    old = time.time() - DRAFT_S
    for path in others[: 1 - MOST_BUNDLES]:
        with contextlib.suppress(OSError):
            path.unlink()
    # A replica that was killed while it wrote leaves its draft.
    for path in (path for path in entries if path.name.endswith(".part")):
        with contextlib.suppress(OSError):
            if path.lstat().st_mtime < old:
                path.unlink()


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
