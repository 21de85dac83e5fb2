"""Does the door let pass what it should, refuse the rest in the right words, and never lose a slot?"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import httpx2
import pytest

from rayserve.errors import HostError
from rayserve.serving import body as body_module
from rayserve.serving import door as door_module
from tests.unit.door_client import (
    CHAT,
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

CLOSED_PATHS = [
    "",
    "/",
    "//v1/models",
    "/v1//models",
    "/v1/models/",
    "/V1/models",
    "/v1/models\n",
    "/v1/./models",
    "/health/../metrics",
    "/health/",
    "/metrics/",
    "/metrics/x",
    "http://127.0.0.1/v1/models",
    "/v1/responses/",
    "/v1/responses/render",
    "/v1/responses/a/b",
    "/v1/responses/a%2f..",
    "/v1/responses/" + "a" * 129,
    "/v1/responses/a\n",
    "/docs",
    "/openapi.json",
    "/invocations",
    "/ping",
    "/v1/load_lora_adapter",
    "/sleep",
    "/collective_rpc",
    "/inference/v1/generate",
    "/v1/audio/transcriptions",
]


@pytest.mark.parametrize("path", CLOSED_PATHS)
async def test_a_path_outside_the_allow_list_is_404(path, tmp_path):
    """Whatever is not literally in the table is 404, even with a valid key."""
    app = App()
    client = Client(ready_door(app, api_key_file=key_file(tmp_path, KEY)))
    for method in ("GET", "POST"):
        answer = await client.request(method, path, headers=[bearer(), JSON])
        assert answer.status == 404
        assert answer.error["type"] == "not_found_error"
    assert app.scopes == []


@pytest.mark.parametrize(
    "method,path,root_path,prefix",
    [
        ("POST", CHAT, "", ""),
        ("POST", "/rev" + CHAT, "/rev", ""),
        ("POST", "/rev" + CHAT, "/rev/", ""),
        ("POST", CHAT, "/rev", ""),
        ("POST", "/rev" + CHAT, "", "/rev"),
        ("POST", "/rev" + CHAT, "/rev", "/rev"),
        ("POST", "/up/rev" + CHAT, "/up", "/rev"),
        ("GET", "/v1/models", "", ""),
        ("GET", "/v1/responses/resp_0a-Z", "", ""),
        ("POST", "/v1/responses/resp_0/cancel", "", ""),
        ("GET", "/metrics", "", ""),
        ("GET", "/health", "", ""),
    ],
)
async def test_an_allowed_path_reaches_the_app(method, path, root_path, prefix):
    """The app's router finds the very path that the door checked, under any route prefix."""
    app = App()
    client = Client(ready_door(app, path_prefix=prefix))
    answer = await client.request(method, path, headers=[JSON], body=b"{}", root_path=root_path)
    assert answer.status == 200
    assert answer.body == b"hello"
    scope = app.scopes[0]
    assert scope["path"].startswith(scope["root_path"])
    routed = scope["path"][len(scope["root_path"]) :]
    assert path.endswith(routed)
    assert routed.startswith(("/v1/", "/metrics", "/health"))


@pytest.mark.parametrize(
    "path,prefix", [(CHAT, "/rev"), ("/revision" + CHAT, "/rev"), ("/rev", "/rev")]
)
async def test_a_path_outside_the_mount_point_is_404(path, prefix):
    """A request that is not below the route prefix is not served."""
    answer = await Client(ready_door(App(), path_prefix=prefix)).post(path)
    assert answer.status == 404


@pytest.mark.parametrize(
    "method,path", [("GET", CHAT), ("POST", "/health"), ("OPTIONS", CHAT), ("HEAD", "/v1/models")]
)
async def test_another_method_is_405(method, path):
    """A known path with another method is 405 and names the methods it has."""
    app = App()
    answer = await Client(ready_door(app)).request(method, path)
    assert answer.status == 405
    assert answer.headers[b"allow"] in (b"GET", b"POST")
    assert app.scopes == []


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [bearer("not-a-key-of-the-file")],
        [bearer(KEY + "x")],
        [bearer(KEY[:-1])],
        [bearer("")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", KEY.encode())],
        [(b"authorization", b"Basic " + KEY.encode())],
        [(b"authorization", b"\xff\xfe")],
        [(b"x-api-key", b"")],
        [(b"x-api-key", b"Bearer " + KEY.encode())],
        [(b"cookie", b"key=" + KEY.encode())],
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/metrics", "/version", "/tokenize"])
async def test_no_valid_key_is_401(headers, path, tmp_path):
    """Without a key of the file every keyed path is 401, and the app sees nothing."""
    app = App()
    client = Client(ready_door(app, api_key_file=key_file(tmp_path, KEY)))
    method = "GET" if path in ("/v1/models", "/metrics", "/version") else "POST"
    answer = await client.request(method, path, headers=[*headers, JSON], body=b"{}")
    assert answer.status == 401
    assert answer.headers[b"www-authenticate"] == b"Bearer"
    assert answer.error["type"] == "authentication_error"
    assert app.scopes == []


@pytest.mark.parametrize(
    "headers",
    [
        [bearer()],
        [(b"Authorization", b"bEARER   " + KEY.encode() + b" ")],
        [(b"x-api-key", KEY.encode())],
        [(b"X-API-Key", b" " + KEY.encode())],
        [(b"authorization", b"Basic abc"), (b"x-api-key", KEY.encode())],
        [bearer("another-key-altogether"), (b"x-api-key", OTHER_KEY.encode())],
    ],
)
async def test_a_valid_key_passes_and_goes_no_further(headers, tmp_path):
    """Bearer and x-api-key both open the door; no header that held a key reaches the app."""
    app = App()
    client = Client(ready_door(app, api_key_file=key_file(tmp_path, OTHER_KEY, KEY)))
    answer = await client.post(headers=[*headers, JSON, (b"x-vllm-priority", b"-9")])
    assert answer.status == 200
    assert app.scopes[0]["headers"] == [JSON]
    assert KEY not in repr(app.scopes) + repr(app.accounts) + repr(client.door._keys)


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_probes_need_no_key(path, tmp_path):
    """Liveness and readiness are open."""
    client = Client(ready_door(App(), api_key_file=key_file(tmp_path, KEY)))
    assert (await client.request("GET", path)).status == 200


async def test_without_a_key_file_nobody_is_asked():
    """No key file means no keys, and the headers are stripped all the same."""
    app = App()
    assert (await Client(ready_door(app)).post(headers=[bearer(), JSON])).status == 200
    assert app.scopes[0]["headers"] == [JSON]
    assert app.accounts[0].name == "anonymous"


async def test_a_replica_that_is_not_ready_answers_503():
    """Before set_ready(True), /ready and inference are 503 while /health and /metrics pass."""
    client = Client(ready_door(App()))
    client.door.set_ready(False)
    assert (await client.request("GET", "/health")).status == 200
    assert (await client.request("GET", "/metrics")).status == 200
    for answer in (
        await client.request("GET", "/ready"),
        await client.request("GET", "/v1/models"),
        await client.post(),
    ):
        assert answer.status == 503
        assert answer.headers[b"retry-after"] == b"7"
        assert b"connection" not in answer.headers
    assert client.door.stats().rejected == {"starting": 2}


@pytest.mark.parametrize("how", ["plan", "callback"])
async def test_a_draining_replica_refuses_new_requests_and_ends_running_ones(how):
    """Draining: new requests get 503 and a closed connection; the running stream ends whole."""
    app = App()
    app.gate.clear()
    draining = False
    door = ready_door(app, is_draining=lambda: draining)
    running = asyncio.create_task(Client(door).post())
    await asyncio.sleep(0)
    if how == "plan":
        door.update(plan(admit=False))
    else:
        draining = True
    answer = await Client(door).post()
    assert (answer.status, answer.error["type"]) == (503, "service_unavailable_error")
    assert answer.headers[b"retry-after"] == b"7"
    assert answer.headers[b"connection"] == b"close"
    assert (await Client(door).request("GET", "/ready")).status == 503
    assert (await Client(door).request("GET", "/metrics")).body == b"hello"
    app.gate.set()
    assert (await running).body == b"hello"
    assert door.in_flight == 0


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


async def test_a_websocket_is_closed():
    """A WebSocket handshake is refused before the app hears of it."""
    app = App()
    sent = []

    async def send(message):
        sent.append(message)

    await ready_door(app)({"type": "websocket", "path": "/v1/realtime"}, None, send)
    assert [(message["type"], message["code"]) for message in sent] == [("websocket.close", 1008)]
    assert app.scopes == []


async def test_lifespan_passes_through():
    """The app's start and stop hooks are none of the door's business."""
    app = App()
    await ready_door(app)({"type": "lifespan"}, None, None)
    assert app.scopes == [{"type": "lifespan"}]


async def test_the_send_of_the_server_is_passed_as_it_is():
    """No wrapper stands between the app and the server on the way of a token."""
    seen = []

    async def app(scope, receive, send):
        seen.append(send)

    async def send(message):
        raise AssertionError(message)

    async def receive():
        return {"type": "http.request", "body": b"{}"}

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [JSON]}
    await ready_door(app)(scope, receive, send)
    assert seen == [send]


async def test_error_bodies_have_openai_s_four_fields():
    """An OpenAI path gets exactly message, type, param and code."""
    answer = await Client(ready_door(App())).post(body={"max_tokens": 101})
    assert json.loads(answer.body) == {
        "error": {
            "message": "`max_tokens` must be at most 100",
            "type": "invalid_request_error",
            "param": "max_tokens",
            "code": 400,
        }
    }


async def test_error_bodies_of_messages_have_anthropic_s_shape():
    """An Anthropic path gets Anthropic's envelope."""
    answer = await Client(ready_door(App())).post("/v1/messages", {"max_tokens": 101})
    assert json.loads(answer.body) == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "`max_tokens` must be at most 100"},
    }


@pytest.mark.parametrize(
    "reason, error",
    [
        ("key", "AuthenticationError"),
        ("path", "NotFoundError"),
        ("request", "BadRequestError"),
        ("queue", "RateLimitError"),
        ("draining", "InternalServerError"),
    ],
)
async def test_official_clients_raise_the_right_error(reason, error, tmp_path):
    """The official clients recognise each refusal, and read the message out of the body."""
    # Half of what all unit tests import, for this test alone.
    import anthropic
    import openai

    changes = {
        "key": {"api_key_file": key_file(tmp_path, OTHER_KEY)},
        "path": {"path_prefix": "/elsewhere"},
        "request": {"max_tokens": 1},
        "queue": {"max_in_flight": 1, "max_queued": 0},
        "draining": {"admit": False},
    }[reason]
    app = App()
    door = ready_door(app, **changes)
    if reason == "queue":
        app.gate.clear()
        running = asyncio.create_task(Client(door).post())
        await asyncio.sleep(0)
    messages = [{"role": "user", "content": "hello"}]
    transport = httpx2.ASGITransport(door)
    async with (
        httpx2.AsyncClient(transport=transport) as http,
        openai.AsyncOpenAI(
            api_key=KEY, base_url="http://door/v1", http_client=http, max_retries=0
        ) as chat,
        anthropic.AsyncAnthropic(
            api_key=KEY, base_url="http://door", http_client=http, max_retries=0
        ) as claude,
    ):
        with pytest.raises(getattr(openai, error)) as of_openai:
            await chat.chat.completions.create(model="m", messages=messages, max_tokens=8)
        with pytest.raises(getattr(anthropic, error)) as of_anthropic:
            await claude.messages.create(model="m", messages=messages, max_tokens=8)
    assert type(of_openai.value) is getattr(openai, error)
    assert of_openai.value.body["message"]
    assert of_anthropic.value.body["type"] == "error"
    if reason == "queue":
        app.gate.set()
        await running


def test_the_door_needs_no_web_framework_and_no_engine():
    """Importing the door loads neither Ray nor vLLM nor a web framework."""
    heavy = ("ray", "vllm", "torch", "fastapi", "starlette", "uvicorn")
    code = f"import sys, rayserve.serving.door; print(sorted({{*sys.modules}} & {{*{heavy!r}}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def test_a_door_without_a_plan_lets_nobody_in():
    """Until Serve hands over the plan no key is known, so also /metrics is closed."""
    app = App()
    client = Client(door_module.Door(app, None))
    for path in ("/metrics", "/version", "/v1/models"):
        assert (await client.request("GET", path, headers=[bearer()])).status == 401
    assert (await client.request("GET", "/ready")).status == 503
    assert app.scopes == []


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
