"""Is a replica that is only busy ever given up?

    python -m benchmarks.false_kills [--minutes 30]        `make test-false-kills`

One replica, prompts near the model's limit, and as many clients as the queue takes, on whatever cores
this machine has; then a minute without any. The watch is set far tighter than its default. Writes
build/false-kills.json: seconds, engine steps, the shortest queue that was seen under load, the longest
time that the watch saw without a step, restarts.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.fault_kinds import Replica, replicas
from benchmarks.load import PATH, request_body
from benchmarks.machine import describe
from benchmarks.workbench import OUT, workbench
from rayserve.demo.corpus import CORPUS
from rayserve.health.facts.evidence import FOLDER
from rayserve.plan import Plan
from tests.served import Served, first_token, make_plan, metrics

STALL_S = 10.0
"""The default is 60."""
SEQS, QUEUED = 8, 24
MODEL_LEN, OUTPUT = 2048, 64
PAUSE_S = 60.0
RAMP_S = 10.0
"""After the start of the load; the queue fills meanwhile, and is not looked at."""
WHOLE_QUIET_S = 180.0
"""Longest that a client waits for the next byte."""


@dataclass
class Seen:
    """What a trial saw."""

    wall_s: float = 0.0
    steps: int = 0
    """Engine steps between the first look and the last."""
    least_waiting: int = QUEUED
    """Shortest queue of the engine under load, of looks one second apart."""
    longest_quiet_s: float = 0.0
    """Longest that the watch saw pending work without a step."""
    answers: Counter[str] = field(default_factory=Counter)
    """Requests by status, or by the client's error."""
    restarts: int = 0
    bundles: int = 0
    served_after_pause: bool = False

    @property
    def passed(self) -> bool:
        """Nothing was killed, and the load was what it claims to be."""
        return (
            self.restarts == 0
            and self.bundles == 0
            and self.served_after_pause
            and self.least_waiting > 0
            and "200" in self.answers
            and set(self.answers) <= {"200", "429"}  # a full queue's own answer
        )


async def client(served: Served, seen: Seen, number: int, until_s: float) -> None:
    """Long prompts one after the other; each is new, so no cache shortens it."""
    choose = random.Random(number)  # noqa: S311 - reproducible load, not a secret
    timeout = aiohttp.ClientTimeout(total=None, sock_read=WHOLE_QUIET_S)
    words = CORPUS.split()
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while time.monotonic() < until_s:
            text = " ".join(choose.choices(words, k=MODEL_LEN))
            body = request_body(served.model, text, OUTPUT)
            body["truncate_prompt_tokens"] = MODEL_LEN - OUTPUT
            try:
                async with session.post(
                    served.url + PATH, json=body, headers=served.headers
                ) as reply:
                    await reply.read()
                    seen.answers[str(reply.status)] += 1
            except (aiohttp.ClientError, TimeoutError) as error:
                seen.answers[type(error).__name__] += 1


async def look(served: Served, replica: Replica, seen: Seen, until_s: float) -> None:
    """The replica's own figures, once a second."""
    first = (await _figures(served, replica))["vllm:iteration_tokens_total_count"]
    ramp_s = time.monotonic() + RAMP_S
    while time.monotonic() < until_s:
        await asyncio.sleep(1.0)
        with contextlib.suppress(OSError, RuntimeError):
            found = await _figures(served, replica)
            if time.monotonic() > ramp_s:
                waiting = int(found["vllm:num_requests_waiting"])
                seen.least_waiting = min(seen.least_waiting, waiting)
            quiet_s = found["rayserve_engine_quiet_seconds"]
            seen.longest_quiet_s = max(seen.longest_quiet_s, quiet_s)
            seen.steps = int(found["vllm:iteration_tokens_total_count"] - first)


async def _figures(served: Served, replica: Replica) -> dict[str, float]:
    return await asyncio.to_thread(metrics, served, replica.port)


async def trial(served: Served, load_s: float) -> Seen:
    """Load, then none, then one request."""
    seen = Seen()
    (before,) = replicas(served)
    began_s = time.monotonic()
    until_s = began_s + load_s
    clients = [client(served, seen, number, until_s) for number in range(SEQS + QUEUED)]
    await asyncio.gather(look(served, before, seen, until_s), *clients)
    await asyncio.sleep(PAUSE_S)
    seen.served_after_pause = await asyncio.to_thread(
        first_token, served.url, served.headers, served.model
    )
    seen.wall_s = round(time.monotonic() - began_s, 1)
    seen.restarts = int([one.pid for one in replicas(served)] != [before.pid])
    seen.bundles = await asyncio.to_thread(_bundles, served)
    return seen


def as_report(seen: Seen) -> dict[str, Any]:
    """What a trial saw, for JSON."""
    # Not asdict(), which makes of a Counter one of pairs.
    return {
        "stall_s": STALL_S,
        "passed": seen.passed,
        **vars(seen),
        "answers": dict(seen.answers),
    }


def _bundles(served: Served) -> int:
    return len(list(Path(served.plan.replica.state_dir, FOLDER).glob("*")))


def trial_plan(folder: Path) -> Plan:
    """One replica with a full queue, and a watch that is quick to judge."""
    return make_plan(
        folder,
        timeouts={
            "start_s": 240, "drain_s": 30, "stall_s": STALL_S,
            "health_period_s": 2, "health_timeout_s": 8,
        },
        limits={"max_model_len": MODEL_LEN, "max_num_seqs": SEQS, "kv_cache_gib": 1},
        door={"max_queued": QUEUED},
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; returns 1 when something was killed, or the load was not what it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="of load (30)")
    options = parser.parse_args(arguments)
    with workbench() as (_, folder):
        plan = trial_plan(folder)
        with Served(plan, folder) as served:
            seen = asyncio.run(trial(served, options.minutes * 60))
    text = json.dumps({"machine": describe(), **as_report(seen)}, indent=1)
    path = OUT.parent / "false-kills.json"
    path.write_text(text + "\n")
    print(text)
    print(f"written to {path}")
    return 0 if seen.passed else 1


if __name__ == "__main__":
    sys.exit(main())
