"""Which requests kill the engine? A suspicion, from what was running each time when it died.

A request that takes the engine with it is sent again by its client, and kills the next one. Which one
it was nobody says; but it was running at every such death, and whatever else was running mostly is
not there the next time, or comes to its end:

    running at one death             → suspected, and served as any other
    running at two, as the only one  → refused until the deaths expire
    running at two, with others      → served beside no other suspect
    ends well after the last of them → clear of these deaths

Of several that clients repeat by themselves the guilty one is so the only one at its next death, while
the others end. One death alone never refuses anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

EXPIRY_S: Final = 24 * 3600.0
"""A death counts for so long."""
MOST_DEATHS: Final = 32
"""Kept; older ones are forgotten first."""


@dataclass(frozen=True, slots=True)
class Death:
    """An engine that died or hung, and what it was working on."""

    at_s: float
    """Unix time."""
    revision: str
    """Another one is another engine: its deaths say nothing of this one."""
    running: frozenset[str]
    """Fingerprints of the requests inside."""
    again: frozenset[str] = frozenset()
    """Of these, the ones that had run at an earlier death and not ended well since, as was known then. One of
    several is not guilty because the others end well later: that takes one more death."""
    clear: frozenset[str] = frozenset()
    """Of the running, the ones that have ended well since."""


@dataclass(frozen=True, slots=True)
class Suspicions:
    """What is to be done with which requests, by fingerprint."""

    suspected: frozenset[str] = frozenset()
    """Running at a death at least; the others are among them."""
    alone: frozenset[str] = frozenset()
    """Served while no other suspect is, nor another of these."""
    refused: frozenset[str] = frozenset()


def weigh(deaths: Iterable[Death], revision: str, now_s: float) -> Suspicions:
    """What the deaths of this revision's engines say now; `deaths`: the oldest first."""
    suspected: set[str] = set()
    repeated: set[str] = set()
    refused: set[str] = set()
    for death in _counting(deaths, revision, now_s):
        twice = death.again & suspected - death.clear
        repeated |= twice
        if len(death.again) == 1:
            refused |= twice
        suspected |= death.running - death.clear
    return Suspicions(frozenset(suspected), frozenset(repeated - refused), frozenset(refused))


def with_death(deaths: Iterable[Death], death: Death) -> tuple[Death, ...]:
    """The deaths to remember after one more; those that expired are left out."""
    kept = [one for one in deaths if _counts(one, death.at_s)]
    before = weigh(kept, death.revision, death.at_s).suspected
    return (*kept, replace(death, again=death.running & before))[-MOST_DEATHS:]


def cleared(
    deaths: Iterable[Death], revision: str, well: Mapping[str, float], now_s: float
) -> tuple[Death, ...]:
    """The deaths after requests have ended well, at these times: they are clear of those before.

    A death that is still to come, by the clock, was before it was set back.
    """

    def after(death: Death) -> Death:
        if death.revision != revision:
            return death
        before = death.at_s > now_s
        now = {name for name, at_s in well.items() if before or at_s >= death.at_s}
        return replace(death, clear=death.clear | death.running & now)

    found = map(after, deaths)
    return tuple(death for death in found if death.running != death.clear)


def _counting(deaths: Iterable[Death], revision: str, now_s: float) -> list[Death]:
    return [death for death in deaths if death.revision == revision and _counts(death, now_s)]


def _counts(death: Death, now_s: float) -> bool:
    # A clock that was set back must not make a death last for ever.
    return abs(now_s - death.at_s) < EXPIRY_S
