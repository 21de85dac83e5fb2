"""Does each spec of tests/golden still give the plan that was reviewed?

After a change that is meant: `UPDATE_GOLDEN=1 pytest tests/unit/test_planner_golden.py`, and read the diff.
"""

from __future__ import annotations

import os

import pytest

from rayserve.plan import parse_plan
from rayserve.planner.render import plan_text
from tests.golden_specs import SPECS, plan_of
from tests.yaml_text import load_yaml


def test_there_are_golden_specs():
    """The folder was found: an empty parametrisation would pass for nothing."""
    assert len(SPECS) >= 8


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_golden_plan(path):
    """A spec gives exactly the plan that was reviewed."""
    text = plan_text(plan_of(path), path.name)
    golden = path.with_suffix(".plan.yml")
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_golden_plan_survives_yaml(path):
    """A plan that is written and read again is the same plan, with the same revision."""
    plan = plan_of(path)
    read = parse_plan(load_yaml(plan_text(plan, path.name)), "plan.yml")
    assert read == plan
    assert read.revision == plan.revision == read.replica.revision


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_golden_plan_is_flat_for_ansible(path):
    """No null and no template brace stands anywhere in a plan."""
    text = plan_text(plan_of(path), path.name)

    def walk(value):
        assert value is not None
        assert not (isinstance(value, str) and "{{" in value)
        for item in (
            value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        ):
            walk(item)

    walk(load_yaml(text))
