"""Is each request charged what it used, by vLLM's own way of adding and streaming requests?"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from types import SimpleNamespace

import pytest

from rayserve.serving.door import current_account
from rayserve.serving.keys import Account

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
        monkeypatch.setattr(AsyncLLM, "__del__", lambda _: None)
        self.engine = MeteredEngine.__new__(MeteredEngine)
        self.engine.log_requests = False
        self.engine.output_processor = SimpleNamespace(
            request_states={}, external_req_ids=defaultdict(list)
        )

    async def begin(self, prompt, request_id):
        """A task that reads the whole answer to a prompt, once its request was added."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)
        stream = self.engine.generate(prompt, params, request_id)

        async def read():
            return [output async for output in stream]

        task = asyncio.create_task(read())
        await asyncio.sleep(0)
        assert prompt in self.collectors
        return task

    async def end(self, prompt, task, made):
        """Let a request end with so many tokens."""
        self.made[prompt] = made
        self.collectors[prompt].put(self.output("", prompt, [], None, [], finished=True))
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
