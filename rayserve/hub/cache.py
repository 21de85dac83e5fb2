"""Who else is at the cache of this machine, and what is left there when a fetch is ended?"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Final

from filelock import BaseFileLock, Timeout
from huggingface_hub import file_download
from huggingface_hub.utils import WeakFileLock

from rayserve.hub.bounds import AGAIN, Bounds, RefusedAnswerError

QUIET_S: Final = 3.0
"""So long nothing is said of a lock that another process holds."""
ENDINGS: Final = (signal.SIGTERM, signal.SIGHUP)


def bound_locks(bounds: Bounds, say: Callable[[str], None]) -> None:
    """Make huggingface_hub wait for a lock of its cache no longer than the bounds allow."""

    @contextlib.contextmanager
    def lock(lock_file: str | Path, *, timeout: float | None = None) -> Iterator[BaseFileLock]:
        del timeout  # it never asks for one
        with contextlib.ExitStack() as held:
            try:
                found = held.enter_context(WeakFileLock(lock_file, timeout=_wait_s(bounds)))
            except Timeout:
                say(f"waiting for another process, which holds {lock_file}")
                found = _held(lock_file, bounds, held)
            yield found

    # The function that it calls by this name; there is no public way.
    file_download.WeakFileLock = lock


def _wait_s(bounds: Bounds) -> float:
    return min(QUIET_S, bounds.left_s())


def _held(lock_file: str | Path, bounds: Bounds, held: contextlib.ExitStack) -> BaseFileLock:
    try:
        lock: BaseFileLock = held.enter_context(WeakFileLock(lock_file, timeout=bounds.left_s()))
    except Timeout:
        raise RefusedAnswerError(
            f"another process, which still holds {lock_file}",
            do=f"end the process that holds it (`fuser {lock_file}`), or remove it where none does, and {AGAIN}",
        ) from None
    return lock


@contextlib.contextmanager
def ended_cleanly() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end what is done here as Ctrl-C does, with what it cleans up behind it."""
    if threading.current_thread() is not threading.main_thread():  # handlers belong to that
        yield
        return
    before = {each: signal.getsignal(each) for each in ENDINGS}
    mine = [each for each, handler in before.items() if handler is signal.SIG_DFL]
    for each in mine:
        signal.signal(each, _end)
    try:
        yield
    finally:
        for each in mine:
            signal.signal(each, before[each])


def _end(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
