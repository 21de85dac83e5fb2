"""Is every hostile input of the planner refused by the command line, clearly, at once and cheaply?

    python -m benchmarks.planner_hostile [--only TEXT]

Each input goes through `rayserve plan` in a process of its own. It passes when that ends with the exit
code of wrong input, with one message that says what was needed, found and is to be done, and without
a traceback; within 2 s of processor time and 200 MB. Prints a table, the number of different errors and
the line `N passed, N failed`; exit code 1 when one failed or fewer than 20 errors were reached.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.child import Child, rayserve
from benchmarks.hostile_files import Hostile, cases, prepare
from benchmarks.planner_bars import Bar, write_part
from rayserve.units import MIB

MOST_S = 2.0
MOST_MIB = 200e6 / MIB
"""200 MB."""
BRANCHES_MIN = 20
CASES_MIN = 40


@dataclass(frozen=True)
class Outcome:
    """How one input went."""

    name: str
    child: Child
    message: str
    """`found` of the error, as a person reads it."""
    branch: str
    """What the error asks for, without this input's own words and numbers."""
    fault: str
    """Empty: refused as it should be."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all inputs, print, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="Run the inputs whose name has this text.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    only = options.only
    chosen = [case for case in cases() if only in case.name]
    outcomes = []
    for case in chosen:
        outcomes.append(run_case(case))
        print(_row(outcomes[-1]), flush=True)
    failed = [one for one in outcomes if one.fault]
    branches = {one.branch for one in outcomes if one.branch}
    slowest = max((one.child.cpu_s for one in outcomes), default=0.0)
    largest = max((one.child.peak_mib for one in outcomes), default=0.0)
    print(f"\n{len(branches)} different errors (at least {BRANCHES_MIN})")
    print(f"slowest {slowest:.2f} s of processor, largest {largest:.0f} MiB")
    print(f"{len(outcomes) - len(failed)} passed, {len(failed)} failed")
    if options.json:
        write_part(options.json, map(_as_json, outcomes), _bars(outcomes, branches))
    short = not only and (len(branches) < BRANCHES_MIN or len(outcomes) < CASES_MIN)
    return 1 if failed or short else 0


def _bars(outcomes: Sequence[Outcome], branches: set[str]) -> list[Bar]:
    total, found = len(outcomes), len(branches)
    good = sum(not one.fault for one in outcomes)
    return [
        Bar(
            "hostile inputs with a clear error each",
            f"{good} of {total}",
            f"all, ≥ {CASES_MIN}",
            good == total >= CASES_MIN,
            total,
        ),
        Bar("different errors", str(found), f"≥ {BRANCHES_MIN}", found >= BRANCHES_MIN, total),
    ]


def _as_json(one: Outcome) -> dict[str, object]:
    return {
        "name": one.name,
        "message": one.message,
        "branch": one.branch,
        "fault": one.fault,
        "cpu_s": one.child.cpu_s,
        "peak_mib": one.child.peak_mib,
    }


def run_case(case: Hostile) -> Outcome:
    """Build one input, plan it, and compare."""
    with tempfile.TemporaryDirectory(prefix="rayserve-hostile-") as name:
        folder = Path(name)
        prepare(folder)
        case.build(folder)
        child = rayserve("plan", str(folder), "--json", timeout_s=30)
    try:
        error = json.loads(child.out)
    except ValueError:
        error = {}
    error = error if isinstance(error, dict) else {}
    parts = {key: str(error.get(key, "")) for key in ("error", "needed", "found", "do", "path")}
    branch = f"{parts['error']}: {_plain(parts['needed'])}" if parts["needed"] else ""
    return Outcome(case.name, child, parts["found"], branch, _fault(case, child, parts))


def _fault(case: Hostile, child: Child, parts: dict[str, str]) -> str:
    text = f"{parts['needed']}\nfound: {parts['found']}\n{parts['do']}"
    if "Traceback" in child.err + child.out:
        return "a traceback"
    if child.code not in case.codes:
        return f"exit code {child.code} instead of {case.codes}: {(child.err or child.out)[:200]}"
    missing = [key for key in ("needed", "found", "do") if not parts[key]]
    # A wrong command line and a machine that is not ready have no place in a file.
    if parts["error"] not in {"UsageError", "HostError"} and not parts["path"]:
        missing.append("path")
    if missing:
        return f"no {' and no '.join(missing)} in {child.out[:200]}"
    if case.say.lower() not in text.lower():
        return f"no {case.say!r} in {text[:300]!r}"
    if len(text) > 1000:
        return f"a message of {len(text)} characters"
    if child.cpu_s > MOST_S:
        return f"{child.cpu_s:.1f} s of processor, above {MOST_S:g}"
    if child.peak_mib > MOST_MIB:
        return f"{child.peak_mib:.0f} MiB, above {MOST_MIB:.0f}"
    return ""


def _plain(needed: str) -> str:
    """The message without names and numbers, so that the same error counts once."""
    return re.sub(r"\d+", "N", re.sub(r"`[^`]*`|'[^']*'", "X", needed))[:80]


def _row(one: Outcome) -> str:
    word = "FAIL" if one.fault else "pass"
    row = (
        f"{word}  {one.child.cpu_s:5.2f} s {one.child.peak_mib:4.0f} MiB  {one.name[:44]:<44}  "
        f"{one.branch.partition(': ')[2][:60]:<60}  {one.message[:60]}"
    )
    return f"{row}\n      {one.fault}" if one.fault else row


if __name__ == "__main__":
    sys.exit(main())
