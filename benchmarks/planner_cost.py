"""What does the whole plan of a 405B model cost, from the start of the interpreter?

    python -m benchmarks.planner_cost [SPEC] [--runs N] [--json OUT.json]

Prints the median time and the largest memory of N fresh processes; exit code 1 beyond 1 s or 150 MB.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.child import Child, rayserve
from benchmarks.planner_bars import Bar, write_part
from rayserve.units import MIB

MOST_S = 1.0
MOST_MIB = 150e6 / MIB
"""150 MB."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("spec", nargs="?", default="inventories/example")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as out:
        runs = [rayserve("plan", chosen.spec, "--out", out) for _ in range(max(1, chosen.runs))]
    failed = [run for run in runs if run.code]
    if failed:
        print(failed[0].err or failed[0].out, file=sys.stderr)
        return 1
    wall_s = statistics.median(run.wall_s for run in runs)
    cpu_s = statistics.median(run.cpu_s for run in runs)
    peak_mib = max(run.peak_mib for run in runs)
    passed = wall_s <= MOST_S and peak_mib <= MOST_MIB
    print(
        f"{'pass' if passed else 'FAIL'}  whole plan of {chosen.spec}: {wall_s:.2f} s median of "
        f"{len(runs)} ({cpu_s:.2f} s of processor; at most {MOST_S:g} s), peak {peak_mib:.0f} MiB "
        f"(at most {MOST_MIB:.0f})"
    )
    if chosen.json:
        write_part(chosen.json, map(_row, runs), _bars(wall_s, peak_mib, len(runs)))
    return 0 if passed else 1


def _row(run: Child) -> dict[str, float]:
    return {"wall_s": run.wall_s, "cpu_s": run.cpu_s, "peak_mib": run.peak_mib}


def _bars(wall_s: float, peak_mib: float, runs: int) -> list[Bar]:
    time, memory = f"{wall_s:.2f} s", f"{peak_mib:.0f} MiB"
    return [
        Bar("whole plan of 405B, median time", time, f"≤ {MOST_S:g} s", wall_s <= MOST_S, runs),
        Bar(
            "whole plan of 405B, peak memory",
            memory,
            f"≤ {MOST_MIB:.0f} MiB",
            peak_mib <= MOST_MIB,
            runs,
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
