"""How does Ctrl-C end a demo at any moment without leaving anything behind?

The first SIGINT, SIGTERM or SIGHUP raises `Interrupted` in the main thread, and those after it are
ignored, so that the clean-up which follows is never cut short. Where an interruption between two
steps would lose something (a process started, but not yet known), `hold` delays it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXIT_CODE = 130
"""What a shell shows for a command that Ctrl-C ended."""


class Interrupted(KeyboardInterrupt):
    """The user, or whoever runs the demo, wants it to end now."""


class Interrupts:
    """Owns the three signals while it is entered."""

    def __init__(self) -> None:
        self._held = 0
        self._seen = False
        self._raised = False
        self._before: list[tuple[signal.Signals, object]] = []

    def __enter__(self) -> Self:
        for number in SIGNALS:
            # A signal that is ignored stays so: `nohup rayserve demo` outlives its terminal.
            if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGINT:
                self._before.append((number, signal.signal(number, self._on_signal)))
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Delay an interruption until the block ends."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            self._raise_if_due()

    def ignore(self) -> None:
        """From here on nothing is interrupted: the clean-up has begun."""
        self._raised = True

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._seen = True
        self._raise_if_due()

    def _raise_if_due(self) -> None:
        if self._seen and not self._raised and self._held == 0:
            self._raised = True
            raise Interrupted
