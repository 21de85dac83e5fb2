"""What does the doctor answer? A verdict with causes, each with the lines that show it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Evidence:
    """A line of a log."""

    file: str
    line: int
    """From 1."""
    text: str


@dataclass(frozen=True, slots=True)
class Cause:
    """What is wrong, as far as the logs tell."""

    tag: str
    title: str
    confidence: str
    """`high`, `medium` or `low`."""
    evidence: tuple[Evidence, ...]
    fix: str
    runbook: str
    count: int
    """Lines that say so."""


@dataclass(frozen=True, slots=True)
class Gap:
    """What was to be read, and could not be."""

    file: str
    why: str
    """And where, as far as that is known."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the logs tell."""

    word: str
    """`found`; `unknown`: something failed, and the cause is not known; `nothing`: no failure is seen."""
    causes: tuple[Cause, ...]
    """Best first."""
    first_error: Evidence | None = None
    """The first error that no signature explains, where the cause is not known or only effects are."""
