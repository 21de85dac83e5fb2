"""How is load made? By vLLM's own generator, in this process (docs/adr/0030-load-generator.md)."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.stacks import Stack
from rayserve.bench import Round, read_answer, round_figures, split_events
from rayserve.demo.corpus import CORPUS

OUTPUT_TOKENS = 64
PROMPT_WORDS = 48
REQUESTS = {1: 32, 8: 160, 32: 320}
"""Requests of one round at each concurrency: 4 seconds on two fast cores, 15 to 40 on two slow ones."""
PATH = "/v1/completions"


def prompts(count: int, seed: str) -> list[str]:
    """Distinct prompts of PROMPT_WORDS words; the same ones for the same seed."""
    words = sorted(set(CORPUS.split()))
    choose = random.Random(seed)  # noqa: S311 - reproducible load, not a secret
    return [" ".join(choose.choices(words, k=PROMPT_WORDS)) for _ in range(count)]


def request_body(model: str, prompt: str, tokens: int = OUTPUT_TOKENS) -> dict[str, Any]:
    """A greedy streamed completion of exactly `tokens` tokens."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def measure(stack: Stack, concurrency: int, seed: str, log: Path, *, url: str = "") -> Round:
    """One run of vLLM's generator in closed loop: `concurrency` requests at any time.

    Raises:
        ValueError: a request failed or gave the wrong number of tokens.
    """
    with log.open("a") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        result = asyncio.run(_generate(stack, concurrency, seed, url or stack.base_url))
    return round_figures(stack.name, concurrency, result, OUTPUT_TOKENS)


async def _generate(stack: Stack, concurrency: int, seed: str, url: str) -> Mapping[str, Any]:
    # Imports vLLM: seconds, and only once, outside of every measured time.
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.benchmarks.serve import TaskType, benchmark

    model = stack.plan.replica.served_model_name
    requests = [
        SampleRequest(prompt=prompt, prompt_len=0, expected_output_len=OUTPUT_TOKENS)
        for prompt in prompts(REQUESTS[concurrency], f"{seed}-{concurrency}")
    ]
    result: Mapping[str, Any] = await benchmark(
        task_type=TaskType.GENERATION,
        endpoint_type="openai",
        api_url=url + PATH,
        base_url=url,
        model_id=model,
        model_name=model,
        tokenizer=None,
        input_requests=requests,
        logprobs=None,
        request_rate=float("inf"),
        burstiness=1.0,
        disable_tqdm=True,
        # After a thaw or a start, the first requests find cold caches and idle connections.
        num_warmups=2 * concurrency,
        profile=False,
        selected_percentile_metrics=[],
        selected_percentiles=[],
        ignore_eos=True,
        goodput_config_dict={},
        max_concurrency=concurrency,
        lora_modules=None,
        extra_headers=stack.headers,
        extra_body={"temperature": 0},
        ready_check_timeout_sec=0,
    )
    return result


def import_generator() -> None:
    """Load vLLM's generator now, so that its import falls into no measured time."""
    import vllm.benchmarks.serve  # noqa: F401


async def _reads(stack: Stack, prompt: str) -> tuple[int, int]:
    import aiohttp

    body = request_body(stack.plan.replica.served_model_name, prompt)
    events: list[bytes] = []
    reads, rest = 0, b""
    async with (
        aiohttp.ClientSession() as session,
        session.post(stack.base_url + PATH, json=body, headers=stack.headers) as reply,
    ):
        reply.raise_for_status()
        async for chunk in reply.content.iter_any():
            found, rest = split_events(rest + chunk)
            events += found
            # The last read may carry only the usage and [DONE].
            reads += any(b'"text":' in event for event in found)
    answer = read_answer(events)
    return reads, answer.completion_tokens


def reads_per_token(stack: Stack, requests: int = 4) -> float:
    """Network reads that carried text, over tokens, one request at a time.

    Shows batching that events hide: several events may be held back and sent in one write.
    """
    counts = [asyncio.run(_reads(stack, prompt)) for prompt in prompts(requests, "reads")]
    return sum(reads for reads, _ in counts) / sum(tokens for _, tokens in counts)
