"""Does the door keep a request from the engine that killed it, and no other?"""

from __future__ import annotations

import asyncio
import json

import pytest

from rayserve.health.facts.deaths import Deaths
from rayserve.serving.suspects import LEFT_S, SHOWN, STEPS_AFTER, Suspects
from tests.unit.door_client import Client, plan
from tests.unit.watched import Watched

PATH = "/v1/completions"
POISON, INNOCENT, ONCE, OTHER = ({"prompt": text} for text in "pioa")


def name(record, body):
    """A body's fingerprint."""
    return record.fingerprint(PATH, json.dumps(body).encode())


class Replica(Watched):
    """A replica that knows what the ones before it died of."""

    def __init__(self, folder):
        self.record = Deaths(folder, "r1")
        self.suspects = Suspects(
            self.record, steps=lambda: self.load.steps, clock=lambda: self.clock.now
        )
        super().__init__(self.remember, self.suspects)

    def remember(self, verdict):
        """What a replica does with a verdict."""
        self.suspects.died(verdict["running"])
        return "remembered"

    async def post(self, body):
        """The answer to a request on a connection of its own."""
        return await Client(self.door).post(PATH, body)

    async def die(self, *bodies):
        """Die with these inside, which vLLM all answers because its engine is dead."""
        self.app.gate.clear()
        inside = [asyncio.create_task(self.post(body)) for body in bodies]
        await asyncio.sleep(0.01)
        self.engine.errored = True
        self.app.gate.set()
        await asyncio.gather(*inside)
        await asyncio.wait_for(self.vitals._told.wait(), 10)


async def leave_early(replica, body):
    """A client that hangs up while its request runs."""
    replica.app.gate.clear()
    client = Client(replica.door)
    running = asyncio.create_task(client.post(PATH, body))
    await asyncio.sleep(0.01)
    client.hang_up()
    await running
    replica.app.gate.set()


@pytest.fixture
async def next_replica(tmp_path):
    """Starts replicas one after the other on one host, and ends them after the test."""
    started = []

    async def start():
        started.append(Replica(tmp_path / "deaths"))
        await started[-1].suspects.exchange()
        return started[-1]

    yield start
    for one in started:
        one.vitals.stop()


async def test_the_second_death_refuses_what_ran_at_both(next_replica):
    """400 with an id that is no part of the request, and the engine's app is not reached."""
    await (await next_replica()).die(POISON, INNOCENT)
    await (await next_replica()).die(POISON, OTHER)
    third = await next_replica()
    answer = await third.post(POISON)
    assert answer.status == 400
    assert name(third.record, POISON)[:SHOWN] in answer.error["message"]
    assert (await third.post(INNOCENT)).status == 200
    assert (await third.post(OTHER)).status == 200


async def test_what_vllm_answers_at_its_death_ran_at_it_and_has_not_ended_well(next_replica):
    """All that was inside is in the record, of requests that were answered, too."""
    await (await next_replica()).die(POISON, INNOCENT)
    second = await next_replica()
    await second.die(POISON, INNOCENT)
    ran = {name(second.record, body) for body in (POISON, INNOCENT)}
    assert second.record.read().alone == ran
    assert second.door._pending == 0


async def test_one_death_refuses_nothing(next_replica):
    """Whatever ran is served by the next one."""
    await (await next_replica()).die(POISON, INNOCENT)
    second = await next_replica()
    assert (await second.post(POISON)).status == 200
    assert (await second.post(INNOCENT)).status == 200


async def test_what_ends_well_after_a_death_is_cleared(next_replica):
    """For the replicas after it, too; so a request that is sent again and again is never refused."""
    await (await next_replica()).die(INNOCENT)
    second = await next_replica()
    await second.post(INNOCENT)
    await second.suspects.exchange()
    await second.die(INNOCENT)
    assert (await (await next_replica()).post(INNOCENT)).status == 200


async def test_what_ended_well_just_before_a_death_did_not_run_at_it(next_replica):
    """A monitor that asks the same each second is not refused, however soon the second death comes."""
    await (await next_replica()).die(INNOCENT, POISON)
    second = await next_replica()
    assert (await second.post(INNOCENT)).status == 200
    await second.die(POISON)
    third = await next_replica()
    assert (await third.post(INNOCENT)).status == 200
    assert (await third.post(POISON)).status == 400


async def test_what_comes_to_a_dead_engine_has_not_run_at_its_death(next_replica):
    """It is refused with 503 before the watch looks, so that another replica takes it."""
    first = await next_replica()
    first.engine.errored = True
    answer = await first.post(INNOCENT)
    assert answer.status == 503
    assert first.app.bodies == []
    assert first.suspects.at_death(hung=True) == ()


async def test_who_ended_well_after_a_death_is_not_refused_for_it_at_the_next(next_replica):
    """Though others that ran at that death have not come back, so that it is remembered."""
    await (await next_replica()).die(INNOCENT, OTHER)
    second = await next_replica()
    await second.post(INNOCENT)
    await second.suspects.exchange()
    await second.die(INNOCENT, POISON)
    assert (await (await next_replica()).post(INNOCENT)).status == 200


async def test_several_that_ran_at_two_deaths_are_tried_alone(next_replica):
    """Beside no other that ran at a death; the others wait outside with 503, and a third party does not."""
    await (await next_replica()).die(POISON, INNOCENT)
    await (await next_replica()).die(POISON, INNOCENT, ONCE)
    third = await next_replica()
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
    third.clock.now += 60  # the turn of the one that was sent away first is over
    third.app.gate.clear()
    running = asyncio.create_task(third.post(ONCE))
    await asyncio.sleep(0.01)
    assert (await third.post(POISON)).status == 503
    third.app.gate.set()
    assert (await running).status == 200
    third.clock.now += 60
    await third.die(POISON)
    fourth = await next_replica()
    assert (await fourth.post(POISON)).status == 400
    for innocent in (INNOCENT, ONCE, OTHER):
        assert (await fourth.post(innocent)).status == 200


@pytest.mark.parametrize("leaves", ["hangs up", "is cancelled"])
async def test_a_client_that_leaves_clears_nothing(next_replica, leaves):
    """However it is told: it counts as running until the engine has made some steps without it."""
    await (await next_replica()).die(POISON)
    second = await next_replica()
    second.app.gate.clear()
    client = Client(second.door)
    running = asyncio.create_task(client.post(PATH, POISON))
    await asyncio.sleep(0.01)
    assert second.suspects.at_death(hung=True) == (name(second.record, POISON),)
    client.hang_up() if leaves == "hangs up" else running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    second.load.steps += STEPS_AFTER - 1
    assert second.suspects.at_death(hung=True) == (name(second.record, POISON),)
    second.load.steps += 1
    assert second.suspects.at_death(hung=True) == ()
    assert second.record.read().suspected == {name(second.record, POISON)}


async def test_a_poison_whose_client_does_not_wait_for_the_end_is_found(next_replica):
    """It has left when vLLM says that its engine is dead; the stream beside it is not taken for the poison."""
    for beside in (INNOCENT, OTHER):
        one = await next_replica()
        await leave_early(one, POISON)
        await one.die(beside)
    third = await next_replica()
    assert (await third.post(POISON)).status == 400
    assert (await third.post(INNOCENT)).status == 200


async def test_one_that_is_tried_alone_has_its_turn_after_it_was_sent_away(next_replica):
    """Another suspect that is always inside must wait then, for as long as the first may take to come back."""
    await (await next_replica()).die(POISON, OTHER)
    third = await next_replica()
    await third.die(POISON, INNOCENT, OTHER)
    third = await next_replica()
    third.app.gate.clear()
    running = asyncio.create_task(third.post(INNOCENT))
    await asyncio.sleep(0.01)
    assert (await third.post(POISON)).status == 503
    assert (await third.post(INNOCENT)).status == 503
    assert (await third.post(OTHER)).status == 503
    third.app.gate.set()
    await running
    assert (await third.post(OTHER)).status == 503
    assert (await third.post(ONCE)).status == 200
    assert (await third.post(POISON)).status == 200
    assert (await third.post(OTHER)).status == 200


async def test_who_always_leaves_hides_no_poison(next_replica):
    """One that is tried alone waits until the engine has left behind a suspect whose client left."""
    for _ in range(2):
        await (await next_replica()).die(POISON, OTHER)
    third = await next_replica()
    await leave_early(third, OTHER)
    assert (await third.post(POISON)).status == 503
    third.load.steps += STEPS_AFTER
    await third.die(POISON)
    fourth = await next_replica()
    assert (await fourth.post(POISON)).status == 400
    assert (await fourth.post(OTHER)).status == 200


async def test_copies_of_one_that_runs_have_no_turn(next_replica):
    """Else one that is sent again and again would keep all others out."""
    for _ in range(2):
        await (await next_replica()).die(POISON, OTHER)
    third = await next_replica()
    third.app.gate.clear()
    running = asyncio.create_task(third.post(OTHER))
    await asyncio.sleep(0.01)
    assert (await third.post(OTHER)).status == 503
    third.app.gate.set()
    await running
    assert (await third.post(POISON)).status == 200


async def test_a_client_that_left_a_while_before_a_death_had_left_anyway(next_replica):
    """An engine that does not hang is seen to be dead at once; of one that hangs nobody knows since when."""
    one = await next_replica()
    await leave_early(one, OTHER)
    one.clock.now += LEFT_S + 1
    assert one.suspects.at_death(hung=False) == ()
    assert one.suspects.at_death(hung=True) == (name(one.record, OTHER),)


async def test_a_probe_that_is_answered_shows_that_who_left_is_in_no_step(next_replica):
    """An engine that has nothing else to do makes no other steps."""
    one = await next_replica()
    await leave_early(one, OTHER)
    one.answer.set()
    await one.look(70)
    assert one.suspects.at_death(hung=True) == ()


async def test_what_ended_well_just_before_a_death_is_heard_of_is_told(next_replica):
    """Another replica of the host died a moment ago."""
    first, second = await next_replica(), await next_replica()
    await first.die(INNOCENT)
    assert (await second.post(INNOCENT)).status == 200
    await second.suspects.exchange()
    await second.suspects.exchange()
    assert second.record.read().suspected == frozenset()


async def test_a_turn_that_nobody_takes_is_over_after_a_while(next_replica):
    """Its client may have given up."""
    await (await next_replica()).die(POISON, OTHER)
    await (await next_replica()).die(POISON, OTHER, INNOCENT)
    third = await next_replica()
    third.app.gate.clear()
    running = asyncio.create_task(third.post(INNOCENT))
    await asyncio.sleep(0.01)
    assert (await third.post(POISON)).status == 503
    third.app.gate.set()
    await running
    assert (await third.post(OTHER)).status == 503
    third.clock.now += 2 * plan().retry_after_s
    assert (await third.post(OTHER)).status == 200


async def test_a_record_that_fails_is_told_and_tried_again(next_replica, monkeypatch):
    """What ended well meanwhile is not lost."""
    await (await next_replica()).die(INNOCENT)
    second = await next_replica()
    await second.post(INNOCENT)

    def full(_well):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(second.record, "clear", full)
        with pytest.raises(OSError, match="No space"):
            await second.suspects.exchange()
    await second.suspects.exchange()
    assert second.record.read().suspected == frozenset()


async def test_a_disk_that_fails_at_the_start_is_asked_again(tmp_path):
    """Until then nobody is suspected, and what is known is known as soon as it can be read."""
    folder = tmp_path / "deaths"
    first = Replica(folder)
    await first.suspects.exchange()
    await first.die(POISON)
    aside = folder.rename(tmp_path / "aside")
    folder.write_text("no folder")
    second = Replica(folder)
    with pytest.raises(FileExistsError):
        await second.suspects.exchange()
    assert (await second.post(POISON)).status == 200
    folder.unlink()
    aside.rename(folder)
    await second.suspects.exchange()
    await second.die(POISON)
    assert second.record.read().refused == {name(second.record, POISON)}
    first.vitals.stop()
    second.vitals.stop()


async def test_without_a_record_nobody_is_suspected():
    """A replica that cannot write its folder serves all the same."""
    suspects = Suspects()
    assert suspects.fingerprint(PATH, b"{}") == ""
    suspects.enter("")
    assert suspects.refusal("", 1) is None
    suspects.leave("", well=True)
    suspects.died(("a",))
    await suspects.exchange()
    assert suspects.at_death(hung=True) == ()
