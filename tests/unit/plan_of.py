"""The plan of the base spec with changes, and configurations of the golden specs."""

from __future__ import annotations

import json

from rayserve.errors import Where
from rayserve.planner import build_plan
from rayserve.spec import parse_spec
from tests.bad_specs import CASES, CONFIG, ROOT
from tests.plans import merged, planned
from tests.yaml_text import load_yaml

CONFIGS = ROOT / "tests" / "golden" / "configs"
BASE = load_yaml(CASES.read_text())["base"]
MODEL = json.loads(CONFIG.read_text())
HERE = Where("config.json")


def config(name: str):
    """A config.json of the golden specs."""
    return json.loads((CONFIGS / f"{name}.json").read_text())


def plan(add: str = "", model=None, draft=None, digests=None, checkpoint=None, **swaps: str):
    """The plan of the base spec with changes: sections added, values replaced."""
    text = merged(BASE + add)
    for old, new in swaps.items():
        text = text.replace(old, new)
    if model is draft is digests is checkpoint is None:
        return planned(text, MODEL)
    spec = parse_spec(text, "cluster.yml")
    return build_plan(
        spec, model or MODEL, "0" * 64, draft_config=draft, digests=digests, checkpoint=checkpoint
    )
