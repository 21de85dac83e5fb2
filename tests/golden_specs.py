"""The golden specs and the plans that they give; shared by several test files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from rayserve.plan import Plan
from rayserve.planner import build_plan
from rayserve.spec import parse_spec

GOLDEN = Path(__file__).parent / "golden"
SPECS = sorted(path for path in GOLDEN.glob("*.yml") if not path.name.endswith(".plan.yml"))


def plan_of(path: Path) -> Plan:
    """The plan of a golden spec."""
    raw = path.read_bytes()
    spec = parse_spec(raw.decode(), path.name)
    config = json.loads((GOLDEN / spec.model.config).read_text())
    return build_plan(spec, config, hashlib.sha256(raw).hexdigest())
