"""What does a person see while the demo starts?

On a terminal one line a step, the last of which is alive; elsewhere a line when a step ends, and
every few seconds a line that says what is going on.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
HEARTBEAT_S = 5.0
WIDTH = 10


class Progress:
    """Draws steps on a stream; `clock` gives seconds that never jump."""

    def __init__(
        self,
        stream: TextIO,
        *,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._live = stream.isatty() if live is None else live
        self._clock = clock
        self._step = ""
        self._began = 0.0
        self._last_line = 0.0
        self._last_detail = ""
        self._turn = 0
        self._broken = False
        self.timings: dict[str, float] = {}
        """Seconds of each finished step."""

    @contextmanager
    def step(self, name: str, result: str = "") -> Iterator[None]:
        """One step; `result` is shown behind its time, unless `done` says something better."""
        self._step, self._result = name, result
        self._began = self._last_line = self._clock()
        self._last_detail = ""
        self.tick("")
        done = False
        try:
            yield
            done = True
        finally:  # a step that Ctrl-C ended has failed too
            if done:
                self.timings[name] = self._clock() - self._began
            self._end("✓" if done else "✗", self._result if done else self._last_detail)

    def done(self, result: str) -> None:
        """What the running step came to."""
        self._result = result

    def tick(self, detail: str) -> None:
        """Say what the running step is doing; called often, shown as often as is readable."""
        now = self._clock()
        seconds = now - self._began
        if self._live:
            self._turn += 1
            mark = SPINNER[self._turn % len(SPINNER)]
            self._draw(self._cut(f"  {mark} {self._step:<{WIDTH}} {seconds:6.1f} s  {detail}"))
        elif detail and (detail != self._last_detail or now - self._last_line >= HEARTBEAT_S):
            self._last_line = now
            self._write(f"  … {self._step:<{WIDTH}} {seconds:6.1f} s  {detail}\n")
        self._last_detail = detail or self._last_detail

    def say(self, text: str = "", *, end: str = "\n") -> None:
        """Plain text between steps."""
        self._write(text + end)

    def _end(self, mark: str, result: str) -> None:
        line = f"  {mark} {self._step:<{WIDTH}} {self._clock() - self._began:6.1f} s  {result}"
        if self._live:
            self._draw(line.rstrip() + "\n")
        else:
            self._write(line.rstrip() + "\n")

    def _cut(self, line: str) -> str:
        return line[: max(20, shutil.get_terminal_size().columns - 1)]

    def _draw(self, line: str) -> None:
        self._write(f"\r\x1b[2K{line}")

    def _write(self, text: str) -> None:
        if self._broken:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except UnicodeEncodeError:
            self._stream.write(text.encode("ascii", "replace").decode())
        except (OSError, ValueError):
            # The terminal or the pipe is gone. The demo must still stop what it started.
            self._broken = True
