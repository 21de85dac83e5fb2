"""What follows a verdict: is the door shut, the evidence written, and only then the check failed?"""

from __future__ import annotations

import asyncio
import threading
from unittest.mock import AsyncMock

import pytest

from rayserve.errors import EngineHungError
from rayserve.health.progress import Limits
from rayserve.serving import vitals
from tests.unit.watched import STALL_S, DeadError, Watched


@pytest.fixture
async def made():
    """Makes watches, and ends them after the test."""
    all_of_them = []

    def make(evidence=lambda _verdict: "nothing"):
        all_of_them.append(Watched(evidence))
        return all_of_them[-1]

    yield make
    for one in all_of_them:
        one.vitals.stop()


@pytest.fixture
async def bench(made):
    """A watch."""
    return made()


async def test_a_hang_closes_the_door_before_serve_hears_of_it(bench):
    """No step, no answer: new requests get 503 at once, the check fails with our error."""
    bench.door._pending = 2
    await bench.look(int(STALL_S) + 3)
    assert bench.asked == ["rayserve-probe-1"]
    assert bench.door._closed_for[0] == "unhealthy"
    await asyncio.wait_for(bench.vitals._told.wait(), 10)
    with pytest.raises(EngineHungError, match="2 sequences pending"):
        await bench.vitals.check()


async def test_the_evidence_says_which_requests_ran(made):
    """By their fingerprints, as they were when the engine was given up."""
    told = []
    bench = made(lambda verdict: told.append(verdict) or "written")
    bench.door.suspects.enter("f1")
    bench.engine.errored = True
    await bench.look(1)
    await asyncio.wait_for(bench.vitals._told.wait(), 10)
    assert told[0]["running"] == ["f1"]


async def test_each_look_exchanges_what_is_known_of_deaths(bench, monkeypatch):
    """With the other replicas of the host, and none after the engine was given up."""
    monkeypatch.setattr(bench.door.suspects, "exchange", exchanged := AsyncMock())
    await bench.look(6)
    await asyncio.sleep(0.01)
    before = exchanged.await_count
    assert before >= 3
    bench.engine.errored = True
    await bench.look(6)
    assert exchanged.await_count == before


async def test_whoever_asks_first_whether_the_engine_is_dead_gives_it_up(bench):
    """A request that comes before the next look is told, and nothing waits for that look."""
    assert not bench.vitals.notice_death()
    bench.engine.errored = True
    assert bench.vitals.notice_death()
    assert bench.door._closed_for[0] == "unhealthy"
    await asyncio.wait_for(bench.vitals._told.wait(), 10)


async def test_an_engine_that_is_shut_down_has_not_died(made):
    """A replica that stops ends its watch first: what vLLM says of its engine then is no verdict."""
    told = []
    bench = made(lambda verdict: told.append(verdict) or "written")
    bench.vitals.stop()
    bench.engine.errored = True
    assert bench.vitals.notice_death()
    await asyncio.sleep(0.05)
    assert bench.door._closed_for == ("", "")
    assert told == []


async def test_a_dead_engine_fails_with_vllms_own_error(bench):
    """The verdict is vLLM's, and needs one look."""
    await bench.vitals.check()
    bench.engine.errored = True
    await bench.look(1)
    assert bench.door._closed_for[0] == "unhealthy"
    await asyncio.wait_for(bench.vitals._told.wait(), 10)
    for _ in range(3):
        with pytest.raises(DeadError) as seen:
            await bench.vitals.check()
    assert len(seen.traceback) == 2


async def test_the_check_passes_until_the_evidence_is_written(made):
    """Serve kills a replica whose check fails or is late, so the bundle is whole before."""
    go, order = threading.Event(), []

    def slow(verdict):
        go.wait(10)
        order.append(verdict["state"])
        return "written"

    bench = made(slow)
    bench.engine.errored = True
    await bench.vitals.check()  # sees it sooner than the next look
    assert bench.door._closed_for[0] == "unhealthy"
    await bench.vitals.check()
    assert order == []
    await bench.look(2)  # the watch goes on for a look, and gives nothing up twice
    go.set()
    await asyncio.wait_for(bench.vitals._told.wait(), 10)
    with pytest.raises(DeadError):
        await bench.vitals.check()
    assert order == ["dead"]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), TimeoutError(), KeyError("a bug")]
)
async def test_evidence_that_cannot_be_written_holds_up_nothing(made, error, caplog):
    """A full disk, a host that hangs, or a bug of ours costs the bundle, not the verdict."""

    def fails(_verdict):
        raise error

    bench = made(fails)
    bench.engine.errored = True
    await bench.look(1)
    await asyncio.wait_for(bench.vitals._told.wait(), 10)
    with pytest.raises(DeadError):
        await bench.vitals.check()
    await asyncio.sleep(0)
    assert type(error).__name__ in caplog.text


async def test_a_probe_that_fails_is_sent_anew_at_its_pace_and_told_once(bench, caplog):
    """It says nothing of the engine: no verdict, no storm of requests, no log full of tracebacks."""

    async def refuse(name):
        bench.asked.append(name)
        raise ValueError("no such task")

    bench.vitals._ask = refuse
    bench.door._pending = 1
    await bench.look(60)
    assert 3 <= len(bench.asked) <= 60 / 5
    assert bench.count("failed") == len(bench.asked)
    assert caplog.text.count("no such task") == 2  # message and traceback, once
    await bench.vitals.check()
    assert bench.door._closed_for == ("", "")


async def test_a_probe_that_comes_back_is_counted(bench):
    """An idle engine is asked once a minute."""
    bench.answer.set()
    await bench.look(130)
    assert bench.count("answered") == len(bench.asked) == 2


async def test_a_look_that_fails_does_not_end_the_watch(made, monkeypatch):
    """Whatever went wrong in one look, the next one sees the engine die."""
    monkeypatch.setattr(vitals, "Limits", lambda stall_s: Limits(stall_s, look_s=0.01))
    bench = made()
    broken = iter([RuntimeError("once")])
    bench.engine.fails = lambda: next(broken, None)
    await asyncio.sleep(0.1)
    bench.engine.errored = True
    await asyncio.wait_for(bench.vitals._told.wait(), 10)
    assert bench.door._closed_for[0] == "unhealthy"
    assert next(broken, None) is None


async def test_a_paused_engine_is_left_alone(bench):
    """It says itself that it is paused, when it is asked beside the probe."""
    bench.engine.paused = True
    bench.door._pending = 1
    await bench.look(100)
    await bench.vitals.check()
    assert bench.door._closed_for == ("", "")


async def test_an_engine_that_no_longer_says_that_it_is_paused_is_not(bench, monkeypatch):
    """A pause that was seen once does not blind the watch when the engine hangs after it."""
    bench.engine.paused = True
    bench.door._pending = 1
    await bench.look(30)
    monkeypatch.setattr(bench.engine, "is_paused", bench.answer.wait)
    monkeypatch.setattr(Limits, "probe_s", 0.01)
    await bench.look(1)
    await asyncio.sleep(0.05)
    await bench.look(int(STALL_S) + 5)
    assert bench.door._closed_for[0] == "unhealthy"


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
