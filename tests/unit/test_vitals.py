"""What follows a verdict: is the door shut, the evidence written, and only then the check failed?"""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from rayserve.errors import EngineHungError
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
        self.errored = False
        self.dead_error = DeadError("dead")
        self.paused = False

    async def check_health(self):
        if self.errored:
            raise self.dead_error

    async def is_paused(self):
        return self.paused


class Bench:
    """A replica's watch with its engine, driven look by look."""

    def __init__(self, evidence=lambda _verdict: "nothing"):
        self.engine, self.load, self.clock = FakeEngine(), EngineLoad(), Clock()
        self.door = Door(App(), plan())
        self.door.open()
        self.answer = asyncio.Event()
        self.asked = []
        self.registry = CollectorRegistry()
        self.vitals = Vitals(
            self.engine, self.load, self.door,
            ask=self._ask, evidence=evidence, gauges=Gauges(self.registry), clock=self.clock,
        )  # fmt: skip
        self.vitals.update(STALL_S)

    async def _ask(self, name):
        self.asked.append(name)
        await self.answer.wait()

    async def look(self, seconds):
        """So many looks, a second apart, of the loop's own."""
        for _ in range(seconds):
            self.clock.now += 1
            self.vitals._consider(self.vitals._limits)
            await asyncio.sleep(0)


@pytest.fixture
async def bench():
    """A watch that is ended after the test."""
    made = Bench()
    yield made
    made.vitals.stop()


async def test_a_hang_closes_the_door_before_serve_hears_of_it(bench):
    """No step, no answer: new requests get 503 at once, the check fails with our error."""
    bench.door._pending = 2
    await bench.look(int(STALL_S) + 3)
    assert bench.asked == ["rayserve-probe-1"]
    assert bench.door._closed_for[0] == "unhealthy"
    with pytest.raises(EngineHungError, match="2 sequences pending"):
        await bench.vitals.check()


async def test_a_dead_engine_fails_with_vllms_own_error(bench):
    """The verdict is vLLM's, and needs one look."""
    await bench.vitals.check()
    bench.engine.errored = True
    await bench.look(1)
    assert bench.door._closed_for[0] == "unhealthy"
    with pytest.raises(DeadError):
        await bench.vitals.check()


async def test_the_check_waits_for_the_evidence():
    """Serve kills a replica whose check fails, so the bundle is whole before."""
    order = []
    bench = Bench(evidence=lambda verdict: order.append(verdict["state"]) or "written")
    bench.engine.errored = True
    await bench.look(1)
    with pytest.raises(DeadError):
        await bench.vitals.check()
    assert order == ["dead"]
    bench.vitals.stop()


async def test_evidence_that_cannot_be_written_holds_up_nothing():
    """A full disk costs the bundle, not the verdict."""

    def full(_verdict):
        raise OSError(28, "No space left on device")

    bench = Bench(evidence=full)
    bench.engine.errored = True
    await bench.look(1)
    with pytest.raises(DeadError):
        await bench.vitals.check()
    bench.vitals.stop()


async def test_a_probe_that_is_answered_with_an_error_is_answered(bench):
    """An engine that refuses a probe is alive; the next one goes out when it is time again."""

    async def refuse(name):
        bench.asked.append(name)
        raise ValueError("no such task")

    bench.vitals._ask = refuse
    bench.door._pending = 1
    await bench.look(60)
    assert len(bench.asked) > 1
    await bench.vitals.check()


async def test_a_paused_engine_is_left_alone(bench):
    """It says itself that it is paused, when it is asked beside the probe."""
    bench.engine.paused = True
    bench.door._pending = 1
    await bench.look(100)
    await bench.vitals.check()
    assert bench.door._closed_for == ("", "")


async def test_an_engine_that_works_is_never_asked(bench):
    """Steps are proof enough: no probe takes a place in the queue."""
    bench.door._pending = 3
    for _ in range(100):
        bench.load.step(bench.clock.now, 3, 0, 0.1)
        await bench.look(1)
    assert bench.asked == []


async def test_the_metrics_tell_the_state(bench):
    """A dashboard sees a hang with the same look as the door."""
    bench.door._pending = 1
    await bench.look(int(STALL_S) + 3)
    assert bench.registry.get_sample_value(
        "rayserve_engine_state", {"rayserve_engine_state": "hung"}
    ) == pytest.approx(1)
    assert bench.registry.get_sample_value("rayserve_engine_quiet_seconds") >= STALL_S


async def test_a_new_limit_holds_from_the_next_look(bench):
    """`stall_s` changes on a running replica."""
    bench.vitals.update(1000.0)
    bench.door._pending = 1
    await bench.look(100)
    await bench.vitals.check()
    assert bench.door._closed_for == ("", "")
