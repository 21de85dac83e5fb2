"""Does the door bound the queue, the share of each key and its tokens a minute?"""

from __future__ import annotations

import asyncio

import pytest

from rayserve.errors import HostError
from rayserve.serving import door as door_module
from tests.unit.door_client import (
    JSON,
    KEY,
    OTHER_KEY,
    App,
    Client,
    Clock,
    bearer,
    key_file,
    plan,
    ready_door,
)


@pytest.mark.parametrize("way", ["ends", "raises", "cancelled", "disconnects"])
async def test_the_slot_is_released_once_on_every_way_out(way):
    """However a request ends, exactly its own sequences are given back."""
    app = App()
    app.gate.clear()
    door = ready_door(app)
    other = asyncio.create_task(Client(door).post())
    for _ in range(3):  # the app runs in a task of its own
        await asyncio.sleep(0)
    if way == "raises":
        app.raises = RuntimeError("engine")
    client = Client(door)
    task = asyncio.create_task(client.post(body={"n": 3}))
    await asyncio.sleep(0)
    if way == "raises":
        with pytest.raises(RuntimeError, match="engine"):
            await task
    else:
        assert door.in_flight == 4
        if way == "cancelled":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif way == "disconnects":
            client.hang_up()
            await task
    if way == "ends":
        app.gate.set()
        await task
        await other
        assert door.in_flight == 0
    else:
        assert door.in_flight == 1
        app.gate.set()
        await other
    assert door.in_flight == 0
    assert door._nobody.in_flight == 0
    assert door_module.current_account.get() is None


async def test_the_queue_is_bounded_by_sequences():
    """`n` counts as n: beyond max_in_flight + max_queued sequences a request gets 429."""
    app = App()
    app.gate.clear()
    door = ready_door(app)
    running = [asyncio.create_task(Client(door).post(body={"n": 3})) for _ in range(2)]
    await asyncio.sleep(0)
    assert (door.in_flight, door.waiting) == (6, 2)
    answer = await Client(door).post()
    assert (answer.status, answer.error["type"]) == (429, "rate_limit_error")
    assert answer.headers[b"retry-after"] == b"7"
    assert (await Client(door).request("GET", "/v1/models")).body == b"hello"
    app.gate.set()
    assert [(await task).status for task in running] == [200, 200]
    stats = door.stats()
    assert (stats.in_flight, stats.waiting, stats.admitted) == (0, 0, 2)
    assert stats.rejected == {"queue": 1}


async def test_a_request_too_big_for_what_is_left_of_the_queue_is_429():
    """One slot may be free while the request needs three: refused, and its slot is given back."""
    app = App()
    app.gate.clear()
    door = ready_door(app)
    running = asyncio.create_task(Client(door).post(body={"n": 4}))
    await asyncio.sleep(0)
    assert (await Client(door).post(body={"n": 3})).status == 429
    assert door.in_flight == 4
    app.gate.set()
    await running
    assert door.in_flight == 0


async def test_one_key_cannot_take_the_share_of_another(tmp_path):
    """Sequences at once are limited by key; another key still gets in."""
    app = App()
    app.gate.clear()
    door = ready_door(app, api_key_file=key_file(tmp_path, KEY, OTHER_KEY), key_max_in_flight=2)
    first = asyncio.create_task(Client(door).post(body={"n": 2}, headers=[bearer(), JSON]))
    await asyncio.sleep(0)
    assert (await Client(door).post(headers=[bearer(), JSON])).status == 429
    second = asyncio.create_task(Client(door).post(headers=[bearer(OTHER_KEY), JSON]))
    await asyncio.sleep(0)
    app.gate.set()
    assert [(await first).status, (await second).status] == [200, 200]
    assert (await Client(door).post(body={"n": 3}, headers=[bearer(), JSON])).status == 400
    assert door.stats().rejected == {"key_in_flight": 1, "request": 1}


async def test_the_token_budget_of_a_key_is_a_sliding_minute(tmp_path):
    """Tokens charged in the last 60 s count; Retry-After says when enough of them are old."""
    clock = Clock()
    app = App()
    file = key_file(tmp_path, KEY, OTHER_KEY)
    door = ready_door(app, api_key_file=file, key_tokens_per_minute=100, clock=clock)
    headers = [bearer(), JSON]
    assert (await Client(door).post(headers=headers)).status == 200
    app.accounts[0].charge(60)
    clock.now += 20
    assert (await Client(door).post(headers=headers)).status == 200
    assert app.accounts[1] is app.accounts[0]
    app.accounts[1].charge(70)
    answer = await Client(door).post(headers=headers)
    assert (answer.status, answer.headers[b"retry-after"]) == (429, b"40")
    assert (await Client(door).post(headers=[bearer(OTHER_KEY), JSON])).status == 200
    clock.now += 39
    assert (await Client(door).post(headers=headers)).status == 429
    clock.now += 1
    assert (await Client(door).post(headers=headers)).status == 200
    assert app.accounts[0].tokens() == 70
    clock.now += 20
    assert app.accounts[0].tokens() == 0


async def test_the_account_is_known_only_while_its_request_is_served():
    """The engine wrapper finds the account in the request's context, and nobody finds it later."""
    app = App()
    assert (await Client(ready_door(app)).post()).status == 200
    assert app.accounts[0] is not None
    assert door_module.current_account.get() is None


async def test_update_keeps_what_is_in_flight(tmp_path):
    """A new plan changes limits at once and forgets neither running requests nor accounts."""
    app = App()
    app.gate.clear()
    file = key_file(tmp_path, KEY)
    door = ready_door(app, api_key_file=file)
    running = asyncio.create_task(Client(door).post(headers=[bearer(), JSON]))
    await asyncio.sleep(0)
    door.update(plan(api_key_file=file, max_in_flight=1, max_queued=0))
    assert door.in_flight == 1
    assert (await Client(door).post(headers=[bearer(), JSON])).status == 429
    door.update(plan(api_key_file=file, max_in_flight=2))
    app.gate.set()
    assert (await Client(door).post(headers=[bearer(), JSON])).status == 200
    await running
    assert app.accounts[0] is app.accounts[1]
    assert app.accounts[0].in_flight == 0


async def test_an_update_with_a_bad_key_file_changes_nothing(tmp_path):
    """A key file that cannot be used is an error, and the old limits and keys stay."""
    door = ready_door(App(), api_key_file=key_file(tmp_path, KEY))
    with pytest.raises(HostError):
        door.update(plan(api_key_file=str(tmp_path / "absent"), max_n=1))
    answer = await Client(door).post(body={"n": 2}, headers=[bearer(), JSON])
    assert answer.status == 200
    assert (await Client(door).post()).status == 401


async def test_an_update_may_turn_keys_off(tmp_path):
    """Without a key file in the new plan nobody is asked for a key any more."""
    door = ready_door(App(), api_key_file=key_file(tmp_path, KEY))
    door.update(plan())
    assert (await Client(door).post()).status == 200
