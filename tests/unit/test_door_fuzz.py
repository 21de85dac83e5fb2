"""Can any request at all pass the door without a key, break it, or keep a slot?"""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayserve.serving.limits import _CHECKED
from rayserve.serving.routes import ALLOWED, DENIED, find, shape_of
from tests.unit.door_client import JSON, KEY, App, Client, bearer, key_file, ready_door

KNOWN_PATHS = sorted({*ALLOWED, *DENIED, "/v1/responses/resp_1", "/v1/responses/resp_1/cancel"})
OPEN_PATHS = ("/health", "/ready")
EDITS = ("/", "//", "/.", "/..", "%2e", "%2f", "\x00", "\n", " ", "?", "#", ";", "\\", "é")

edited_paths = st.builds(
    lambda path, at, edit: path[: at % (len(path) + 1)] + edit + path[at % (len(path) + 1) :],
    st.sampled_from(KNOWN_PATHS),
    st.integers(0, 60),
    st.sampled_from(EDITS),
)
paths = st.one_of(st.sampled_from(KNOWN_PATHS), edited_paths, st.text(max_size=40))
methods = st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "CONNECT", "", "get"])
roots = st.one_of(st.just(""), st.sampled_from(["/", "/rev", "/v1", "/rev/"]), st.text(max_size=8))
headers = st.lists(
    st.tuples(
        st.sampled_from(
            [b"authorization", b"Authorization", b"x-api-key", b"content-type", b"content-length"]
        )
        | st.binary(max_size=12),
        st.sampled_from([b"application/json", b"Bearer ", b"Bearer x", b"0", b"-1"])
        | st.binary(max_size=40),
    ),
    max_size=6,
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
judged_fields = st.sampled_from(sorted({*_CHECKED, "messages", "prompt", "input", "logprobs"}))
bodies = st.one_of(
    st.binary(max_size=200),
    json_values.map(lambda value: json.dumps(value).encode()),
    st.dictionaries(judged_fields, json_values, max_size=5).map(
        lambda value: json.dumps(value).encode()
    ),
)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """A key file with one key."""
    return key_file(tmp_path_factory.mktemp("keys"), KEY)


@settings(deadline=None)  # a loaded machine is not a failure
@given(method=methods, path=paths, root=roots, sent=headers, body=bodies)
def test_nothing_reaches_the_app_without_a_key(keys, method, path, root, sent, body):
    """Whatever is sent without the key is answered by the door itself, but for /health."""
    app = App()
    client = Client(ready_door(app, api_key_file=keys))
    answer = asyncio.run(client.request(method, path, headers=sent, body=body, root_path=root))
    if app.scopes:
        scope = app.scopes[0]
        assert method == "GET"
        assert scope["path"] == scope["root_path"] + "/health"
    else:
        assert answer.status in (200, 401, 404, 405)
        assert answer.status != 200 or path.endswith("/ready")
    assert client.door.in_flight == 0


@settings(deadline=None)  # a loaded machine is not a failure
@given(
    path=st.sampled_from([path for path in ALLOWED if "POST" in ALLOWED[path]]),
    sent=headers,
    body=bodies,
    cut=st.integers(0, 200),
    hang_up=st.booleans(),
)
def test_no_body_breaks_the_door(keys, path, sent, body, cut, hang_up):
    """With the key, any body in any pieces is answered in the path's own shape, or passed on."""
    app = App()
    door = ready_door(app, api_key_file=keys)
    client = Client(door)
    pieces = [body[:cut], body[cut:]]

    async def go():
        if hang_up:
            client.incoming.put_nowait({"type": "http.request", "body": body, "more_body": True})
            client.hang_up()
            return await client.request("POST", path, headers=[bearer(), JSON, *sent], chunks=[])
        return await client.request("POST", path, headers=[bearer(), JSON, *sent], chunks=pieces)

    answer = asyncio.run(go())
    assert door.in_flight == 0
    assert door._keys.account(KEY.encode()).in_flight == 0
    if app.scopes:
        assert app.bodies == [body]
        assert isinstance(json.loads(body), dict)
    elif answer.messages:
        assert 400 <= answer.status < 500
        error = answer.error
        assert error["message"]
        assert error["type"]
        assert ("code" in error) == (shape_of(path) == "openai")
    else:
        assert hang_up


@settings(deadline=None)  # a loaded machine is not a failure
@given(path=paths)
def test_only_literal_paths_are_found(path):
    """What is found is in the table letter by letter, or a response id of plain characters."""
    if find(path) is not None and path not in ALLOWED:
        rest = path.removeprefix("/v1/responses/").removesuffix("/cancel")
        assert rest.replace("-", "").replace("_", "").isalnum() or set(rest) <= {"-", "_"}
        assert rest.isascii()
