"""Is the engine dead, hung, or only busy? Two signals before a replica is given up.

The engine's own answers stay green while it hangs: `/health` is 200, its `check_health` passes, its
gauges stand still or read 0. So a watch in the replica looks at short intervals, and the verdict is a
function of what it saw:

    vLLM says that its engine is dead          → dead, at once
    no step for `stall_s` while work is pending
      and a probe of ours that does not come back → hung
    anything else                              → serving, however slow

A long prefill and a full queue make steps; a paused engine says so; an engine that answers the probe
has made a step for it. A request that is still read or tokenised is pending without any step, but then
the probe comes back. A probe that failed before it reached the engine says nothing, and is sent anew.

Only time in which the watch itself ran is counted: a replica that was stopped, or whose host had no
processor for it, cannot tell from the clock that its engine did nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

UNSEEN: Final = 2.0
"""A gap between two looks counts as at most this many intervals."""
PROBE_AFTER: Final = 0.5
"""A probe goes out after this share of `stall_s` without a step, so that its deadline, a quarter, is
over when the first signal is there."""
PROBE_DEADLINE: Final = 0.25
PROBE_LEAST: Final = 3.0
"""A probe's deadline in looks at least, however short `stall_s` is."""
IDLE_PROBE_S: Final = 60.0
"""How often an engine without work is asked, in seconds since its last step."""


class State(StrEnum):
    """What the watch makes of the engine."""

    IDLE = "idle"
    """Nothing to do."""
    BUSY = "busy"
    """Work is pending, and nothing says that it does not go on."""
    QUIET = "quiet"
    """One of two signals: no step for `stall_s`, or a probe past its deadline."""
    HUNG = "hung"
    """Both signals."""
    DEAD = "dead"
    """vLLM itself has given it up: a process of it is gone, or what reads its output failed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When the watch gives the engine up. All in seconds."""

    stall_s: float
    """Without a step while work is pending: the plan's `timeouts.stall_s`."""
    look_s: float = 1.0
    """Between two looks of the watch."""

    @property
    def probe_s(self) -> float:
        """A probe's deadline, and the least time between the end of one and the next."""
        return max(self.stall_s * PROBE_DEADLINE, self.look_s * PROBE_LEAST)


@dataclass(frozen=True, slots=True)
class Look:
    """What the watch saw at one moment."""

    at_s: float
    """Monotonic."""
    steps: int
    """Engine steps since the start, as its statistics count them."""
    pending: int
    """Sequences inside, as the door counts them: the engine's own gauges may read 0 in a hang."""
    probe: int = 0
    """Number of the probe that is out, 0 for none."""
    sent: int = 0
    """Probes sent so far: one may go out and fail between two looks."""
    paused: bool = False
    """Somebody paused the engine or put it to sleep, to change its weights."""
    dead: bool = False
    """vLLM's own `errored`."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What is remembered between two looks."""

    look: Look
    quiet_s: float = 0.0
    """Watched seconds in which work was pending, since the last step."""
    still_s: float = 0.0
    """Watched seconds without a step, with or without work."""
    probe_s: float = 0.0
    """Watched seconds since the probe that is out was sent."""
    rest_s: float = 0.0
    """Watched seconds without a probe, of those without a step."""


def follow(before: Progress, look: Look, limits: Limits) -> Progress:
    """What is remembered after one more look."""
    watched_s = min(max(0.0, look.at_s - before.look.at_s), UNSEEN * limits.look_s)
    if look.steps != before.look.steps or look.paused:
        return Progress(look)
    same = look.probe and look.probe == before.look.probe
    # Work that came since the last look has not waited for the whole interval.
    worked = _has_work(look) and _has_work(before.look)
    return Progress(
        look,
        # Clients that give up and come again do not start it anew: only a step does.
        quiet_s=before.quiet_s + (watched_s if worked else 0.0),
        still_s=before.still_s + watched_s,
        probe_s=before.probe_s + watched_s if same else 0.0,
        rest_s=0.0 if look.probe or look.sent != before.look.sent else before.rest_s + watched_s,
    )


def judge(progress: Progress, limits: Limits) -> State:
    """The verdict on the engine as last seen."""
    look = progress.look
    if look.dead:
        return State.DEAD
    quiet = progress.quiet_s >= limits.stall_s
    late = bool(look.probe) and progress.probe_s >= limits.probe_s
    if quiet and late:
        return State.HUNG
    if quiet or late:
        return State.QUIET
    return State.BUSY if _has_work(look) else State.IDLE


def wants_probe(progress: Progress, limits: Limits) -> bool:
    """Whether it is time to ask the engine for one token."""
    look = progress.look
    if look.probe or look.paused or look.dead:
        return False
    if progress.quiet_s >= limits.stall_s * PROBE_AFTER:
        return progress.rest_s >= min(limits.probe_s, limits.stall_s * PROBE_AFTER)
    return progress.still_s >= IDLE_PROBE_S and progress.rest_s >= IDLE_PROBE_S


def _has_work(look: Look) -> bool:
    """A probe is work, too: an engine that hangs with nobody waiting is found by it."""
    return look.pending > 0 or look.probe > 0
