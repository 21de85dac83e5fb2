"""The golden specs and the plans that they give; shared by several test files."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from rayserve.plan import Plan
from rayserve.planner import build_plan
from rayserve.planner.build import NO_STARTS
from rayserve.planner.content import model_config_path
from rayserve.spec import absolute_paths, parse_spec
from rayserve.starts import Ledger

GOLDEN = Path(__file__).parent / "golden"
FOLDER = "/home/someone/cluster"
"""Where the golden specs are said to lie, for those with relative paths."""
SPECS = sorted(path for path in GOLDEN.glob("*.yml") if not path.name.endswith(".plan.yml"))


def plan_of(path: Path, ledger: Ledger = NO_STARTS, **swaps: str) -> Plan:
    """The plan of a golden spec with words of it swapped, made with a ledger of starts.

    One of a file as it stands is made once: a dozen tests look at each.
    """
    if ledger is NO_STARTS and not swaps:
        return _plan_of_file(path)
    return _planned(path, ledger, swaps)


@functools.cache
def _plan_of_file(path: Path) -> Plan:
    return _planned(path, NO_STARTS, {})


def _planned(path: Path, ledger: Ledger, swaps: Mapping[str, str]) -> Plan:
    raw = path.read_bytes()
    for old, new in swaps.items():
        raw = raw.replace(old.encode(), new.encode())
    spec = absolute_paths(parse_spec(raw.decode(), path.name), FOLDER)
    config = (GOLDEN / spec.model.config).read_bytes()
    draft = spec.speculative.config if spec.speculative is not None else ""
    return build_plan(
        spec,
        json.loads(config),
        hashlib.sha256(raw).hexdigest(),
        draft_config=json.loads((GOLDEN / draft).read_text()) if draft else None,
        digests={model_config_path(spec): hashlib.sha256(config).hexdigest()},
        ledger=ledger,
    )
