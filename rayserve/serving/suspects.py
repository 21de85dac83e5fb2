"""Which requests were inside when the engine died, and which are kept from it?

The door asks here with each request and says when it ends; the watch asks at the end what was running.
`health.poison` decides, `health.facts.deaths` remembers.

A request that ended is not yet one that ended well. vLLM answers all that is inside as soon as its
engine dies, and calls itself dead by then. And clients give up while it hangs or dies: these count as
running until the engine has made some steps without them, or has answered a probe.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from rayserve.health.facts.deaths import Deaths
from rayserve.health.poison import Suspicions
from rayserve.serving.replies import Refusal

logger = logging.getLogger("ray.serve")

SHOWN: Final = 12
"""Characters of a fingerprint that clients and logs are told."""
STEPS_AFTER: Final = 8
"""Steps after which a request whose client left is no longer in any: vLLM hears of it between two, and
plans one ahead, or as many as a pipeline has stages."""
LEFT_S: Final = 5.0
"""An engine that dies and does not hang is seen to be dead so soon: who left before had left anyway."""
RECENT_S: Final = 5.0
"""What ended well is remembered for so long, since a death elsewhere is heard of later."""
TURN: Final = 2.0
"""One that was told to come back has its turn for so many times as long as it was told to wait."""


class Suspects:
    """The requests of one replica; without `deaths` nobody is suspected.

    Args:
        deaths: what is remembered.
        steps: how many steps the engine has made.
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        deaths: Deaths | None = None,
        *,
        steps: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._deaths = deaths
        self._steps = steps
        self._clock = clock
        self._known = Suspicions()
        self._inside: Counter[str] = Counter()
        self._left: dict[str, tuple[int, float]] = {}
        self._forgot_at = 0
        self._well: dict[str, float] = {}
        self._next = ("", 0.0)

    def fingerprint(self, path: str, body: bytes) -> str:
        """What a request is known by; empty: nobody keeps a record."""
        return self._deaths.fingerprint(path, body) if self._deaths is not None else ""

    def refusal(self, fingerprint: str, retry_after_s: int) -> Refusal | None:
        """Why a request is kept from the engine."""
        name = fingerprint[:SHOWN]
        if fingerprint in self._known.refused:
            message = (
                "this request was running each time when the engine died, and is not tried again; "
                f"its id is {name}"
            )
            return Refusal(400, "poison", message)
        if self._must_wait(fingerprint, self._clock(), TURN * retry_after_s):
            message = (
                "this request was running when the engine died, and waits until it, or another such "
                f"request, has been tried alone; its id is {name}"
            )
            return Refusal(503, "suspect", message, retry_after_s=retry_after_s)
        return None

    def _must_wait(self, fingerprint: str, now_s: float, turn_s: float) -> bool:
        """One that is tried alone runs beside no other suspect, so that it is the only one if it kills.

        The first suspect that is sent away is the next: the others wait with it, or they might keep it out
        for ever. A second copy of one that is inside has no turn.
        """
        known = self._known
        if fingerprint not in known.suspected:
            return False
        following, until_s = self._next
        others_turn = following in known.suspected - {fingerprint} and now_s < until_s
        apart = known.suspected if fingerprint in known.alone else known.alone
        self._forget_left()
        beside = self._inside.keys() | self._left.keys() - {fingerprint}
        must = others_turn or not apart.isdisjoint(beside)
        if must and not others_turn and fingerprint not in self._inside:
            self._next = (fingerprint, now_s + turn_s)
        return must

    def enter(self, fingerprint: str) -> None:
        """The engine's app begins with a request."""
        if fingerprint:
            self._inside[fingerprint] += 1
            self._left.pop(fingerprint, None)
            if fingerprint == self._next[0]:
                self._next = ("", 0.0)

    def leave(self, fingerprint: str, *, well: bool) -> None:
        """It is done with it; `well`: the client stayed, the app did not fail, and the engine is not dead."""
        if not fingerprint:
            return
        self._inside[fingerprint] -= 1
        if not self._inside[fingerprint]:
            del self._inside[fingerprint]
        if not well:
            self._forget_left()
            self._left.pop(fingerprint, None)  # the last that left is the last of them
            self._left[fingerprint] = (self._steps(), self._clock())
        elif self._deaths is not None:
            self._well[fingerprint] = self._deaths.clock()

    def engine_is_well(self) -> None:
        """It has answered a probe: who left is in no step of it."""
        self._left.clear()

    def _forget_left(self) -> None:
        """Clients that left, and whose requests the engine has left behind since."""
        steps = self._steps()
        if steps != self._forgot_at:
            self._forgot_at = steps
            since = steps - STEPS_AFTER
            self._left = {name: left for name, left in self._left.items() if left[0] > since}

    def at_death(self, *, hung: bool) -> tuple[str, ...]:
        """What counts as running when the engine is given up now: what is inside, and who left, the last first."""
        self._forget_left()
        since_s = float("-inf") if hung else self._clock() - LEFT_S
        left = [name for name, (_, at_s) in reversed(self._left.items()) if at_s >= since_s]
        return tuple(dict.fromkeys([*self._inside, *left]))

    def died(self, running: Sequence[str]) -> None:
        """Remember a death, and who had ended well before it. Blocks on the disk; called in a thread.

        Raises:
            OSError: it could not be written.
        """
        if self._deaths is not None and running:
            self._learn(self._deaths.add(running, dict(self._well)))

    async def exchange(self) -> None:
        """Tell the other replicas who ended well, and learn what they know.

        Raises:
            OSError: the record cannot be read or written; who ended well is told the next time.
        """
        deaths = self._deaths
        if deaths is None:
            return
        well = {name: at_s for name, at_s in self._well.items() if name in self._known.suspected}
        known = await asyncio.to_thread(lambda: deaths.clear(well) if well else deaths.read())
        now_s = deaths.clock()
        self._well = {
            name: at_s
            for name, at_s in self._well.items()
            if well.get(name) != at_s and (name in known.suspected or abs(now_s - at_s) < RECENT_S)
        }
        self._learn(known)

    def _learn(self, known: Suspicions) -> None:
        new = known.refused - self._known.refused
        self._known = known
        if new:
            names = ", ".join(sorted(name[:SHOWN] for name in new))
            logger.error("requests that ran each time when the engine died are refused: %s", names)
