"""Does the doctor find a failure's line, alone and hidden in a large log among the usual wrapper errors?

    python -m benchmarks.doctor CASES.json [--mb 50] [--only TEXT]

CASES.json is a list of objects; those with a `signature_sample` (the lines of a failure) and a `pain_tag` (its
cause) are asked. Hidden: the middle of a log of healthy lines, with tracebacks that name no cause on both sides of
it; alone: nothing else. Prints a JSON object: how many were right, those that were not, and what reading cost;
exit code 1 where one was wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rayserve.doctor.diagnosis import Diagnosis

SEED = 20260928
WRAPPERS = """\
(EngineCore_DP0 pid=771) ERROR 09-28 15:47:24 [core.py:718] EngineCore failed to start.
(EngineCore_DP0 pid=771) ERROR 09-28 15:47:24 [core.py:718] Traceback (most recent call last):
(EngineCore_DP0 pid=771) ERROR 09-28 15:47:24 [core.py:718]   File "core.py", line 709, in run_engine_core
(APIServer pid=12) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
(ServeReplica:app:Engine pid=9) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.
(ServeController pid=4) ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
(Worker_TP1 pid=80) Exception: WorkerProc initialization failed due to an exception in a background process.
RuntimeError: cancelled
""".splitlines()
WRAPPERS_EVERY = 2000
"""Lines between two blocks of wrapper errors."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge all cases, print, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--mb", type=float, default=50, help="Size of the log; 0: alone only.")
    parser.add_argument("--only", default="", help="Ask the cases whose id has this text.")
    options = parser.parse_args(arguments)
    cases = [
        case
        for case in json.loads(options.cases.read_text(encoding="utf-8"))
        if case.get("signature_sample") and options.only in case.get("id", "")
    ]
    around = list(filler(int(options.mb * 1e6) // 2)) if options.mb else []
    begun_s, cpu_s = time.monotonic(), time.process_time()
    alone = [missed for case in cases if (missed := judge(case, []))]
    hidden = [missed for case in cases if (missed := judge(case, around))] if around else []
    asked = len(cases)
    report = {
        "cases": asked,
        "alone_right": asked - len(alone),
        **({"hidden_right": asked - len(hidden), "log_mb": options.mb} if around else {}),
        "alone_wrong": alone,
        "hidden_wrong": hidden,
        "wall_s": round(time.monotonic() - begun_s, 1),
        "cpu_s": round(time.process_time() - cpu_s, 1),
    }
    print(json.dumps(report))
    return 1 if alone or hidden or not asked else 0


def judge(case: dict[str, Any], around: Sequence[bytes]) -> dict[str, Any] | None:
    """What was found instead of the right cause; None: it was found. `around` stands before and after."""
    sample = [f"{line}\n".encode() for line in case["signature_sample"].split("\n")]
    diagnosis = Diagnosis()
    diagnosis.read("hidden.log", (line for part in (around, sample, around) for line in part))
    tags = [cause.tag for cause in diagnosis.verdict().causes]
    if tags[:1] == [case["pain_tag"]]:
        return None
    return {"id": case.get("id", ""), "wanted": case["pain_tag"], "found": tags}


def filler(size_bytes: int) -> Iterator[bytes]:
    """Lines of an engine that serves, with wrapper errors between them."""
    chance = random.Random(SEED)  # noqa: S311 - the same log each time
    written = number = 0
    while written < size_bytes:
        number += 1
        block = WRAPPERS if number % WRAPPERS_EVERY == 1 else [_healthy(number, chance)]
        for text in block:
            line = f"{text}\n".encode()
            written += len(line)
            yield line


def _healthy(number: int, chance: random.Random) -> str:
    clock = f"{15 + number // 360_000 % 8:02d}:{number // 6000 % 60:02d}:{number // 100 % 60:02d}"
    kind = number % 20
    if kind < 9:
        return f'INFO:     10.0.0.{number % 250}:{30_000 + number % 20_000} - "GET /health HTTP/1.1" 200 OK'
    if kind < 14:
        return (
            f"(APIServer pid=31) INFO 09-28 {clock} [loggers.py:123] Engine 000: Avg prompt throughput: "
            f"{chance.random() * 900:.1f} tokens/s, Avg generation throughput: {chance.random() * 900 + 1:.1f} "
            f"tokens/s, Running: {number % 90} reqs, Waiting: {number % 9} reqs, GPU KV cache usage: "
            f"{number % 99}.0%, Prefix cache hit rate: {number % 70}.1%"
        )
    if kind < 19:
        return (
            f"(ServeReplica:app:Engine pid=9) INFO 2026-09-28 {clock},{number % 1000:03d} app_Engine "
            f"{chance.getrandbits(64):016x} {chance.getrandbits(128):032x} -- POST /v1/chat/completions 200 "
            f"{chance.random() * 9000:.1f}ms"
        )
    words = " ".join(f"{chance.getrandbits(40):x}" for _ in range(12))
    return f"(Worker_TP0 pid=77) DEBUG 09-28 {clock} [core.py:{number % 999}] {words} step {number}"


if __name__ == "__main__":
    raise SystemExit(main())
