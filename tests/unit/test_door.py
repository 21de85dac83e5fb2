"""Does the door let pass what it should, refuse the rest in the right words, and never lose a slot?"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import httpx2
import pytest

from rayserve.serving import door as door_module
from tests.unit.door_client import (
    CHAT,
    JSON,
    KEY,
    OTHER_KEY,
    App,
    Client,
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
    """Before it is opened, /ready and inference are 503 while /health and /metrics pass."""
    client = Client(ready_door(App()))
    client.door.close("starting", "the model is not ready yet")
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
