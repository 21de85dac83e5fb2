"""What does a line of a log say, apart from colours, prefixes and the time before it?

Understands vLLM's and Ray's lines, what Ray, Docker, Kubernetes and journald write before them, and lines
that are JSON objects. Times are compared within a log and its neighbours only: they have no year and no
time zone, since most of these formats name neither.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final

from rayserve.doctor.masks import masked

LONGEST_LINE_BYTES: Final = 32 * 1024
"""Of a longer line, the rest is not looked at."""
YEAR_S: Final = 366 * 86400
"""Times wrap here: they have no year."""

_COLOURS = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])|"
    r"(?:#033|\^\[|\\(?:u001b|x1b|033|e))\[[\d;]*m"  # as syslog, terminals and JSON write the escape
)
_MONTHS = {
    name: number
    for number, name in enumerate(
        ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"), 1
    )
}
_DAYS_BEFORE = (0, 0, 31, 60, 91, 121, 152, 182, 213, 244, 274, 305, 335)
"""Days of a leap year before each month, by its number."""
_TIME = re.compile(
    r"(?:\b([A-Z][a-z]{2}) +|(?<![\d-])(?:\d{4}[-/])?(\d\d)[-/])(\d{1,2})[ T](\d\d):(\d\d):(\d\d)"
)
"""ISO 8601 as Ray, Serve and Docker write it, vLLM's own without a year, and that of syslog and journald."""
_TIME_WITHIN: Final = 200
"""Characters at the beginning of a line in which its time stands."""
_PROCESS = re.compile(
    r"\(((?:[\w:.#/-]+ )?(?:[\w=.+-]+ )*(?:pid|rank|ip)=[^()]{1,120}|raylet|autoscaler[^)]{0,20}|gcs_server)\)"
)
_PREFIXES = re.compile(
    r"""^\s*(?:
        \d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:?\d\d)?\s+(?:std(?:out|err)\s+[FP]\s+)?   # Kubernetes, Docker
      | [\w.-]+(?:-\d+)?\s+\|\s                                                      # Docker Compose
      | [A-Z][a-z]{2}\ +\d{1,2}\ [\d:.]+\s+\S+\s+[^\s:\[]+(?:\[\d+\])?:\s             # syslog, journald
      | \((?:[^()\n]{0,120})\)\s                                                      # Ray, vLLM: process
      | \[[^\]\n]{0,120}\]\s?                                                         # [Rank 0], [dmesg]
      | (?:DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL)\b:?\s
      | \d\d-\d\d\ [\d:.,]+\s
      | \d{4}[-/]\d\d[-/]\d\d[ T][\d:.,]+(?:Z|[+-]\d\d:?\d\d)?\s
      | \S{1,60}\.(?:py|cc|cpp|h):\d+\]?:?\s
      | (?:-+|>+|\||NVRM:)\s
    )""",
    re.VERBOSE,
)
_JSON_TEXTS = ("message", "msg", "log", "MESSAGE", "exc_text", "event")
_EXCEPTION = re.compile(
    r"^(?:E +)?(?:[a-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Exception|Interrupt|Timeout|Expired|NotFound)"
    r"(?:\([\w.]+\))?|Exception)(?:: (?!Traceback)|$)",
    re.MULTILINE,
)
_CRASH = re.compile(
    r"\[[\d: ,.-]+ C(?: \d+)+\] |\.(?:cc|cpp|cu|h|hpp):\d+\]?:? .{0,300}?\b[Cc]heck failed: |"
    r"^terminate called after throwing an instance of |\bDeploying app '[^']*' failed with exception:"
)
"""How Ray, and C++ that uses glog, word that they end themselves; the first is Ray's level, which ends the process.
The last is Serve's word for an exception whose name it leaves out."""
_LEVEL_WITHIN: Final = 160
_LOUD = re.compile(
    r"\b(?:ERROR|CRITICAL|FATAL)\b|(?<![\w/])[Ff]atal(?: Python)? error|[Pp]anic|\[[\d: ,.-]+ [EF] \d+"
)
_QUIET = re.compile(r"\b(?:INFO|WARNING|WARN|DEBUG)\b")
_CALM = re.compile(r"(?<!NCCL )\b(?:INFO|DEBUG)\b")
"""NCCL writes its failures at this level too."""
_QUOTED = re.compile(r"\b[A-Z]\w*(?:Error|Exception)\b|Traceback")
_SHOWN: Final = 400


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a log."""

    text: str
    """Without colours; a JSON object's message."""
    process: str = ""
    """Who wrote it, as Ray or vLLM say: `EngineCore_DP0 pid=12`."""
    time_s: float | None = None
    """Seconds since New Year of a leap year, where the line says when."""

    @property
    def message(self) -> str:
        """The text without what stands before it: time, level, process, place in the source."""
        rest = self.text
        for _ in range(8):
            match = _PREFIXES.match(rest)
            if match is None:
                break
            rest = rest[match.end() :]
        return rest.strip()


def read_line(raw: bytes) -> Line:
    """What a line says; bytes that are no UTF-8 are replaced."""
    text = raw[:LONGEST_LINE_BYTES].decode("utf-8", "replace").rstrip("\r\n")
    text = without_colours(text)
    time_s = time_of(text)
    if text.lstrip().startswith("{"):
        text = _message_of(text)
    match = _PROCESS.search(text, 0, _TIME_WITHIN)
    return Line(text, match[1] if match else "", time_s if time_s is not None else time_of(text))


def without_colours(text: str) -> str:
    """A line without the escapes of a terminal, however they were written."""
    if "\x1b" in text or "[0m" in text or "m(" in text:
        return _COLOURS.sub("", text)
    return text


def time_of(text: str) -> float | None:
    """The time that stands at the beginning of a line, in seconds since New Year of a leap year."""
    match = _TIME.search(text, 0, _TIME_WITHIN)
    if match is None:
        return None
    name, month_text, day, hour, minute, second = match.groups()
    month = _MONTHS.get(name.lower(), 0) if name else int(month_text)
    if not (1 <= month <= 12 and 1 <= int(day) <= 31):
        return None
    days = _DAYS_BEFORE[month] + int(day) - 1
    return days * 86400.0 + int(hour) * 3600 + int(minute) * 60 + int(second)


def alarm_of(line: Line, *, ends_traceback: bool = False) -> str:
    """Does a line tell of an error: `exception`, as Python and a crash do, `loud`, by its level; empty: it does not.

    `ends_traceback`: it stands where a traceback has its exception, whatever that is called.
    """
    if ends_traceback or _EXCEPTION.search(line.message) or _CRASH.search(line.text):
        return "" if _QUIET.search(line.text, 0, _LEVEL_WITHIN) else "exception"
    loud = _LOUD.search(line.text, 0, _LEVEL_WITHIN)
    return "loud" if loud and not _QUIET.search(line.text, 0, loud.start()) else ""


def is_quiet(line: Line) -> bool:
    """Does a line's own level say that nothing failed, and quotes it no exception?"""
    text = line.text[:_LEVEL_WITHIN]
    quiet = _CALM.search(text)
    return (
        quiet is not None
        and _LOUD.search(text, 0, quiet.start()) is None
        and _QUOTED.search(line.text) is None
    )


def shown(text: str) -> str:
    """A line as it is shown as evidence: bounded, without control characters and keys."""
    spaced = (" " if char.isspace() else char for char in text)
    # Masked before it is cut: the beginning of a key has no longer the form of one.
    plain = masked("".join(char for char in spaced if char.isprintable()).strip())
    return plain if len(plain) <= _SHOWN else plain[: _SHOWN - 1] + "…"


def shown_name(name: str) -> str:
    """A file's name as it is shown: what is not printable, or no UTF-8, as an escape, and bounded."""
    plain = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in name[:_SHOWN]
    )
    return plain if len(name) <= _SHOWN else plain + "…"


def _message_of(text: str) -> str:
    """What a line that is a JSON object says; the line itself where it is none."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(record, dict):
        return text
    level = str(record.get("levelname") or record.get("level") or "")
    said = [str(record[key]) for key in _JSON_TEXTS if isinstance(record.get(key), str)]
    return " ".join([level.upper(), *said]).strip() if said else text
