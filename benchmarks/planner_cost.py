"""What does the whole plan of a 405B model cost, from the start of the interpreter?

    python -m benchmarks.planner_cost [SPEC] [--runs N]

Prints the median time and the largest memory of N fresh processes; exit code 1 beyond 1 s or 150 MB.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence

from benchmarks.child import MIB, rayserve

MOST_S = 1.0
MOST_MIB = 150e6 / MIB
"""150 MB."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("spec", nargs="?", default="inventories/example")
    parser.add_argument("--runs", type=int, default=5)
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
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
