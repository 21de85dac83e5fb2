"""How right is the planner on logged starts of vLLM that it has not seen?

    python -m benchmarks.planner_accuracy CASES.json [CASES.json ...] --configs MODEL_CONFIGS.json
        [--json OUT.json] [--verbose]

Nothing is taken from a log but the flags, the GPU and the version. Three questions, each with its bar:
weights for each GPU; blocks and concurrency from the logged bytes of the cache; and, end to end, the
bytes of the cache with their range, and the verdict. Exit code 1 when a bar is missed or nothing could
be judged, 2 when a file cannot be read. A bar that no case asks is shown as not measured.
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
from benchmarks.planner_summary import (
    bars,
    errors_by_family,
    leave_one_out,
    median_width,
    table,
)

Case = Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; returns the exit code."""
    chosen = _options(arguments)
    try:
        records = _listed(chosen.configs, "models")
        cases = [case for path in chosen.cases for case in _listed(path, "cases")]
    except (OSError, ValueError) as error:
        print(f"error: a JSON list of objects is needed: {error}", file=sys.stderr)
        return 2
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
            "errors_by_family": errors_by_family(rows),
            "leave_one_family_out": leave_one_out(rows),
            "median_kv_width_percent": median_width(rows),
        }
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps(report, indent=1))
    judged = [bar.passed for bar in measured if bar.passed is not None]
    return 0 if judged and all(judged) else 1


def _listed(path: Path, key: str) -> list[Case]:
    """The objects of a file: a list, or an object that has the list under `key`.

    Raises:
        OSError, ValueError: it cannot be read, or is something else; each names the file.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if isinstance(found, Mapping):
        found = found.get(key)
    if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
        raise ValueError(f"{path} has none, and none under {key!r}")
    return found


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", type=Path, nargs="+")
    parser.add_argument("--configs", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
