"""Does the package keep to its own limits of size, so that a page of it can be read at once?"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.bad_specs import ROOT

MODULE_LINES = 400
FUNCTION_LINES = 100
USUAL_FUNCTION_LINES = 50
MODULES = sorted(
    path
    for folder in ("rayserve", "scripts", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)


def functions(path: Path) -> dict[str, int]:
    """The length of each function in lines, signature and docstring included."""
    return {
        f"{path.name}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_is_too_long(path):
    """A module has at most 400 lines."""
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MODULE_LINES


def test_no_function_is_too_long():
    """A function has at most 100 lines, and 95 of 100 have at most 50."""
    lengths = {name: n for path in MODULES for name, n in functions(path).items()}
    assert len(lengths) > 300
    assert [name for name, n in lengths.items() if n > FUNCTION_LINES] == []
    assert sorted(lengths.values())[int(0.95 * len(lengths))] <= USUAL_FUNCTION_LINES
