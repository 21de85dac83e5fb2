"""What does one part of `make bench-planner` leave for the closing table?

A part writes {"rows": [...], "bars": [{"name", "cases", "measured", "wanted", "passed"}]}; figures in
bars are text with their unit, as a person reads them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

UNUSABLE = 2
"""Exit code of a part that could not measure: a file is missing or is not what it should be."""


@dataclass(frozen=True)
class Bar:
    """A question with a measured figure and the wanted one."""

    name: str
    measured: str
    wanted: str
    passed: bool
    cases: int = 0


def write_part(path: Path, rows: Iterable[Mapping[str, Any]], bars: Iterable[Bar]) -> None:
    """Write a part's figures, the folder included."""
    report = {"rows": [dict(row) for row in rows], "bars": [asdict(bar) for bar in bars]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of text as aligned lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return lines


def bar_lines(bars: Sequence[Bar]) -> list[str]:
    """The table of bars."""
    head = ("question", "cases", "measured", "wanted", "")
    body = [
        (bar.name, str(bar.cases), bar.measured, bar.wanted, "passed" if bar.passed else "MISSED")
        for bar in bars
    ]
    return columns([head, *body])


def read_json(path: Path) -> Any:
    """A JSON file's content.

    Raises:
        SystemExit: it cannot be read (code `UNUSABLE`); the reason is on stderr.
    """
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        print(f"error: {path} to be a readable JSON file\n  found: {reason}", file=sys.stderr)
        raise SystemExit(UNUSABLE) from None
