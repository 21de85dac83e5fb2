"""Which is the first cause of what the logs show, and not the last symptom?

Lines go in, source by source (`read`); causes come out, best first (`verdict`):

    a fault of the kernel within ten minutes of a failure of the software
    a line that names its cause
    what follows from causes that are elsewhere: timeouts, lost actors
    a fault of the kernel at another time
    a usual line after which nothing came
    messages that only say that something failed

Within these, what is told with little confidence comes last, and then the time decides. Where nothing is
known, or nothing but effects, the first error that no signature explains is shown.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from rayserve.doctor.lines import YEAR_S, Line, alarm_of, is_quiet, read_line, shown, time_of
from rayserve.doctor.seen import Rest, Seen, causes
from rayserve.doctor.signatures import CONFIDENCES, KERNEL_ELSEWHEN, Kind, Signature, signatures
from rayserve.doctor.tracebacks import Part, Traceback, begun, goes_on
from rayserve.doctor.verdicts import Evidence, Verdict

NEAR_S: Final = 600.0
"""A fault of the kernel explains failures of the software that are this near, before or after."""
MOST_SHAPES: Final = 200_000
"""Shapes of lines that are remembered, so that a repeated line is looked at once."""
YEAR_MINUTES: Final = YEAR_S // 60
MOST_COMPARED: Final = 4096
"""Characters at either end of a line that are compared with expressions."""
SHORTEST: Final = 3
"""Bytes of a line that may tell something."""
LOOK_BACK: Final = 200
"""Lines in which the time of a line without one is looked for: a traceback is as long."""

_DIGITS: Final = b"0123456789"
_HEX: Final = b"0123456789abcdefABCDEF"
"""What lines of one shape may differ in: counts, times, ids."""
_PROGRESS = tuple(
    text.encode()
    for text in (
        "application startup complete", "uvicorn running on", "init engine (profile",
        "avg generation throughput", "post /", "is ready at", "starting vllm api server",
        "starting vllm server", "starting serving", "replica initialized", "is healthy",
    )
)  # fmt: skip
_WORKS = re.compile(
    rb"application startup complete|uvicorn running on|init engine \(profile|is ready at|is healthy|"
    rb"avg generation throughput: (?!0\.0 )[\d.]+|post /\S+ http/[\d.]+\" 200|"
    rb"starting vllm (?:api )?server|replica initialized",
    re.IGNORECASE,
)
"""The engine was seen to come up, or to answer."""
_ALARMS = (
    b"error", b"exception", b"fatal", b"critical", b"panic", b"interrupt", b"traceback (most",
    b"check failed: ", b" c  ]", b"terminate called",
)  # fmt: skip
_ECHO = re.compile(
    r"received request \S+.{0,40}prompt|\bmessages=\[|engine \(v[\w.+-]+\) with config|non-default args|"
    r"\bnamespace\(|importing application .{1,80} with arguments|"
    r"[\"']role[\"']: ?[\"']user[\"']|[\"'](?:prompt|messages)[\"']: ?[\"'\[]"
)
"""Lines that repeat what users and operators wrote: requests and settings."""
_CONTINUES = re.compile(r"[a-z0-9('\"`]")
"""How the second line of a message begins that was wrapped."""
_SAID = re.compile(r"(?:user|prompt|question|input|content|human)\s?[:=]", re.IGNORECASE)
"""How a message begins that repeats what somebody asked."""
_GUESSES = re.compile(
    r"(?:some )?(?:possible|potential|common|likely) (?:reasons?|(?:root )?causes?)\b|"
    r"this (?:can|could|may|might|typically) (?:be (?:due to|caused by|because)|happens? (?:when|if))|"
    r"\b(?:avoid|prevent)(?:s|ing)? .{0,30}(?:out of memory|oom\b|error|fail|crash|hang|time-?out|deadlock)|"
    r"\b(?:in case of|if you (?:see|get|hit|run into|encounter)) "
)
"""What follows in a line are guesses of the program, and names failures that were not seen."""


_Shape = tuple[bool, tuple[tuple[int, int], ...] | None]
"""Of lines that are alike: may they tell that the engine works; the patterns that they may match (signature and
pattern, by number), None: they need no closer look."""


@dataclass(slots=True)
class _Source:
    """A log that is read."""

    name: str
    order: int
    time_s: float | None = None
    """Of the last line that was asked for its time."""
    time_line: int = 0
    begun_s: float | None = None
    """The first time that was seen: lines before it have no earlier one."""
    exception: Evidence | None = None
    """The first exception that no signature explains."""
    loud: Evidence | None = None
    """The first line of a level that tells of an error."""
    error_s: dict[str, float | None] = field(default_factory=dict)
    worked_line: int = 0
    """Where the engine was last seen to work; 0: nowhere."""
    worked: bytes = b""
    """That line."""
    rest: Rest | None = None
    """What may still come of the message that was read last."""
    traceback: Traceback | None = None
    """The one that began last."""

    def part(self, raw: bytes) -> Part:
        """What the next line is for the traceback that is read, if one is."""
        if self.traceback is None or not self.traceback.left:
            return Part.OTHER
        return self.traceback.part(raw)


class Diagnosis:
    """Reads logs, one after another, and then tells what is wrong. Its memory is bounded."""

    def __init__(self, known: Sequence[Signature] | None = None) -> None:
        """`known`: the signatures to look for; None: all that the toolkit knows."""
        self._known = tuple(known) if known is not None else signatures()
        texts: dict[str, list[tuple[int, int]]] = {}
        for number, signature in enumerate(self._known):
            for at, pattern in enumerate(signature.patterns):
                texts.setdefault(pattern.has, []).append((number, at))
        self._texts = [
            (text.encode().translate(None, _DIGITS), tuple(where)) for text, where in texts.items()
        ]
        self._shapes: dict[int, _Shape] = {}
        self._found: dict[int, Seen] = {}
        self._sources: list[_Source] = []

    def read(self, name: str, lines: Iterable[bytes]) -> None:
        """Read one log; logs that were rotated come oldest first."""
        source = _Source(name, len(self._sources))
        self._sources.append(source)
        shapes, recent = self._shapes, deque[bytes](maxlen=LOOK_BACK)
        for number, (raw, following) in enumerate(_with_next(lines), 1):
            if source.rest is not None and not source.rest.take(name, number, raw):
                source.rest = None
            part = source.part(raw)
            if len(raw) < SHORTEST or part is Part.HARMLESS:
                recent.append(raw)
                continue
            key = hash(raw.translate(None, _HEX))
            shape = shapes.get(key)
            if shape is None:
                if len(shapes) >= MOST_SHAPES:
                    shapes.clear()
                shape = shapes[key] = self._shape(raw)
            progress, candidates = shape
            if progress and _WORKS.search(raw):
                source.worked_line, source.worked = number, raw[:MOST_COMPARED]
            if part is Part.END or (
                candidates is not None and (not candidates or self._may_match(raw, candidates))
            ):
                ends = part is Part.END
                self._look(
                    source, number, raw, following, candidates or (), recent, ends_traceback=ends
                )
            recent.append(raw)

    def _shape(self, raw: bytes) -> _Shape:
        """What lines of this shape may tell."""
        lowered = raw.translate(None, _DIGITS).lower()
        if b"\x1b" in lowered:
            lowered = re.sub(rb"\x1b\[[;?]*[a-z]", b"", lowered)
        found = [one for text, where in self._texts if text in lowered for one in where]
        progress = any(text in lowered for text in _PROGRESS)
        if found:
            return progress, tuple(sorted(found))
        return progress, () if any(text in lowered for text in _ALARMS) else None

    def _may_match(self, raw: bytes, candidates: tuple[tuple[int, int], ...]) -> bool:
        """Has the line the text of a candidate with its numbers, or an alarm?"""
        lowered = raw.lower()
        if b"\x1b" in lowered or any(text in lowered for text in _ALARMS):
            return True
        return any(
            self._known[number].patterns[at].has.encode() in lowered for number, at in candidates
        )

    def _look(
        self,
        source: _Source,
        number: int,
        raw: bytes,
        following: bytes,
        candidates: tuple[tuple[int, int], ...],
        recent: deque[bytes],
        *,
        ends_traceback: bool,
    ) -> None:
        """Look at one line closely."""
        line = read_line(raw)
        lowered = _ends(line.text.lower())
        if _ECHO.search(lowered) or _SAID.match(line.message) or goes_on(lowered):
            return
        source.traceback = begun(line, recent, source.traceback) or source.traceback
        if guesses := _GUESSES.search(lowered):
            lowered = lowered[: guesses.start()]
        numbers = self._matching(
            line, lowered, (recent[-1] if recent else b"", following), candidates
        )
        alarm = "" if numbers else alarm_of(line, ends_traceback=ends_traceback)
        if not numbers and not alarm:
            return
        time_s = _time(source, number, line, recent)
        for one in numbers:
            self._add(one, source, number, time_s, line)
        if alarm and getattr(source, alarm) is None:
            setattr(source, alarm, Evidence(source.name, number, shown(line.text)))
            source.error_s[alarm] = time_s

    def _matching(
        self,
        line: Line,
        lowered: str,
        around: tuple[bytes, bytes],
        candidates: tuple[tuple[int, int], ...],
    ) -> list[int]:
        """The signatures that a line matches: alone, or with a neighbour, where a message was wrapped."""
        near = [
            (number, self._known[number].patterns[at])
            for number, at in candidates
            if self._known[number].patterns[at].has in lowered
        ]
        found = {number for number, pattern in near if pattern.matches(lowered)}
        if near and not found:
            wrapped = _wrapped(line, *around)
            found = {number for number, pattern in near if any(map(pattern.matches, wrapped))}
        if found and is_quiet(line):
            found = {number for number in found if _may_be_said_calmly(self._known[number])}
        return sorted(found)

    def _add(self, number: int, source: _Source, at: int, time_s: float | None, line: Line) -> None:
        found = self._found.get(number)
        if found is None:
            found = self._found[number] = Seen(self._known[number])
        found.add((source.name, source.order), at, time_s, line)
        if found.signature.rest:
            source.rest = Rest(found, line.process)

    def verdict(self) -> Verdict:
        """What all that was read tells."""
        seen = [one for one in self._found.values() if one.count >= one.signature.least]
        failed = any(one.signature.kind is Kind.WRAPPER for one in seen)
        # Where the engine came up afterwards, it is the cause of nothing; unless something failed after all.
        standing = [one for one in seen if failed or not self._overcome(one)]
        ranked = sorted(standing, key=lambda one: self._rank(one, standing))
        named = [found for found in ranked if found.signature.kind is not Kind.WRAPPER]
        first = self._first_error("exception") or self._first_error("loud")
        if named:
            # What follows from something else does not explain an exception of the same logs.
            effect = named[0].signature.kind in {Kind.EFFECT, Kind.HINT}
            return Verdict(
                "found", causes(named), self._first_error("exception") if effect else None
            )
        if ranked:
            return Verdict("unknown", causes(ranked, first), first)
        return Verdict("unknown" if self._first_error("exception") else "nothing", (), first)

    def _first_error(self, kind: str) -> Evidence | None:
        """The first exception, or the first loud line, of all sources."""
        errors: list[tuple[float, int, Evidence]] = []
        for source in self._sources:
            evidence = getattr(source, kind)
            if evidence is not None:
                errors.append(
                    (self._when(source.order, source.error_s[kind]), source.order, evidence)
                )
        return min(errors, key=lambda one: one[:2])[2] if errors else None

    def _when(self, order: int, time_s: float | None) -> float:
        """A time to sort by; lines before the first time of a log have that, those of a log without any come last."""
        if time_s is None:
            time_s = self._sources[order].begun_s
        return float("inf") if time_s is None else time_s

    def _overcome(self, found: Seen) -> bool:
        """Was the engine seen to work after everything that was said of this?"""
        if not (found.signature.stalled or found.signature.kind is Kind.HINT):
            return False
        return all(self._worked_after(order, *last) for order, last in found.last.items())

    def _worked_after(self, order: int, line: int, time_s: float | None) -> bool:
        for source in self._sources:
            if not source.worked_line:
                continue
            if source.order == order and source.worked_line > line:
                return True
            worked_s = read_line(source.worked).time_s
            if time_s is not None and worked_s is not None and worked_s > time_s:
                return True
        return False

    def _rank(
        self, found: Seen, standing: Sequence[Seen]
    ) -> tuple[int, bool, tuple[float, int, int]]:
        signature = found.signature
        group = int(signature.kind)
        if signature.kind is Kind.KERNEL and not _near(found, standing):
            group = KERNEL_ELSEWHEN
        elif self._overcome(found):
            group = int(Kind.HINT)
        first = min(
            (self._when(order, time_s), order, line)
            for order, (line, time_s) in found.first.items()
        )
        return group, signature.sure == CONFIDENCES[-1], first


def _may_be_said_calmly(signature: Signature) -> bool:
    """Whether a line at level INFO may tell of it: a wait may, what names a failure is no failure there."""
    return signature.kind is not Kind.CAUSE or signature.stalled


def _with_next(lines: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Each line with the one that follows it; the last with nothing."""
    before: bytes | None = None
    for line in lines:
        if before is not None:
            yield before, line
        before = line
    if before is not None:
        yield before, b""


def _wrapped(line: Line, before: bytes, after: bytes) -> tuple[str, ...]:
    """A line with each of its neighbours that the same process wrote at the same time."""
    out = []
    for raw, first in ((before, True), (after, False)):
        other = read_line(raw)
        if raw and other.process == line.process and other.time_s in (None, line.time_s):
            parts = (other, line) if first else (line, other)
            if not _CONTINUES.match(parts[1].message):
                continue
            joined = _ends(" ".join(one.message for one in parts).lower())
            out.append(_GUESSES.split(joined, 1)[0])
    return tuple(out)


def _ends(text: str) -> str:
    """Both ends of a long text: expressions are compared with these, since some take the square of its length."""
    return (
        text
        if len(text) <= 2 * MOST_COMPARED
        else f"{text[:MOST_COMPARED]} {text[-MOST_COMPARED:]}"
    )


def _time(source: _Source, number: int, line: Line, recent: Sequence[bytes]) -> float | None:
    """When a line was written: it may say so itself, or a line shortly before it."""
    if line.time_s is None:
        back = min(number - source.time_line, len(recent))
        for raw in reversed(list(recent)[len(recent) - back :] if back else ()):
            before = time_of(raw[:400].decode("utf-8", "replace"))
            if before is not None:
                source.time_s = before
                break
    else:
        source.time_s = line.time_s
    source.time_line = number
    if source.begun_s is None:
        source.begun_s = source.time_s
    return source.time_s


def _near(fault: Seen, standing: Sequence[Seen]) -> bool:
    """Is a fault of the kernel near in time to a failure of the software, as far as times are known?"""
    others = [found for found in standing if found.signature.kind is not Kind.KERNEL]
    minutes = set[int]().union(*(found.minutes for found in others))
    if not fault.minutes or not minutes or any(not found.minutes for found in others):
        return True
    span = range(-int(NEAR_S // 60), int(NEAR_S // 60) + 1)
    return any((one + apart) % YEAR_MINUTES in minutes for one in fault.minutes for apart in span)
