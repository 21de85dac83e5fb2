"""What does our serving path cost, against vLLM's own server and against ray.serve.llm's default?

    python -m benchmarks.overhead                  the whole comparison; `make bench`
    python -m benchmarks.overhead --breakdown      where the overhead goes
    python -m benchmarks.overhead --enforce        exit 1 when a bar is missed

All stacks run at once; whoever is not measured is frozen. A round visits every stack at every
concurrency, and its order of stacks turns by one each round, so that slow minutes hit all alike.
The last run stands in build/bench/overhead.json, each run in build/bench/runs/.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks import breakdown, load, start_time
from benchmarks.machine import describe
from benchmarks.stacks import COMMANDS, Stack, only
from benchmarks.workbench import workbench, write
from rayserve.bench import (
    Round,
    Verdict,
    as_json,
    judge,
    judge_batching,
    judge_start,
    rows,
    table,
)
from rayserve.plan import Plan

ROUNDS = 5
START_ROUNDS = 3
BUSY_INTERVAL_S = 3.0
BUSY_PERCENT_MAX = 10.0
"""Of all cores, before anything of ours runs."""
THAW_S = 1.0
"""Time for a thawed Ray to catch up before it is measured."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; returns the exit code."""
    chosen = options(arguments)
    began = time.time()
    busy_percent = psutil.cpu_percent(BUSY_INTERVAL_S)
    if busy_percent > BUSY_PERCENT_MAX:
        print(f"warning: this machine is {busy_percent:.0f} % busy already: figures will be noise")
    with workbench() as (plan, folder):
        if chosen.breakdown:
            return breakdown.run(plan, folder, chosen.rounds)
        starts = start_time.measure(plan, folder, chosen.start_rounds)
        rounds, reads = _rounds(plan, folder, chosen)
    report, verdicts = _report(rounds, reads, starts)
    report["machine"] = describe() | {"busy_before_percent": busy_percent}
    report["began_unix_s"], report["took_s"] = round(began), round(time.time() - began)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(began))
    name = "overhead" if is_complete(chosen) else "overhead-part"
    path = write(name, json.dumps(report, indent=1), stamp)
    print(table(rows(rounds)), end="\n\n")
    for verdict in verdicts:
        print(verdict.line())
    print(f"\nwritten to {path}")
    missed = [verdict for verdict in verdicts if not verdict.passed and not verdict.stretch]
    return 1 if missed and chosen.enforce else 0


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; the defaults are the whole comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--start-rounds", type=int, default=START_ROUNDS)
    parser.add_argument("--stacks", nargs="+", choices=list(COMMANDS), default=list(COMMANDS))
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(load.REQUESTS))
    parser.add_argument("--breakdown", action="store_true")
    parser.add_argument("--enforce", action="store_true")
    return parser.parse_args(arguments)


def is_complete(chosen: argparse.Namespace) -> bool:
    """Whether a run may stand as the result: nothing of the comparison was left out."""
    return (
        chosen.rounds >= ROUNDS
        and chosen.start_rounds >= START_ROUNDS
        and set(chosen.stacks) == set(COMMANDS)
        and set(chosen.concurrency) == set(load.REQUESTS)
    )


def _rounds(
    plan: Plan, folder: Path, chosen: argparse.Namespace
) -> tuple[list[Round], dict[str, float]]:
    load.import_generator()
    stacks = [Stack(name, plan, folder) for name in chosen.stacks]
    measured: list[Round] = []
    try:
        for stack in stacks:
            with only(stack, stacks):
                print(f"{stack.name}: started in {stack.start():.1f} s", flush=True)
        reads = {}
        for stack in stacks:
            with only(stack, stacks):
                time.sleep(THAW_S)
                reads[stack.name] = load.reads_per_token(stack)
        for number in range(chosen.rounds):
            turn = number % len(stacks)
            for stack in stacks[turn:] + stacks[:turn]:
                with only(stack, stacks):
                    time.sleep(THAW_S)
                    measured += _visit(stack, number, chosen.concurrency, folder)
    finally:
        for stack in stacks:
            stack.close()
    return measured, reads


def _visit(stack: Stack, number: int, concurrencies: Sequence[int], folder: Path) -> list[Round]:
    out = []
    for concurrency in concurrencies:
        one = load.measure(stack, concurrency, f"round{number}", folder / "load.log")
        out.append(one)
        print(
            f"round {number + 1}  {one.stack:<14} {concurrency:>3}  {one.tokens_per_s:7.0f} tokens/s"
            f"  TTFT {one.ttft_p50_ms:7.2f}  TPOT {one.tpot_p50_ms:6.3f} ms",
            flush=True,
        )
    return out


def _report(
    rounds: Sequence[Round], reads: dict[str, float], starts: start_time.Starts
) -> tuple[dict[str, Any], list[Verdict]]:
    measured = rows(rounds)
    verdicts = [*judge(measured), *judge_batching(measured, "rayserve")]
    if starts["cold"]["rayserve"]:
        verdicts.append(judge_start(starts["cold"]))
    report = {
        "rows": [row | {"reads_per_token": reads[row["stack"]]} for row in as_json(measured)],
        "start_s": starts,
        "bars": as_json(verdicts),
        "rounds": as_json(rounds),
        "load": {
            "generator": "vllm.benchmarks.serve",
            "endpoint": load.PATH,
            "output_tokens": load.OUTPUT_TOKENS,
            "prompt_words": load.PROMPT_WORDS,
            "requests": load.REQUESTS,
        },
    }
    return report, verdicts


if __name__ == "__main__":
    sys.exit(main())
