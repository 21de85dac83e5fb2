"""Which line ends a traceback of Python, and did the program that wrote it go on without what failed?

An exception is known by its place, below the frames, and not by its name: `Exception`, `queue.Empty` and
`RayTaskError(OSError)` are as good as `ValueError`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from rayserve.doctor.lines import Line, read_line

HEAD: Final = "Traceback (most recent call last):"
MOST_BETWEEN: Final = 64
"""Lines of other processes between two of a traceback."""
_HEADING_WITHIN: Final = 8
"""Lines before a traceback in which the message is looked for that it belongs to."""
_ENDS = re.compile(
    r"(?:[A-Za-z_]\w*\.)*(?!SystemExit\b|GeneratorExit\b)[A-Z]\w*(?:\([\w.]+\))?(?:: |:?$)"
    r"|(?:[a-z_]\w*\.)+[a-z]\w*(?:: |:?$)"  # socket.gaierror, struct.error
)
"""How an exception is written; the two that are left out end what was asked to end."""
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_DONE_WITHOUT = (
    r"an exception occurred while starting the metrics server|"  # Ray's monitor and dashboard
    r"agent port #\d+ failed to bind after \d+ attempts|"  # Ray's agent, and then:
    r"the agent will stay alive but the http service will be disabled"
)
"""How programs word, in lower case, what failed and ended nothing, above the traceback of it."""
_TRIED_AGAIN = (
    r"failed to bind to port \d+ \(attempt \d+/\d+\)\. retrying|"
    r"\btry to use port \d+: "  # Ray's dashboard, with the port that it tries next
)
"""How they word a try that is not the last: where that fails too, a traceback may stand right below."""
_HEADING = re.compile(_DONE_WITHOUT)
_GOES_ON = re.compile(f"{_DONE_WITHOUT}|{_TRIED_AGAIN}")


def goes_on(lowered: str) -> bool:
    """Does a line, in lower case, say itself that what failed ended nothing?"""
    return _GOES_ON.search(lowered) is not None


class Part(Enum):
    """What a line is for a traceback."""

    OTHER = auto()
    """It does not belong to it."""
    FRAME = auto()
    END = auto()
    """The exception."""
    HARMLESS = auto()
    """Any line of it, where the program goes on without what failed."""


@dataclass(slots=True)
class Traceback:
    """A traceback that is read, or the last one that was."""

    at: int
    """Where its lines begin, behind what stands before each of them, or before the first alone."""
    process: str
    harmless: bool
    """The message that it belongs to says that the program goes on."""
    nested: bool = False
    """It is indented itself, as one of a group is."""
    left: int = MOST_BETWEEN
    """Lines of others that may still come before its next one; 0: it has ended."""

    def part(self, raw: bytes) -> Part:
        """What the next line of the log is for it."""
        line = read_line(raw)
        if line.process != self.process:
            self.left -= 1
            return Part.OTHER
        if line.text[:1].isspace() and not self.nested:
            self.at = 0
        text = line.text[self.at :]
        part, self.left = Part.FRAME, MOST_BETWEEN
        if text and not text[0].isspace():
            self.left = 0
            part = Part.END if _ENDS.match(text) else Part.OTHER
        return Part.HARMLESS if self.harmless and part is not Part.OTHER else part


def begun(line: Line, recent: Sequence[bytes], before: Traceback | None) -> Traceback | None:
    """The traceback that begins with a line; None: none does. `recent`: the lines before; `before`: the last one."""
    at = line.text.find(HEAD)
    if at < 0 or line.text[at:].strip() != HEAD:
        return None
    found = Traceback(at, line.process, harmless=False, nested=line.text[:1].isspace())
    for back in range(1, min(_HEADING_WITHIN, len(recent)) + 1):
        heading = read_line(recent[-back])
        if heading.process != line.process or not heading.message:
            continue
        if heading.message.startswith(_CHAINED):
            found.harmless = before is not None and before.harmless
        else:
            found.harmless = _HEADING.search(heading.text.lower()) is not None
        break
    return found
