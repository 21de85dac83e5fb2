"""How is each failure worded, and what does it mean? The rows of data/failure-signatures.yml."""

from __future__ import annotations

import functools
import importlib.resources
import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import yaml

# The C parser is ten times as fast; PyYAML may be built without it.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Kind(IntEnum):
    """What a line of this wording is for its failure; the first ones outrank the later ones."""

    KERNEL = 0
    """The kernel or the driver reports a fault of the hardware or of the host's memory."""
    CAUSE = 1
    """It says itself what is wrong."""
    EFFECT = 2
    """It follows from something else, or may."""
    HINT = 4
    """A usual line, which means something only where the log goes no further."""
    WRAPPER = 5
    """It says only that something failed."""


KERNEL_ELSEWHEN: Final = 3
"""Rank of a fault of the kernel that is far in time from every failure of the software."""
CONFIDENCES: Final = ("high", "medium", "low")


@dataclass(frozen=True, slots=True)
class Pattern:
    """One wording, in lower case."""

    has: str
    """A text that every line of this wording has."""
    regex: str = ""
    """What else must be there; empty: nothing."""

    def matches(self, lowered: str) -> bool:
        """Is a line, in lower case, worded so?"""
        if self.has not in lowered:
            return False
        return not self.regex or _compiled(self.regex).search(lowered) is not None


@dataclass(frozen=True, slots=True)
class Signature:
    """A failure and its wordings."""

    tag: str
    title: str
    kind: Kind
    sure: str
    fix: str
    patterns: tuple[Pattern, ...]
    runbook: str = ""
    """Page under docs/runbooks, without its ending."""
    stalled: bool = False
    """It does not count where the engine is seen to work afterwards."""
    least: int = 1
    """So many lines must say so."""
    versions: str = ""
    rest: str = ""
    """How the lines below it begin, in lower case, that say the rest; group `last`: the last of them."""


@functools.lru_cache(maxsize=1)
def signatures() -> tuple[Signature, ...]:
    """All signatures, as the file has them."""
    file = importlib.resources.files("rayserve").joinpath("data", "failure-signatures.yml")
    rows: list[dict[str, Any]] = yaml.load(file.read_bytes(), Loader=_Loader)  # noqa: S506 - it is a safe one
    return tuple(_signature(row) for row in rows)


def _signature(row: dict[str, Any]) -> Signature:
    return Signature(
        **row
        | {
            "kind": Kind[row["kind"].upper()],
            "patterns": tuple(_pattern(one) for one in row["patterns"]),
        }
    )


def _pattern(row: str | dict[str, str]) -> Pattern:
    if isinstance(row, str):
        return Pattern(row)
    return Pattern(row["has"], row["regex"])


@functools.lru_cache(maxsize=1024)
def _compiled(regex: str) -> re.Pattern[str]:
    """Compiled when a line first asks for it: all of them would take half a second."""
    return re.compile(regex)
