"""Does anything leak when a thousand streams run and some of their clients leave?

    python -m benchmarks.soak       1,000 streams at concurrency 64, a tenth of them cut; `make soak`

A first part of the same load warms every cache; then the idle stack is counted, loaded, and counted
again. An undisturbed stream must have its exact number of tokens, its usage, its `[DONE]`, and the
text that the same prompt gives alone. Writes build/bench/soak.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp

from benchmarks import census
from benchmarks.load import OUTPUT_TOKENS, PATH, prompts, request_body
from benchmarks.machine import describe
from benchmarks.workbench import workbench, write
from rayserve.bench import (
    Answer,
    Verdict,
    as_json,
    fault,
    judge_leaks,
    read_answer,
    split_events,
    verdict,
)
from tests.served import Served

REQUESTS = 1000
CONCURRENCY = 64
CUT_SHARE = 0.1
DISTINCT_PROMPTS = 40
LEAVE_S = 0.02
"""A client that leaves before it has an answer leaves after this many seconds."""
SETTLE_S = 20.0
"""For idle connections to close and for the allocator to give memory back."""


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; returns 1 when something leaked or a stream was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--warm-requests", type=int, default=320)
    options = parser.parse_args(arguments)
    began = time.time()
    with workbench() as (plan, folder), Served(plan, folder) as served:
        report, verdicts = soak(served, options.requests, options.warm_requests)
    report |= {"machine": describe(), "took_s": round(time.time() - began)}
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(began))
    name = "soak" if options.requests >= REQUESTS else "soak-part"
    path = write(name, json.dumps(report, indent=1), stamp)
    for one in verdicts:
        print(one.line())
    print(f"\nwritten to {path}")
    return 0 if all(one.passed for one in verdicts) else 1


def soak(served: Served, requests: int, warm_requests: int) -> tuple[dict[str, Any], list[Verdict]]:
    """Warm up, count, load, count: the report and its verdicts."""
    alone = asyncio.run(
        run_jobs(served, [Job(p, -1) for p in prompts(DISTINCT_PROMPTS, "soak")], 1)
    )
    reference = {one.job.prompt: one.answer.text for one in alone if one.answer is not None}
    print(f"{len(reference)} reference answers", flush=True)
    asyncio.run(run_jobs(served, jobs(warm_requests, seed=1), CONCURRENCY))
    before = _settled(served)
    print(f"warm after {warm_requests} streams: {before.serving}", flush=True)
    began = time.monotonic()
    outcomes = asyncio.run(run_jobs(served, jobs(requests, seed=2), CONCURRENCY))
    took_s = time.monotonic() - began
    after = _settled(served)
    print(f"{requests} streams in {took_s:.1f} s: {after.serving}", flush=True)

    whole = [one for one in outcomes if one.answer is not None and not one.error]
    other = [one for one in whole if one.answer and one.answer.text != reference[one.job.prompt]]
    errors = Counter(one.error for one in outcomes if one.error)
    cut = sum(one.job.cut_after >= 0 for one in outcomes)
    verdicts = [
        *judge_leaks(before.serving, after.serving),
        verdict("undisturbed streams that failed", sum(errors.values()), 0, "at most"),
        verdict("undisturbed streams complete", len(whole), requests - cut, "at least"),
        verdict("texts that differ from the prompt's own, alone", len(other), 0, "at most"),
        verdict("replicas restarted", int(before.replica_pid != after.replica_pid), 0, "at most"),
    ]
    report = {
        "requests": requests,
        "concurrency": CONCURRENCY,
        "disconnected": cut,
        "complete": len(whole),
        "different_text": len(other),
        "errors": dict(errors),
        "tokens_per_s": sum(one.answer.completion_tokens for one in whole if one.answer) / took_s,
        "before": asdict(before),
        "after": asdict(after),
        "checks": as_json(verdicts),
    }
    return report, verdicts


def _settled(served: Served) -> census.Count:
    """The idle stack, after one more answer: vLLM's gauges show its last step."""
    census.wait_idle(served)
    time.sleep(SETTLE_S)
    asyncio.run(run_jobs(served, [Job(prompts(1, "soak")[0], -1)], 1))
    return census.take(served)


if __name__ == "__main__":
    sys.exit(main())
