"""What was seen of one failure, and what does it tell people? Its lines, with those that belong to them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from rayserve.doctor.lines import Line, read_line, shown
from rayserve.doctor.signatures import Signature
from rayserve.doctor.verdicts import Cause, Evidence

MOST_EVIDENCE: Final = 3
"""Lines shown of a cause."""
MOST_MINUTES: Final = 4096
"""Minutes that are remembered of one failure."""
REST_WITHIN: Final = 8
"""Lines after a message in which those that belong to it are looked for: other processes write between them."""


@dataclass(slots=True)
class Seen:
    """What was seen of one signature."""

    signature: Signature
    first: dict[int, tuple[int, float | None]] = field(default_factory=dict)
    """Where it was seen first, by source: line and time."""
    evidence: list[Evidence] = field(default_factory=list)
    count: int = 0
    minutes: set[int] = field(default_factory=set)
    last: dict[int, tuple[int, float | None]] = field(default_factory=dict)
    """Where it was seen last, by source."""

    def add(self, source: tuple[str, int], number: int, time_s: float | None, line: Line) -> None:
        """Note a line of it; `source`: its name and order."""
        name, order = source
        self.first.setdefault(order, (number, time_s))
        self.last[order] = (number, time_s)
        if time_s is not None and len(self.minutes) < MOST_MINUTES:
            self.minutes.add(int(time_s // 60))
        for text in self._parts(line):
            self.show(name, number, text)

    def show(self, name: str, number: int, text: str) -> None:
        """Count a line, and keep the first ones as evidence."""
        self.count += 1
        if len(self.evidence) < MOST_EVIDENCE:
            self.evidence.append(Evidence(name, number, shown(text)))

    def _parts(self, line: Line) -> list[str]:
        """The line; of a record of several lines, such as a JSON object, those that tell, where they are known."""
        texts = line.text.splitlines()
        if not self.signature.rest or len(texts) < 2:
            return [line.text]
        patterns = self.signature.patterns
        at = next(
            (at for at, text in enumerate(texts) if any(p.matches(text.lower()) for p in patterns)),
            0,
        )
        rest = (text.strip() for text in texts[at + 1 :])
        return [texts[at], *(text for text in rest if re.match(self.signature.rest, text.lower()))]


@dataclass(slots=True)
class Rest:
    """The lines still to come that belong to a message."""

    seen: Seen
    process: str
    """Who wrote the message."""
    left: int = REST_WITHIN

    def take(self, name: str, number: int, raw: bytes) -> bool:
        """Look at the next line of the log; whether more may come."""
        self.left -= 1
        line = read_line(raw)
        if line.process == self.process:
            found = re.match(self.seen.signature.rest, line.message.lower())
            if found is not None:
                self.seen.show(name, number, line.text)
                return self.left > 0 and not found["last"]
        return self.left > 0


def causes(ranked: Sequence[Seen], first: Evidence | None = None) -> tuple[Cause, ...]:
    """The findings as causes; `first`: an error that is shown before the rest."""
    out: list[Cause] = []
    for found in ranked:
        evidence = [first, *found.evidence] if first and not out else found.evidence
        signature = found.signature
        out.append(
            Cause(
                tag=signature.tag,
                title=signature.title,
                confidence=signature.sure,
                evidence=tuple(evidence[:MOST_EVIDENCE]),
                fix=signature.fix,
                runbook=signature.runbook,
                count=found.count,
            )
        )
    return tuple(out)
