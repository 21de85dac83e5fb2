"""Which specs must be refused, and how? Reads tests/cases/bad_specs.yml; used by tests and benchmarks."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayserve.errors import RayserveError
from rayserve.planner import build_plan
from rayserve.spec import parse_spec
from tests.yaml_text import load_yaml

ROOT = Path(__file__).parent.parent
CASES = ROOT / "tests" / "cases" / "bad_specs.yml"
CONFIG = ROOT / "inventories" / "example" / "model" / "config.json"


@dataclass(frozen=True, eq=False)
class BadSpec:
    """One spec with one mistake."""

    name: str
    text: str
    config: dict[str, Any] | None
    error: str
    expect: str
    line: int | None

    @functools.cached_property
    def refusal(self) -> RayserveError | None:
        """The error that parsing and planning end with; None when the spec passes."""
        try:
            build_plan(parse_spec(self.text, "cluster.yml"), self.config, "0" * 64)
        except RayserveError as error:
            return error
        return None


def load() -> list[BadSpec]:
    """All cases of the table."""
    data = load_yaml(CASES.read_text(encoding="utf-8"))
    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    return [_case(row, data["base"], config) for row in data["cases"]]


def _case(row: dict[str, Any], base: str, config: dict[str, Any]) -> BadSpec:
    text = row.get("text", base)
    for old, new in filter(None, (row.get("swap"), row.get("also"))):
        if text.count(old) != 1:
            raise ValueError(f"{row['name']}: {old!r} must stand in the base once")
        text = text.replace(old, new)
    changes = row.get("config", {})
    merged = None
    if changes != "missing":
        merged = {k: v for k, v in {**config, **changes}.items() if v is not None}
    return BadSpec(
        name=row["name"],
        text=text + row.get("add", ""),
        config=merged,
        error=row["error"],
        expect=row["expect"],
        line=row.get("line"),
    )
