"""How right is the planner on logged starts of vLLM that it has not seen?

    python -m benchmarks.planner_accuracy CASES.json [CASES.json ...] --configs MODEL_CONFIGS.json
        [--json OUT.json] [--verbose]

Nothing is taken from a log but the flags, the GPU and the version. Three questions, each with its bar:
weights for each GPU; blocks and concurrency from the logged bytes of the cache; and, end to end, the
bytes of the cache with their range, and the verdict. Exit code 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.planner_cases import find_record
from benchmarks.planner_rows import case_row
from benchmarks.planner_summary import bars, leave_one_out, table

Case = Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; returns the exit code."""
    chosen = _options(arguments)
    records = json.loads(chosen.configs.read_text("utf-8"))
    cases = [case for path in chosen.cases for case in json.loads(path.read_text("utf-8"))]
    rows = [case_row(case, find_record(case, records)) for case in cases]
    measured = bars(rows)
    for line in table(rows, verbose=chosen.verbose):
        print(line)
    for bar in measured:
        print(bar.line())
    if chosen.json:
        report = {
            "rows": [row.as_json() for row in rows],
            "bars": [bar.as_json() for bar in measured],
            "leave_one_family_out": leave_one_out(rows),
        }
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps(report, indent=1))
    return 0 if all(bar.passed for bar in measured) else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", type=Path, nargs="+")
    parser.add_argument("--configs", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
