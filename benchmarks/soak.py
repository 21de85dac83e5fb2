"""Does anything leak when a thousand streams run and some of their clients leave?

    python -m benchmarks.soak       twice 1,000 streams at concurrency 64, a tenth cut; `make soak`

A first part of the same load warms every cache; then the stack is counted at rest, loaded, counted
again, and so once more: a leak grows with the streams, a pool does not. An undisturbed stream must
have its exact number of tokens, its usage, its `[DONE]`, and the text that the same prompt gives
alone. Writes build/bench/soak.json; lists there have one entry for each count: warm, after each round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks import census
from benchmarks.load import OUTPUT_TOKENS, PATH, prompts, request_body
from benchmarks.machine import describe
from benchmarks.workbench import workbench, write
from rayserve.bench import (
    RSS_GROWTH_MAX,
    Answer,
    Verdict,
    as_json,
    fault,
    judge_leaks,
    read_answer,
    split_events,
    verdict,
)
from tests.served import Served, metrics

REQUESTS = 1000
ROUNDS = 2
CONCURRENCY = 64
CUT_SHARE = 0.1
DISTINCT_PROMPTS = 40
LEAVE_S = 0.02
"""A client that leaves before it has an answer leaves after this many seconds."""
ENGINE = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
"""On processors with AVX-512 the CPU engine multiplies through oneDNN, which by default keeps the kernels of
many shapes, and each number of tokens in a step is another: hundreds of megabytes, over thousands of streams."""
SAMPLE_S = 5.0
"""Between two looks at the engine's gauges under load."""


@dataclass(frozen=True, slots=True)
class Job:
    """One stream to ask for."""

    prompt: str
    cut_after: int
    """Content events after which the client leaves; -1: it stays; 0: before it has an answer."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one stream went."""

    job: Job
    answer: Answer | None
    """None where the client left."""
    error: str
    """Empty unless something went wrong that the client did not cause."""


def jobs(count: int, seed: int) -> list[Job]:
    """`count` jobs, of which exactly CUT_SHARE are cut, at random places."""
    choose = random.Random(seed)  # noqa: S311 - reproducible load, not a secret
    texts = prompts(DISTINCT_PROMPTS, "soak")
    places = dict.fromkeys(range(count), -1)
    for index, number in enumerate(choose.sample(range(count), round(count * CUT_SHARE))):
        places[number] = choose.randrange(1, OUTPUT_TOKENS - 1) if index % 5 else 0
    return [Job(texts[number % len(texts)], places[number]) for number in range(count)]


async def stream(session: aiohttp.ClientSession, served: Served, job: Job) -> Outcome:
    """Ask for one stream and read it to its end, or to the place where its client leaves."""
    if job.cut_after != 0:
        return await _read(session, served, job)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LEAVE_S):
            await _read(session, served, job)
    return Outcome(job, None, "")


async def _read(session: aiohttp.ClientSession, served: Served, job: Job) -> Outcome:
    body = request_body(served.model, job.prompt)
    events: list[bytes] = []
    rest = b""
    try:
        async with session.post(served.url + PATH, json=body, headers=served.headers) as reply:
            if reply.status != 200:
                return Outcome(job, None, f"HTTP {reply.status}: {(await reply.text())[:200]}")
            async for chunk in reply.content.iter_any():
                if 0 < job.cut_after <= len(events):
                    reply.close()  # the connection, not only the body: the server sees a reset
                    return Outcome(job, None, "")
                found, rest = split_events(rest + chunk)
                events += found
        answer = read_answer(events)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return Outcome(job, None, f"{type(error).__name__}: {error}")
    return Outcome(job, answer, fault(answer, OUTPUT_TOKENS))


async def run_jobs(served: Served, work: Sequence[Job], concurrency: int) -> list[Outcome]:
    """All jobs, `concurrency` at any time."""
    gate = asyncio.Semaphore(concurrency)
    timeout = aiohttp.ClientTimeout(total=300)
    connector = aiohttp.TCPConnector(limit=0)

    async def one(job: Job) -> Outcome:
        async with gate:
            return await stream(session, served, job)

    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        return list(await asyncio.gather(*(one(job) for job in work)))


@dataclass(frozen=True, slots=True)
class Load:
    """One round of streams."""

    outcomes: list[Outcome]
    took_s: float
    running: int
    """Most requests that the engine was seen to run at once."""
    kv_usage: float
    """Largest share of the KV cache that was seen in use, 0 to 1."""


async def load(served: Served, work: Sequence[Job]) -> Load:
    """All jobs, with a look at the engine's gauges now and then: at 0 again they only say something
    if they have moved.
    """
    began = time.monotonic()
    task = asyncio.create_task(run_jobs(served, work, CONCURRENCY))
    running, kv_usage = 0, 0.0
    while not (await asyncio.wait({task}, timeout=SAMPLE_S))[0]:
        values = await asyncio.to_thread(metrics, served)
        running = max(running, int(values["vllm:num_requests_running"]))
        kv_usage = max(kv_usage, values["vllm:kv_cache_usage_perc"])
    return Load(await task, time.monotonic() - began, running, kv_usage)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; returns 1 when something leaked or a stream was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=REQUESTS, help="streams of a round")
    parser.add_argument("--warm-requests", type=int, default=320)
    options = parser.parse_args(arguments)
    began = time.time()
    with workbench(ENGINE) as (plan, folder), Served(plan, folder) as served:
        report, verdicts = soak(served, options.requests, options.warm_requests)
    report |= {"machine": describe(), "took_s": round(time.time() - began)}
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(began))
    name = "soak" if options.requests >= REQUESTS else "soak-part"
    path = write(name, flat_lists(json.dumps(report, indent=1)), stamp)
    for one in verdicts:
        print(one.line())
    print(f"\nwritten to {path}")
    return 0 if all(one.passed for one in verdicts) else 1


def soak(served: Served, requests: int, warm_requests: int) -> tuple[dict[str, Any], list[Verdict]]:
    """Warm up and count, then load and count in rounds: the report and its verdicts."""
    alone = asyncio.run(
        run_jobs(served, [Job(p, -1) for p in prompts(DISTINCT_PROMPTS, "soak")], 1)
    )
    reference = {one.job.prompt: one.answer.text for one in alone if one.answer is not None}
    print(f"{len(reference)} reference answers", flush=True)
    asyncio.run(run_jobs(served, jobs(warm_requests, seed=1), CONCURRENCY))
    settled = [_settled(served)]
    loads: list[Load] = []
    for number in range(1, ROUNDS + 1):
        loads.append(asyncio.run(load(served, jobs(requests, seed=1 + number))))
        print(f"round {number}: {requests} streams in {loads[-1].took_s:.1f} s", flush=True)
        settled.append(_settled(served))
    counts = [count for count, _ in settled]
    outcomes = [outcome for one in loads for outcome in one.outcomes]
    verdicts = [*judge_counts(counts), *judge_loads(loads), *judge_streams(outcomes, reference)]
    stayed = [one.answer for one in outcomes if one.answer is not None]
    report = {
        "requests": len(outcomes),
        "rounds": ROUNDS,
        "concurrency": CONCURRENCY,
        "told_to_leave": sum(one.job.cut_after >= 0 for one in outcomes),
        "left": sum(one.answer is None and not one.error for one in outcomes),
        "errors": dict(Counter(one.error for one in outcomes if one.error)),
        "tokens_per_s": sum(one.completion_tokens for one in stayed)
        / sum(one.took_s for one in loads),
        "checks": as_json(verdicts),
        "settled_after_s": [round(after_s, 1) for _, after_s in settled],
        **census.report(counts),
    }
    return report, verdicts


def judge_counts(counts: Sequence[census.Count]) -> list[Verdict]:
    """What the stack holds after all rounds against what it held warm, whatever lies between."""
    first, last = counts[0], counts[-1]
    restarts = len({one.replica_pid for one in counts}) - 1
    growth = census.largest_growth(first, last)
    return [
        *judge_leaks(first.serving, last.serving),
        verdict("resident memory added by one process, share", growth, RSS_GROWTH_MAX, "at most"),
        verdict("replicas restarted", restarts, 0, "at most"),
    ]


def judge_loads(loads: Sequence[Load]) -> list[Verdict]:
    """Whether each round was a load, as the gauges tell that show none afterwards."""
    running = min(one.running for one in loads)
    moved = min(one.kv_usage for one in loads) > 0
    return [
        verdict("requests that the engine ran at once", running, CONCURRENCY / 2, "at least"),
        verdict("KV cache seen in use under load", int(moved), 1, "at least"),
    ]


def judge_streams(outcomes: Sequence[Outcome], reference: Mapping[str, str]) -> list[Verdict]:
    """Whether every stream whose client stayed is whole and says what its prompt says alone."""
    undisturbed = [one for one in outcomes if one.job.cut_after < 0]
    whole = [one.answer for one in undisturbed if one.answer is not None and not one.error]
    other = [
        one
        for one in outcomes
        if one.answer is not None
        and not one.error
        and one.answer.text != reference.get(one.job.prompt)
    ]
    errors = sum(bool(one.error) for one in outcomes)
    return [
        verdict("streams that failed", errors, 0, "at most"),
        verdict("undisturbed streams complete", len(whole), len(undisturbed), "at least"),
        verdict("texts that differ from the prompt's own, alone", len(other), 0, "at most"),
    ]


def flat_lists(text: str) -> str:
    """Indented JSON with each list of numbers on one line."""
    return re.sub(r"\[[-+.,\deE\s]+\]", lambda found: f"[{' '.join(found[0][1:-1].split())}]", text)


def _settled(served: Served) -> tuple[census.Count, float]:
    """The stack at rest, and after how many seconds; with one more answer: vLLM's gauges show its
    last step.
    """
    census.wait_idle(served)
    after_s = census.wait_settled(served)
    asyncio.run(run_jobs(served, [Job(prompts(1, "soak")[0], -1)], 1))
    count = census.take(served)
    print(f"at rest after {after_s:.0f} s: {count.serving}", flush=True)
    return count, after_s


if __name__ == "__main__":
    sys.exit(main())
