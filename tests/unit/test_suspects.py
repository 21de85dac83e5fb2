"""Does the door keep a request from the engine that killed it, and no other?"""

from __future__ import annotations

import asyncio
import json

import pytest

from rayserve.health.facts.deaths import Deaths
from rayserve.serving.door import Door
from rayserve.serving.suspects import SHOWN, Suspects
from tests.unit.door_client import App, Client, plan

PATH = "/v1/completions"
POISON, INNOCENT, ONCE, OTHER = ({"prompt": text} for text in "pioa")


def name(record, body):
    """A body's fingerprint."""
    return record.fingerprint(PATH, json.dumps(body).encode())


class Replica:
    """A replica's door that knows what the ones before it died of."""

    def __init__(self, folder):
        self.record = Deaths(folder, "r1")
        self.dead = False
        self.suspects = Suspects(self.record)
        self.app = App()
        self.door = Door(self.app, plan(), is_dead=lambda: self.dead, suspects=self.suspects)
        self.door.open()

    async def post(self, body):
        """The answer to a request on a connection of its own."""
        return await Client(self.door).post(PATH, body)

    async def die(self, *bodies):
        """Be given up with these inside, all answered by vLLM because its engine is dead."""
        self.app.gate.clear()
        inside = [asyncio.create_task(self.post(body)) for body in bodies]
        await asyncio.sleep(0.01)
        self.dead = True
        self.app.gate.set()
        await asyncio.gather(*inside)
        self.suspects.died(self.suspects.at_death())

    async def look(self, times=2):
        """So many looks of the watch that find the engine well."""
        for _ in range(times):
            self.suspects.engine_is_well()
            await self.suspects.exchange()


@pytest.fixture
def next_replica(tmp_path):
    """Starts replicas one after the other on one host."""
    return lambda: Replica(tmp_path / "deaths")


async def test_the_second_death_refuses_what_ran_at_both(next_replica):
    """400 with an id that is no part of the request, and the engine's app is not reached."""
    await next_replica().die(POISON, INNOCENT)
    await next_replica().die(POISON, OTHER)
    third = next_replica()
    answer = await third.post(POISON)
    assert answer.status == 400
    assert name(third.record, POISON)[:SHOWN] in answer.error["message"]
    assert (await third.post(INNOCENT)).status == 200
    assert (await third.post(OTHER)).status == 200


async def test_one_death_refuses_nothing(next_replica):
    """Whatever ran is served by the next one."""
    await next_replica().die(POISON, INNOCENT)
    second = next_replica()
    assert (await second.post(POISON)).status == 200
    assert (await second.post(INNOCENT)).status == 200


async def test_what_ends_well_after_a_death_is_cleared(next_replica):
    """For the replicas after it, too; so a request that is sent again and again is never refused."""
    await next_replica().die(INNOCENT)
    second = next_replica()
    await second.post(INNOCENT)
    await second.look(times=1)
    await second.die(INNOCENT)
    assert (await next_replica().post(INNOCENT)).status == 200


async def test_what_ended_well_just_before_a_death_did_not_run_at_it(next_replica):
    """A monitor that asks the same each second is not refused, however soon the second death comes."""
    await next_replica().die(INNOCENT, POISON)
    second = next_replica()
    assert (await second.post(INNOCENT)).status == 200
    await second.die(POISON)
    third = next_replica()
    assert (await third.post(INNOCENT)).status == 200
    assert (await third.post(POISON)).status == 400


async def test_what_comes_to_a_dead_engine_has_not_run_at_its_death(next_replica):
    """It is refused with 503 before the watch looks, so that another replica takes it."""
    first = next_replica()
    first.dead = True
    answer = await first.post(INNOCENT)
    assert answer.status == 503
    assert first.app.bodies == []
    assert first.suspects.at_death() == frozenset()


async def test_several_that_ran_at_two_deaths_are_tried_alone(next_replica):
    """Beside no other that ran at a death; the others wait outside with 503, and a third party does not."""
    await next_replica().die(POISON, INNOCENT)
    await next_replica().die(POISON, INNOCENT, ONCE)
    third = next_replica()
    third.app.gate.clear()
    running = asyncio.create_task(third.post(INNOCENT))
    await asyncio.sleep(0.01)
    for held in (POISON, ONCE):
        answer = await third.post(held)
        assert answer.status == 503
        assert answer.headers[b"retry-after"]
    third.app.gate.set()
    assert (await running).status == 200
    assert (await third.post(OTHER)).status == 200
    third.app.gate.clear()
    running = asyncio.create_task(third.post(ONCE))
    await asyncio.sleep(0.01)
    assert (await third.post(POISON)).status == 503
    third.app.gate.set()
    assert (await running).status == 200
    await third.die(POISON)
    fourth = next_replica()
    assert (await fourth.post(POISON)).status == 400
    for innocent in (INNOCENT, ONCE, OTHER):
        assert (await fourth.post(innocent)).status == 200


@pytest.mark.parametrize("leaves", ["hangs up", "is cancelled"])
async def test_a_client_that_leaves_clears_nothing(next_replica, leaves):
    """However it is told: it counts as running until the engine was seen well twice, and then no more."""
    await next_replica().die(POISON)
    second = next_replica()
    second.app.gate.clear()
    client = Client(second.door)
    running = asyncio.create_task(client.post(PATH, POISON))
    await asyncio.sleep(0.01)
    assert second.suspects.at_death() == {name(second.record, POISON)}
    client.hang_up() if leaves == "hangs up" else running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await second.look(times=1)
    assert second.suspects.at_death() == {name(second.record, POISON)}
    await second.look(times=1)
    assert second.suspects.at_death() == frozenset()
    assert second.record.read().suspected == {name(second.record, POISON)}


async def test_a_record_that_fails_is_told_and_tried_again(next_replica, monkeypatch):
    """What ended well meanwhile is not lost."""
    await next_replica().die(INNOCENT)
    second = next_replica()
    await second.post(INNOCENT)

    def full(_well):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(second.record, "clear", full)
        with pytest.raises(OSError, match="No space"):
            await second.suspects.exchange()
    await second.suspects.exchange()
    assert second.record.read().suspected == frozenset()


async def test_without_a_record_nobody_is_suspected():
    """A replica that cannot write its folder serves all the same."""
    suspects = Suspects()
    assert suspects.fingerprint(PATH, b"{}") == ""
    suspects.enter("")
    assert suspects.refusal("", 1) is None
    suspects.leave("", whole=True)
    suspects.died(frozenset({"a"}))
    await suspects.exchange()
    assert suspects.at_death() == frozenset()
