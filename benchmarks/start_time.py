"""How long from a server's command to its first token, with Ray already up?

cold    the first start on a fresh Ray, with an empty engine cache, and with the file cache of the
        operating system dropped where this process may (root); every import comes from the disk
second  the same command again, on the same Ray
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path

from benchmarks.stacks import Stack, start_ray_for
from rayserve.plan import Plan

Starts = dict[str, dict[str, list[float]]]
STACKS = ("vllm", "rayserve")
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def measure(plan: Plan, folder: Path, rounds: int) -> Starts:
    """Seconds of each start: {"cold" | "second": {stack: [a figure a round]}}; nothing is left out."""
    out: Starts = {kind: {name: [] for name in STACKS} for kind in ("cold", "second")}
    for number in range(rounds):
        # The order turns each round.
        for name in STACKS if number % 2 == 0 else STACKS[::-1]:
            _pair(Stack(name, plan, folder), number, out)
    if rounds:
        for kind, times in out.items():
            middle = {name: statistics.median(values) for name, values in times.items()}
            ratio = middle["rayserve"] / middle["vllm"]
            print(f"start, {kind}: {middle} s, ratio {ratio:.2f}\n", flush=True)
    return out


def _pair(stack: Stack, number: int, out: Starts) -> None:
    stack.cache = stack.folder / f"cache-{stack.name}-{number}"
    try:
        if stack.name == "rayserve":
            stack.cluster = start_ray_for(stack, haproxy=True)
        drop_file_cache()
        for kind in ("cold", "second"):
            seconds = stack.start()
            out[kind][stack.name].append(seconds)
            print(f"start {number + 1}, {kind:<6} {stack.name:<9} {seconds:6.1f} s", flush=True)
            stack.stop()
    finally:
        stack.close()


def drop_file_cache() -> bool:
    """Drop the operating system's cache of files; False where this process may not."""
    os.sync()
    try:
        DROP_CACHES.write_text("3")
    except OSError:
        return False
    return True
