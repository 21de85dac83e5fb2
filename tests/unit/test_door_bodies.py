"""Does the door judge size and pace of a body, and notice the client that leaves?"""

from __future__ import annotations

import asyncio
import json

import pytest

from rayserve.serving import body as body_module
from rayserve.serving.door import UNHEALTHY
from tests.unit.door_client import (
    CHAT,
    JSON,
    KEY,
    App,
    Client,
    bearer,
    key_file,
    ready_door,
)


async def test_a_draining_replica_reads_the_body_before_it_closes(monkeypatch):
    """A connection closed with unread bytes would be reset, and the 503 lost."""
    client = Client(ready_door(App(), admit=False))
    answer = await client.request("POST", CHAT, headers=[JSON], chunks=[b"x" * 1000] * 3)
    assert answer.status == 503
    assert client.incoming.empty()
    endless = await client.request("POST", CHAT, headers=[JSON], chunks=[b"x" * 1000] * 9)
    assert endless.status == 503
    assert client.incoming.qsize() == 4
    monkeypatch.setattr(body_module, "DISCARD_TIMEOUT_S", 0.01)
    silent = await Client(client.door).request("POST", CHAT, headers=[JSON], chunks=[])
    assert silent.status == 503


@pytest.mark.parametrize(
    "headers,status",
    [
        ([], 415),
        ([(b"content-type", b"text/plain")], 415),
        ([(b"content-type", b"multipart/form-data")], 415),
        ([(b"Content-Type", b"Application/JSON; charset=utf-8")], 200),
        ([JSON, (b"content-length", b"4097")], 413),
        ([JSON, (b"content-length", b"9" * 5000)], 413),
        ([JSON, (b"content-length", b"4096")], 200),
        ([JSON, (b"x-request-disconnect-disabled", b"?1")], 400),
        ([JSON, (b"x-request-disconnect-disabled", b"?0")], 200),
        ([JSON, (b"X-Request-Id", b"a" * 129)], 400),
        ([JSON, (b"x-request-id", b"a\tforged log line")], 400),
        ([JSON, (b"x-request-id", b"")], 400),
        ([JSON, (b"x-request-id", b"a" * 128)], 200),
    ],
)
async def test_headers_are_judged_before_the_body(headers, status):
    """Media type, announced length and headers that would outlive a client are checked first."""
    client = Client(ready_door(App()))
    answer = await client.post(headers=headers)
    assert answer.status == status
    assert client.incoming.empty() == (status == 200)


async def test_a_body_that_grows_past_the_limit_is_413():
    """The bytes that arrive are counted, whatever Content-Length said."""
    client = Client(ready_door(App()))
    chunks = [b"[" * 1000] * 5
    answer = await client.request(
        "POST", CHAT, headers=[JSON, (b"content-length", b"10")], chunks=chunks
    )
    assert answer.status == 413
    assert b"connection" not in answer.headers  # to close with bytes unread would lose the answer
    assert client.door.in_flight == 0


async def test_a_body_in_pieces_reaches_the_app_in_one():
    """The buffered body is replayed as a single message."""
    app = App()
    client = Client(ready_door(app))
    chunks = [b'{"mod', b"", b'el":', b'"m"}']
    assert (await client.request("POST", CHAT, headers=[JSON], chunks=chunks)).status == 200
    assert app.bodies == [b'{"model":"m"}']


async def test_a_client_that_leaves_during_its_body_gets_no_answer():
    """A disconnect before the body is complete ends the request without a response."""
    app = App()
    client = Client(ready_door(app))
    client.incoming.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
    client.hang_up()
    answer = await client.request("POST", CHAT, headers=[JSON], chunks=[])
    assert answer.messages == []
    assert app.scopes == []
    assert client.door.in_flight == 0
    assert client.door.stats().rejected == {"disconnect": 1}


async def test_a_body_that_arrives_after_the_engine_was_given_up_gets_503():
    """It came to an open door, but nothing may reach an engine that hangs."""
    app = App()
    client = Client(ready_door(app))
    task = asyncio.create_task(client.request("POST", CHAT, headers=[JSON], chunks=[]))
    await asyncio.sleep(0)
    client.door.close(*UNHEALTHY)
    client.incoming.put_nowait({"type": "http.request", "body": b"{}", "more_body": False})
    answer = await task
    assert answer.status == 503
    assert answer.headers[b"retry-after"]
    assert app.scopes == []


async def test_a_body_that_never_arrives_times_out(monkeypatch):
    """A client that keeps its body back loses its slot after the body timeout."""
    monkeypatch.setattr(body_module, "BODY_TIMEOUT_S", 0.01)
    client = Client(ready_door(App()))
    answer = await client.request("POST", CHAT, headers=[JSON], chunks=[])
    assert answer.status == 408
    assert client.door.in_flight == 0


async def test_a_disconnect_reaches_the_app():
    """After the replayed body the app hears the client's own disconnect, and can abort."""
    app = App()
    app.gate.clear()
    client = Client(ready_door(app))
    task = asyncio.create_task(client.post())
    await asyncio.sleep(0)
    assert client.door.in_flight == 1
    client.hang_up()
    await task
    assert app.aborted == 1
    assert client.door.in_flight == 0


async def test_a_cancelled_request_reaches_the_app_as_a_disconnect(tmp_path):
    """An app that generates in a task of its own ends it, though only the handler was cancelled."""
    ended = asyncio.Event()

    async def generate() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def app(scope, receive, send) -> None:
        await receive()
        work = asyncio.ensure_future(generate())
        while (await receive())["type"] != "http.disconnect":
            pass
        work.cancel()

    door = ready_door(app, api_key_file=key_file(tmp_path, KEY))
    body = json.dumps({"model": "m", "messages": []}).encode()
    first = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive():
        message = next(first, None)
        if message is None:
            await asyncio.Event().wait()
        return message

    async def send(message) -> None:
        raise AssertionError(message)

    headers = [bearer(), JSON]
    scope = {"type": "http", "method": "POST", "path": CHAT, "root_path": "", "headers": headers}
    request = asyncio.ensure_future(door(scope, receive, send))
    for _ in range(10):
        await asyncio.sleep(0)
    assert door.in_flight == 1
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    await asyncio.wait_for(ended.wait(), 1)
    assert door.in_flight == 0
