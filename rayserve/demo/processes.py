"""Which processes belong to a demo, and how are they, and nothing else, stopped?

A process belongs to a demo when it descends from the demo's keeper (a subreaper: see `keeper.py`),
or when it carries the demo's mark: the demo's id in its environment. Some of Ray's processes give
themselves a new title, which overwrites command line and environment; these are known by the demo's
temporary folder among their open files. Descent is the rule; the mark finds what is left when a
keeper was killed. A process with an environment of its own and without the mark is somebody else's,
whatever it has open: a pager on one of the logs, say.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

MARK = "RAYSERVE_DEMO_ID"
"""Environment variable that names the demo which started a process."""

GONE = (psutil.NoSuchProcess, psutil.ZombieProcess)
SHARED = "/dev/shm/"
DELETED = " (deleted)"
"""What the kernel writes behind the path of a file that is open and has no name any more."""
POLL_S = 0.05
FREEZE_S = 0.5
"""For processes to stop where they are; one that is stuck in the kernel does not."""


def descendants(root: psutil.Process) -> list[psutil.Process]:
    """All living processes below `root`, without it."""
    try:
        return [process for process in root.children(recursive=True) if is_alive(process)]
    except psutil.NoSuchProcess:
        return []


def marked(demo_id: str, temp_dir: str) -> list[psutil.Process]:
    """All living processes that carry the mark of a demo, except the caller and its ancestors."""
    mine = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    return [
        process
        for process in psutil.process_iter()
        if process.pid not in mine and _is_marked(process, demo_id, temp_dir)
    ]


def _is_marked(process: psutil.Process, demo_id: str, temp_dir: str) -> bool:
    try:
        environment = process.environ()
        if MARK in environment or "PATH" in environment:
            return environment.get(MARK) == demo_id
        return any(path.startswith(temp_dir + "/") for path in _open_paths(process.pid))
    except (psutil.Error, OSError):
        return False  # gone meanwhile, or another user's


def _open_paths(pid: int) -> list[str]:
    paths = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            paths.append(str(link.readlink()))
        except OSError:
            continue
    return paths


def is_alive(process: psutil.Process) -> bool:
    """Whether the process still runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def shared_memory(processes: Iterable[psutil.Process]) -> set[Path]:
    """Files in /dev/shm that these processes have mapped, or have open and are about to map."""
    found: set[Path] = set()
    for process in processes:
        try:
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            names = [line.partition(SHARED)[2] for line in lines]
            names += [path.partition(SHARED)[2] for path in _open_paths(process.pid)]
        except OSError:
            continue  # gone meanwhile
        found |= {Path(SHARED) / name for name in names if name and not name.endswith(DELETED)}
    return found


def remove_unused(files: Iterable[Path]) -> None:
    """Remove those of these shared-memory files that no process has mapped any more."""
    left = {file for file in files if file.exists()}
    if not left:
        return
    for file in left - shared_memory(psutil.process_iter()):
        file.unlink(missing_ok=True)


def stop(
    find: Callable[[], list[psutil.Process]],
    *,
    grace_s: float,
    reap: Callable[[], None] = lambda: None,
    kill_s: float = 10.0,
) -> list[psutil.Process]:
    """End what `find` finds, asking first: SIGTERM, and after `grace_s` SIGKILL until none is left.

    `find` is called again and again, since a process may start another while it is being stopped. The
    shared memory that they had mapped, and that nobody else has, is removed.

    Returns:
        What is still there `kill_s` after the first SIGKILL: processes stuck in the kernel.
    """
    shared: set[Path] = set()
    asked = _freeze(find, shared)
    for number in (signal.SIGTERM, signal.SIGCONT):
        for process in asked:
            _signal(process, number)
    deadline = time.monotonic() + grace_s
    while (left := find()) and time.monotonic() < deadline:
        shared |= shared_memory(left)
        reap()
        time.sleep(POLL_S)
    deadline = time.monotonic() + kill_s
    while left and time.monotonic() < deadline:
        for process in _freeze(find, shared):
            _signal(process, signal.SIGKILL)
        reap()
        time.sleep(POLL_S)
        left = find()
    reap()
    remove_unused(shared)
    return left


def _freeze(find: Callable[[], list[psutil.Process]], shared: set[Path]) -> list[psutil.Process]:
    """Stop all that `find` finds where they are, and add to `shared` what they have mapped.

    One that runs on could map more between the look at its maps and the signal that ends it.
    """
    frozen: dict[int, psutil.Process] = {}
    while new := [process for process in find() if process.pid not in frozen]:
        for process in new:
            _signal(process, signal.SIGSTOP)
            frozen[process.pid] = process
    deadline = time.monotonic() + FREEZE_S
    while any(map(_runs, frozen.values())) and time.monotonic() < deadline:
        time.sleep(0.001)
    shared |= shared_memory(frozen.values())
    return list(frozen.values())


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() in (psutil.STATUS_RUNNING, psutil.STATUS_SLEEPING)
    except psutil.NoSuchProcess:
        return False


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)  # psutil compares the start time: a reused pid is safe
    except GONE:
        return
