"""Does the door know every route of the installed vLLM, and does vLLM still need each of its rules?

The app is built without an engine, for every kind of model and with everything switched on that
could add a route, so that a route which a new version brings breaks a test here before it is served.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from fastapi.routing import APIWebSocketRoute
from starlette.routing import Mount

from rayserve.plan import DoorPlan
from rayserve.serving.door import Door
from rayserve.serving.limits import _MAX_ENTRIES, MAX_BAD_WORDS_BYTES
from rayserve.serving.replies import Refusal, error_body
from rayserve.serving.routes import ALLOWED, DENIED, PATTERNS, READY_PATH, find
from tests.unit.door_client import Client

KINDS = {
    "generate": (("generate",), None),
    "everything": (("generate", "transcription", "realtime", "render"), None),
    "embed": (("embed",), "embed"),
    "classify": (("classify",), "classify"),
    "token_embed": (("token_embed",), "token_embed"),
}
CONDITIONAL = {
    "/cohere/v2/chat": "needs the cohere package",
    "/abort_requests": "registered only by the token-in-token-out server",
}
PATTERN_TEMPLATES = {template: methods for template, _, methods in PATTERNS}


def build(kind, *, everything_on):
    """vLLM's app for a kind of model, plain or with every optional router."""
    from vllm.config import ProfilerConfig
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    tasks, pooling = KINDS[kind]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", "unused"])
    if everything_on:
        args.enable_tokenizer_info_endpoint = True
        args.enable_fault_tolerance = True
        args.enable_scale_out = True
        args.profiler_config = ProfilerConfig(profiler="torch", torch_profiler_dir="/unused")
    config = SimpleNamespace(
        get_pooling_task=lambda _: pooling, hf_config=SimpleNamespace(num_labels=1)
    )
    return build_app(args, tasks, config if pooling else None)


def routes_of(app):
    """(path, methods, is a WebSocket) of each route."""
    for route in app.routes:
        if not isinstance(route, Mount):
            methods = getattr(route, "methods", None) or set()
            yield route.path, methods, isinstance(route, APIWebSocketRoute)


@pytest.fixture(scope="module")
def apps():
    """Every kind of app, plain and with everything on."""
    with pytest.MonkeyPatch.context() as patch:
        plain = {kind: build(kind, everything_on=False) for kind in KINDS}
        for name in (
            "VLLM_SERVER_DEV_MODE",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
            "VLLM_ENABLE_COHERE_API",
        ):
            patch.setenv(name, "1")
        full = {f"{kind}, all on": build(kind, everything_on=True) for kind in KINDS}
    return plain | full


@pytest.fixture(scope="module")
def registered(apps):
    """Path → methods of all apps together."""
    found = {}
    for app in apps.values():
        for path, methods, _ in routes_of(app):
            found.setdefault(path, set()).update(methods)
    return found


def test_every_route_stands_in_exactly_one_table(registered):
    """Each route of vLLM is open, keyed or denied with a reason; a new one fails here."""
    unknown = {}
    for path, methods in registered.items():
        places = (path in ALLOWED) + (path in PATTERN_TEMPLATES) + (path in DENIED)
        if places != 1:
            unknown[path] = (places, methods)
    assert not unknown, f"decide in rayserve/serving/routes.py: {unknown}"
    assert all(DENIED.values())


def test_only_the_two_probes_are_open():
    """No other route is served without a key."""
    routes = [(path, route) for path, methods in ALLOWED.items() for route in methods.values()]
    routes += [(path, route) for path, _, methods in PATTERNS for route in methods.values()]
    assert [path for path, route in routes if route.access == "open"] == ["/health", READY_PATH]


def test_no_entry_is_out_of_date(registered):
    """What the tables name exists in this vLLM, with the methods that the door lets pass."""
    for path, methods in [*ALLOWED.items(), *PATTERN_TEMPLATES.items()]:
        if path != READY_PATH:
            assert set(methods) <= registered.get(path, set()), path
    assert set(DENIED) - set(registered) <= set(CONDITIONAL)


def test_mounted_apps_are_known(apps):
    """A mounted app serves any path below it: /metrics is the only one, and only its root is open."""
    mounts = {
        route.path for app in apps.values() for route in app.routes if isinstance(route, Mount)
    }
    assert mounts == {"/metrics"}
    assert find("/metrics/x") is None


async def test_a_denied_route_is_404_at_the_door_of_the_real_app(apps):
    """Denied routes answer 404, though the app behind has them."""
    plan = DoorPlan(
        max_in_flight=4,
        max_queued=0,
        max_body_bytes=1000,
        max_tokens=10,
        max_n=1,
        key_max_in_flight=0,
        key_tokens_per_minute=0,
        retry_after_s=1,
    )
    for app in apps.values():
        door = Door(app, plan)
        door.open()
        for path, methods, is_websocket in routes_of(app):
            if path in DENIED and not is_websocket:
                for method in methods:
                    answer = await Client(door).request(method, path)
                    assert answer.status == 404, (method, path)
        served = await Client(door).request("GET", "/version", root_path="")
        assert served.status == 200
        prefixed = await Client(door).request("GET", "/rev/version", root_path="/rev")
        assert prefixed.body == served.body


def test_the_error_body_is_the_engine_s_own_shape():
    """vLLM's models of an error read what the door writes."""
    from vllm.entrypoints.anthropic.protocol import AnthropicErrorResponse
    from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse

    refusal = Refusal(429, "queue", "the queue is full", retry_after_s=1)
    body = json.loads(error_body(refusal, "openai"))
    assert ErrorResponse.model_validate(body).error.code == 429
    assert set(body["error"]) == set(ErrorInfo.model_fields)
    AnthropicErrorResponse.model_validate(json.loads(error_body(refusal, "anthropic")))


def test_the_limits_fit_the_engine_s_own():
    """The door's entry limits lie at or below those that raise inside a GPU worker."""
    from vllm import envs
    from vllm.sampling_params import MAX_LOGPROB_TOKEN_IDS

    source = _constants("v1/worker/gpu/sample/logit_bias.py")
    assert _MAX_ENTRIES["allowed_token_ids"] <= source["MAX_NUM_ALLOWED_TOKEN_IDS"]
    assert _MAX_ENTRIES["logit_bias"] <= source["MAX_NUM_LOGIT_BIAS_TOKENS"]
    assert _MAX_ENTRIES["stop_token_ids"] <= source["MAX_NUM_STOP_TOKEN_IDS"] // 2
    assert _MAX_ENTRIES["logprob_token_ids"] <= MAX_LOGPROB_TOKEN_IDS
    # Each word is tokenized twice, with and without a space in front; a token is at least a byte.
    words = _MAX_ENTRIES["bad_words"]
    assert 2 * words <= envs.VLLM_MAX_NUM_BAD_WORDS
    assert 2 * MAX_BAD_WORDS_BYTES + words <= envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS


def test_the_fields_that_the_door_judges_exist():
    """A field that vLLM renamed would pass unjudged: each is still one of its request fields."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    from rayserve.serving.limits import _CHECKED

    known = {
        *ChatCompletionRequest.model_fields,
        *CompletionRequest.model_fields,
        *ResponsesRequest.model_fields,
    }
    assert _CHECKED - known == {"best_of"}  # OpenAI's own; this vLLM ignores it


def test_the_headers_that_the_door_takes_away_are_still_read():
    """vLLM takes priority and rank from headers, which is why the door strips them."""
    from vllm.entrypoints.generate.base import serving

    from rayserve.serving.door import _PRIVATE_HEADERS

    assert serving.PRIORITY_HEADER.lower().encode() in _PRIVATE_HEADERS
    assert b"x-data-parallel-rank" in _PRIVATE_HEADERS


def _constants(relative):
    """Integer constants of a vLLM module that cannot be imported without Triton."""
    import ast
    from pathlib import Path

    import vllm

    tree = ast.parse((Path(vllm.__file__).parent / relative).read_text())
    return {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
