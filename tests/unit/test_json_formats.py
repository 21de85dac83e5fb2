"""Do the JSON objects that programs read keep their keys?

The keys stand in tests/cases/json, one path a line. A key that goes, or comes, must be seen in a diff:
UPDATE_JSON=1 writes the files anew, and a key that goes asks for the next `format`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from rayserve import cli
from rayserve.deploy import Deployed
from rayserve.errors import RayserveError, SpecError, Where
from rayserve.plan import Plan
from rayserve.planner.convert import FORMAT, convert
from tests.bad_specs import ROOT

FOLDER = ROOT / "tests" / "cases" / "json"
PAGE = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")


def paths(schema: dict[str, Any], part: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted keys of a JSON Schema; [] stands for an item of a list."""
    for some in part.get("anyOf", []):
        yield from paths(schema, some, prefix)
    if "$ref" in part:
        yield from paths(schema, schema["$defs"][part["$ref"].rpartition("/")[2]], prefix)
    if isinstance(part.get("items"), dict):
        yield from paths(schema, part["items"], f"{prefix}[]")
    for name, inner in part.get("properties", {}).items():
        key = f"{prefix}.{name}".lstrip(".")
        yield key
        yield from paths(schema, inner, key)


def keys_of(value: Any, prefix: str = "") -> Iterator[str]:
    """The dotted keys of an object."""
    if isinstance(value, list):
        for item in value:
            yield from keys_of(item, f"{prefix}[]")
    elif isinstance(value, dict):
        for name, inner in value.items():
            key = f"{prefix}.{name}".lstrip(".")
            yield key
            yield from keys_of(inner, key)


def plan_keys() -> list[str]:
    """Keys of a plan, from its model."""
    schema = Plan.model_json_schema()
    return sorted(set(paths(schema, schema)))


def conversion_keys() -> list[str]:
    """Keys of a conversion that has findings, placeholders and flags."""
    return sorted(set(keys_of(convert("vllm serve a/b --swap-space 4").as_dict())))


def error_keys(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of an error with all that it can say."""
    monkeypatch.setattr(sys, "argv", ["rayserve", "plan", "--json"])
    error = SpecError("a", found="b", do="c", where=Where("d", 1, "e"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rayserve.inventory.locate", lambda *_: (_ for _ in ()).throw(error))
        answer = CliRunner().invoke(cli.main, ["plan", "--json"])
    assert answer.exit_code == RayserveError.exit_code + 1
    return sorted(keys_of(json.loads(answer.output)))


@pytest.mark.parametrize("name", ["plan", "conversion", "error"])
def test_keys_are_those_that_programs_know(name, monkeypatch):
    """Each object has exactly the keys that are committed for it."""
    found = error_keys(monkeypatch) if name == "error" else globals()[f"{name}_keys"]()
    file = FOLDER / f"{name}.txt"
    if os.environ.get("UPDATE_JSON"):
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(found) + "\n", encoding="utf-8")
    assert found == file.read_text(encoding="utf-8").split()


def test_page_names_the_keys_around_a_plan_and_of_an_error(monkeypatch):
    """docs/json.md names every key of an error, and those around a plan."""
    keys = [*error_keys(monkeypatch), "plan", "changed", "plan_version"]
    assert [key for key in keys if f"`{key}`" not in PAGE] == []


def test_a_deployment_and_a_verdict_about_arguments_have_their_format(monkeypatch):
    """`deploy` and `check args` print the version of their form too, and the keys that docs/json.md names."""
    plan = str(ROOT / "inventories" / "demo" / "group_vars" / "all" / "plan.yml")
    done = Deployed("chat-0", "http://127.0.0.1:8000/0", 1.5)
    monkeypatch.setattr("rayserve.deploy.deploy", lambda *_, **__: done)
    verdict = {"ok": True, "replicas": [{"revision": "0"}]}
    monkeypatch.setattr("rayserve.serving.argcheck.check", lambda _file: verdict)
    deployed = CliRunner().invoke(cli.main, ["deploy", plan, "--json"])
    checked = CliRunner().invoke(cli.main, ["check", "args", plan, "--json"])
    assert json.loads(deployed.output) == {
        "format": 1,
        "app": done.app,
        "url": done.url,
        "seconds": 1.5,
    }
    assert json.loads(checked.output) == {"format": 1, **verdict}
    rows = [
        row
        for row in PAGE.splitlines()
        if row.startswith(("| `rayserve deploy", "| `rayserve check args"))
    ]
    assert ["`format` (1)" in row for row in rows] == [True, True]
    assert [key for key in json.loads(deployed.output) if f"`{key}`" not in rows[0]] == []


def test_formats_have_a_number():
    """The forms that this page describes are version 1."""
    assert (cli.FORMAT, FORMAT) == (1, 1)
    assert PAGE.count("| `format` | 1 |") == 4
