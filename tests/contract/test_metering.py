"""Is each request charged what it used, by vLLM's own way of adding and streaming requests?"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from rayserve.serving.door import current_account
from rayserve.serving.keys import Account
from tests.unit.door_client import Client

PROMPT_TOKENS = 10


class Books:
    """vLLM's engine with its own `generate`, and a stand-in for what a request meets behind it."""

    def __init__(self, monkeypatch):
        from vllm.outputs import RequestOutput
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.engine.output_processor import RequestOutputCollector

        from rayserve.serving.engine import MeteredEngine

        self.made = defaultdict(int)
        self.collectors = {}
        self.adds = True
        self.output = RequestOutput

        async def add_request(engine, request_id, prompt, params, **_):
            collector = RequestOutputCollector(params.output_kind, f"{request_id}-{prompt}")
            self.collectors[prompt] = collector
            if self.adds:
                processor = engine.output_processor
                processor.request_states[collector.request_id] = SimpleNamespace(
                    queue=collector,
                    prompt_len=PROMPT_TOKENS,
                    detokenizer=SimpleNamespace(num_output_tokens=lambda: self.made[prompt]),
                )
                processor.external_req_ids[request_id].append(collector.request_id)
            return collector

        monkeypatch.setattr(AsyncLLM, "add_request", add_request)
        self.engine = MeteredEngine.__new__(MeteredEngine)
        self.engine.shutdown = lambda: None
        self.engine.log_requests = False
        self.engine.vllm_config = SimpleNamespace(kv_transfer_config=None)
        self.engine.output_processor = SimpleNamespace(
            request_states={}, external_req_ids=defaultdict(list)
        )

    async def begin(self, prompt, request_id, grammar=None):
        """A task that reads the whole answer to a prompt, once its request was added."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        structure = StructuredOutputsParams(grammar=grammar) if grammar else None
        params = SamplingParams(
            output_kind=RequestOutputKind.FINAL_ONLY, structured_outputs=structure
        )
        stream = self.engine.generate(prompt, params, request_id)

        async def read():
            return [output async for output in stream]

        task = asyncio.create_task(read())
        await asyncio.sleep(0)
        assert prompt in self.collectors
        return task

    async def end(self, prompt, task, made, reason=None):
        """Let a request end with so many tokens, and a finish reason where it matters."""
        choices = [SimpleNamespace(finish_reason=reason, token_ids=[])] if reason else []
        self.made[prompt] = made
        self.collectors[prompt].put(self.output("", prompt, [], None, choices, finished=True))
        assert len(await task) == 1


def account() -> Account:
    """The account of the request that the calling test is."""
    mine = Account("mine", lambda: 0.0)
    current_account.set(mine)
    return mine


@pytest.fixture
def books(monkeypatch):
    """A metered engine without an engine."""
    return Books(monkeypatch)


async def test_requests_that_share_an_id_are_charged_each(books):
    """A client may choose the id (X-Request-Id): a second request under it is not free."""
    mine = account()
    short = await books.begin("short", "same")
    long = await books.begin("long", "same")
    assert mine.tokens() == 2 * PROMPT_TOKENS
    await books.end("short", short, made=1)
    assert mine.tokens() == 2 * PROMPT_TOKENS + 1
    await books.end("long", long, made=500)
    assert mine.tokens() == 2 * PROMPT_TOKENS + 501


async def test_what_was_made_is_charged_when_the_client_leaves(books):
    """Hanging up costs what it used."""
    mine = account()
    books.engine.abort = lambda *_, **__: asyncio.sleep(0)
    task = await books.begin("left", "one")
    books.made["left"] = 7
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert mine.tokens() == PROMPT_TOKENS + 7


async def test_a_request_that_has_ended_leaves_nothing_behind(books):
    """One that was over before it was charged makes no new entry in vLLM's own tables."""
    mine = account()
    books.adds = False
    await books.end("gone", await books.begin("gone", "one"), made=3)
    assert books.engine.output_processor.external_req_ids == {}
    assert mine.tokens() == 0


async def test_a_grammar_that_allows_no_answer_is_the_requests_fault(books):
    """It is vLLM's 400, and still charged; without a grammar the same end stays a 500."""
    from vllm.exceptions import VLLMValidationError

    mine = account()
    books.engine.abort = lambda *_, **__: asyncio.sleep(0)
    task = await books.begin("endless", "one", grammar="root ::= root")
    with pytest.raises(VLLMValidationError, match="cannot be followed"):
        await books.end("endless", task, made=1, reason="error")
    assert mine.tokens() == PROMPT_TOKENS + 1
    await books.end("broken", await books.begin("broken", "two"), made=1, reason="error")


class Rendered(dict):
    """A prompt as vLLM's renderer makes it, which can be a key."""

    __hash__ = object.__hash__


@pytest.mark.parametrize("kind,refused", [("token", True), ("multimodal", False)])
async def test_a_lost_image_is_not_blamed_on_the_grammar(books, kind, refused):
    """With an image the same end may have another cause, and stays vLLM's 500."""
    from vllm.exceptions import VLLMValidationError

    account()
    books.engine.abort = lambda *_, **__: asyncio.sleep(0)
    prompt = Rendered(type=kind)
    task = await books.begin(prompt, "one", grammar="root ::= root")
    with pytest.raises(VLLMValidationError) if refused else nullcontext():
        await books.end(prompt, task, made=1, reason="error")


@pytest.mark.parametrize(
    "parameters", [{"top_k": 2**70}, {"stop": ["\ud800"]}, {"bad_words": ["\ud800"]}]
)
async def test_a_value_that_no_message_can_hold_is_the_requests_fault(monkeypatch, parameters):
    """What vLLM's own encoder refuses on the way to the engine is a 400, and is forgotten."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
    from vllm.v1.serial_utils import MsgpackEncoder

    from rayserve.serving.engine import MeteredEngine

    async def send(request):
        MsgpackEncoder().encode(request)

    async def add_request(engine, request_id, prompt, params, **_):
        queue = RequestOutputCollector(params.output_kind, request.request_id)
        await engine._add_request(request, prompt, None, 0, queue)
        return queue

    params = SamplingParams(detokenize=False)
    for name, value in parameters.items():
        setattr(params, name, value)
    fields = dict.fromkeys(EngineCoreRequest.__struct_fields__)
    fields |= {"request_id": "one-1", "external_req_id": "one", "prompt_token_ids": [1]}
    request = EngineCoreRequest(**fields | {"sampling_params": params, "arrival_time": 0.0})
    engine = MeteredEngine.__new__(MeteredEngine)
    engine.shutdown = lambda: None
    engine.log_requests = False
    engine.check_admission = lambda **_: None
    engine.output_processor = processor = OutputProcessor(None, log_stats=False)
    engine.engine_core = SimpleNamespace(add_request_async=send)
    monkeypatch.setattr(AsyncLLM, "add_request", add_request)
    account()
    with pytest.raises(VLLMValidationError, match="no form in the engine"):
        async for _ in engine.generate("a", params, "one"):
            pass
    assert not processor.request_states
    assert not processor.external_req_ids


async def test_another_failure_stays_the_engines(books, monkeypatch):
    """A bug behind the door is not blamed on the client."""
    from vllm import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.exceptions import EngineGenerateError

    async def add_request(*_, **__):
        raise KeyError("lost")

    account()
    monkeypatch.setattr(AsyncLLM, "add_request", add_request)
    with pytest.raises(EngineGenerateError):
        async for _ in books.engine.generate("a", SamplingParams(), "one"):
            pass


@pytest.mark.parametrize("dead", [False, True])
async def test_vllms_error_handler_finds_what_it_needs(monkeypatch, dead):
    """An error of the engine is answered 500 by vLLM's own handler, whether or not it is dead."""
    from fastapi import FastAPI
    from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    from rayserve.serving import engine as module

    async def init_app_state(client, state, args, _):
        state.engine_client, state.args = client, args

    async def nothing():
        return ()

    app = FastAPI()
    init_exception_handler(app)

    @app.post("/fail")
    async def fail():
        raise EngineDeadError if dead else EngineGenerateError("lost")

    monkeypatch.setattr(module, "build_app", lambda *_: app)
    monkeypatch.setattr(module, "init_app_state", init_app_state)
    client = SimpleNamespace(
        reset_mm_cache=nothing,
        get_supported_tasks=nothing,
        model_config=None,
        errored=dead,
        is_running=not dead,
    )
    built = await module.build_openai_app(client, SimpleNamespace(log_error_stack=False))
    answer = await Client(built).request("POST", "/fail")
    assert answer.status == 500
    assert "attribute" not in answer.error["message"]
