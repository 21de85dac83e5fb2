"""Which requests were inside when the engine died, and which are kept from it?

The door asks here with each request and says when it ends; the watch says with each look whether the
engine is well, and at the end what it died of. `health.poison` decides, `health.facts.deaths`
remembers.

A request that ended is not yet one that ended well. vLLM answers all that is inside as soon as its
engine dies, up to a second before the watch sees it; it calls itself dead by then. And clients give up
while it hangs: these count as running until two looks have found the engine well after them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Final

from rayserve.health.facts.deaths import Deaths
from rayserve.health.poison import Suspicions
from rayserve.serving.replies import Refusal

logger = logging.getLogger("ray.serve")

SHOWN: Final = 12
"""Characters of a fingerprint that clients and logs are told."""


class Suspects:
    """The requests of one replica; without `deaths` nobody is suspected."""

    def __init__(self, deaths: Deaths | None = None) -> None:
        """Blocks on the disk.

        Raises:
            OSError: what is remembered cannot be read.
        """
        self._deaths = deaths
        self._known = deaths.read() if deaths is not None else Suspicions()
        self._inside: Counter[str] = Counter()
        self._left: set[str] = set()
        self._older: set[str] = set()
        self._well: dict[str, float] = {}

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
        if self._must_wait(fingerprint):
            message = (
                "this request was running when the engine died, and waits until it, or another such "
                f"request, has been tried alone; its id is {name}"
            )
            return Refusal(503, "suspect", message, retry_after_s=retry_after_s)
        return None

    def _must_wait(self, fingerprint: str) -> bool:
        """One that is tried alone runs beside no other suspect, so that it is the only one if it kills."""
        known = self._known
        if fingerprint in known.alone:
            return not known.suspected.isdisjoint(self._inside)
        return fingerprint in known.suspected and not known.alone.isdisjoint(self._inside)

    def enter(self, fingerprint: str) -> None:
        """The engine's app begins with a request."""
        if fingerprint:
            self._inside[fingerprint] += 1

    def leave(self, fingerprint: str, *, whole: bool) -> None:
        """It is done with it; `whole`: the client stayed, the app did not fail, the engine lives."""
        if not fingerprint:
            return
        self._inside[fingerprint] -= 1
        if not self._inside[fingerprint]:
            del self._inside[fingerprint]
        if not whole:
            self._left.add(fingerprint)
        elif fingerprint in self._known.suspected and self._deaths is not None:
            self._well[fingerprint] = self._deaths.clock()

    def engine_is_well(self) -> None:
        """The watch has seen a step since its last look."""
        self._older, self._left = self._left, set()

    def at_death(self) -> frozenset[str]:
        """What counts as running when the engine is given up now."""
        return frozenset(self._older | self._left | self._inside.keys())

    def died(self, running: frozenset[str]) -> None:
        """Remember a death, and who had ended well before it. Blocks on the disk.

        Raises:
            OSError: it could not be written.
        """
        if self._deaths is not None and running:
            self._deaths.clear(dict(self._well))
            self._learn(self._deaths.add(running))

    async def exchange(self) -> None:
        """Tell the other replicas who ended well, and learn what they know.

        Raises:
            OSError: the record cannot be read or written; who ended well is told the next time.
        """
        deaths = self._deaths
        if deaths is None:
            return
        well = dict(self._well)
        known = await asyncio.to_thread(lambda: deaths.clear(well) if well else deaths.read())
        self._well = {name: at_s for name, at_s in self._well.items() if well.get(name) != at_s}
        self._learn(known)

    def _learn(self, known: Suspicions) -> None:
        new = known.refused - self._known.refused
        self._known = known
        if new:
            names = ", ".join(sorted(name[:SHOWN] for name in new))
            logger.error("requests that ran each time when the engine died are refused: %s", names)
