"""How do tests drive a replica's watch without vLLM?"""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from rayserve.serving.door import Door
from rayserve.serving.load import EngineLoad
from rayserve.serving.vitals import Gauges, Vitals
from tests.unit.door_client import App, Clock, plan

STALL_S = 20.0


class DeadError(Exception):
    """What vLLM raises of a dead engine."""


class FakeEngine:
    """A stand-in for vLLM's engine, which no machine can make hang on demand in a unit test."""

    def __init__(self):
        self.dead = False
        self.dead_error = DeadError("dead")
        self.paused = False
        self.fails = lambda: None

    @property
    def errored(self):
        if error := self.fails():
            raise error
        return self.dead

    @errored.setter
    def errored(self, dead):
        self.dead = dead

    async def check_health(self):
        if self.errored:
            raise self.dead_error

    async def is_paused(self):
        return self.paused


class Watched:
    """A replica's door and watch with their engine, driven look by look."""

    def __init__(self, evidence=lambda _verdict: "nothing", suspects=None):
        self.engine, self.load, self.clock = FakeEngine(), EngineLoad(), Clock()
        self.app = App()
        self.door = Door(self.app, plan(), is_dead=self._is_dead, suspects=suspects)
        self.door.open()
        self.answer = asyncio.Event()
        self.asked = []
        self.registry = CollectorRegistry()
        self.vitals = Vitals(
            self.engine, self.load, self.door,
            ask=self._ask, evidence=evidence, gauges=Gauges(self.registry), clock=self.clock,
        )  # fmt: skip
        self.vitals.update(STALL_S)

    def _is_dead(self):
        return self.vitals.notice_death()

    async def _ask(self, name):
        self.asked.append(name)
        await self.answer.wait()

    async def look(self, seconds):
        """So many looks, a second apart, of the loop's own."""
        for _ in range(seconds):
            self.clock.now += 1
            self.vitals._consider(self.vitals._limits)
            await asyncio.sleep(0)

    def count(self, outcome):
        """Probes that ended so, as the metric has it."""
        return self.registry.get_sample_value("rayserve_engine_probes_total", {"outcome": outcome})
