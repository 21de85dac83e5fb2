"""Are the generated schemas and the reference fresh, and does Ansible's shape hold every plan?"""

from __future__ import annotations

import json

import pytest

from rayserve import schema
from rayserve.plan import PLAN_KEY
from rayserve.planner.render import plan_text
from rayserve.spec import SPEC_KEY
from tests.bad_specs import ROOT
from tests.golden_specs import SPECS, plan_of
from tests.yaml_text import load_yaml

TYPES = {"str": str, "int": int, "float": (int, float), "bool": bool, "list": list, "dict": dict}


def test_reference_is_fresh():
    """docs/reference.md is what the code says now: `rayserve schema reference > docs/reference.md`."""
    assert (ROOT / "docs" / "reference.md").read_text() == schema.reference()


def test_reference_has_every_key():
    """Each section of the spec has its table, and owned arguments are told."""
    text = schema.reference()
    for name in ("node_pools[]", "lora.adapters[]", "timeouts", "rope_scaling", "speculative"):
        assert f"## {name}\n" in text
    assert "| `trust_remote_code` |" in text
    assert "None" not in text


@pytest.mark.parametrize("what, key", [("spec", SPEC_KEY), ("plan", PLAN_KEY)])
def test_json_schema(what, key):
    """The JSON Schemas have one top-level key and allow no other, at any level."""
    data = json.loads(schema.render(what))
    assert list(data["properties"]) == data["required"] == [key]
    assert data["additionalProperties"] is False
    for definition in data["$defs"].values():
        if definition.get("type") == "object":
            assert definition["additionalProperties"] is False


def walk(options, path=""):
    """Every option of an argument spec, with its path."""
    for name, option in options.items():
        yield f"{path}.{name}", option
        yield from walk(option.get("options", {}), f"{path}.{name}")


def test_argument_specs_have_neither_defaults_nor_nulls():
    """Ansible applies no defaults from argument specs and fails on null: there are none."""
    specs = load_yaml(schema.render("argument-specs"))["argument_specs"]
    options = list(walk(specs["main"]["options"]))
    assert len(options) > 60
    for path, option in options:
        assert "default" not in option, path
        assert None not in option.values(), path
        assert option["description"], path
        assert option["type"] in {*TYPES, "raw"}, path
        if option["type"] == "list":
            assert option["elements"], path


def check(value, option, path):
    """A small validator with Ansible's rules: types, choices, required and unknown keys."""
    kind = option["type"]
    if kind == "raw":
        return
    assert isinstance(value, TYPES[kind]), path
    assert not (kind in ("int", "float") and isinstance(value, bool)), path
    if "choices" in option:
        assert value in option["choices"], path
    if kind == "list":
        for item in value:
            check(item, {"type": option["elements"], "options": option.get("options")}, path)
    if kind == "dict" and option.get("options"):
        assert value.keys() <= option["options"].keys(), path
        for name, inner in option["options"].items():
            assert name in value or not inner.get("required"), f"{path}.{name}"
            if name in value:
                check(value[name], inner, f"{path}.{name}")


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_every_golden_plan_satisfies_the_argument_specs(path):
    """What the planner writes passes the argument specs that roles get."""
    options = schema.argument_specs()["main"]["options"]
    data = load_yaml(plan_text(plan_of(path), path.name))
    check(data, {"type": "dict", "options": options}, "")


def test_the_validator_can_fail():
    """A plan with a wrong type or a missing key does not pass."""
    options = {"type": "dict", "options": schema.argument_specs()["main"]["options"]}
    data = load_yaml(plan_text(plan_of(SPECS[0]), "x"))
    data[PLAN_KEY]["door"]["max_queued"] = "many"
    with pytest.raises(AssertionError):
        check(data, options, "")
    with pytest.raises(AssertionError):
        check({PLAN_KEY: {}}, options, "")
