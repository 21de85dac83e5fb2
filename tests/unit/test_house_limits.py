"""Does the package keep to its own limits, of size and of what an `except` or a test may leave open?"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bad_specs import ROOT

MODULE_LINES = 400
FUNCTION_LINES = 100
USUAL_FUNCTION_LINES = 50
BROAD = {"Exception", "BaseException"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
ASSERTING = {"pytest.raises", "pytest.warns", "pytest.fail"}
TESTS = sorted((ROOT / "tests").rglob("*.py"))
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
        if isinstance(node, FUNCTIONS)
    }


@pytest.mark.parametrize("path", [*MODULES, *TESTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_is_too_long(path):
    """A module has at most 400 lines."""
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MODULE_LINES


def test_no_function_is_too_long():
    """A function has at most 100 lines, and 95 of 100 have at most 50."""
    lengths = {name: n for path in MODULES for name, n in functions(path).items()}
    assert len(lengths) > 300
    assert [name for name, n in lengths.items() if n > FUNCTION_LINES] == []
    assert sorted(lengths.values())[int(0.95 * len(lengths))] <= USUAL_FUNCTION_LINES


def broad_excepts(path: Path) -> list[tuple[str, bool]]:
    """Each place that takes whatever error comes, and whether a comment says of what it is the entry."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler):
            kinds = [node.type] if node.type else [ast.Name("BaseException")]
            comment = " ".join(lines[node.lineno - 1 : node.body[0].lineno])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            kinds, comment = node.args, lines[node.lineno - 1]
        else:
            continue
        if BROAD & {name.id for kind in kinds for name in ast.walk(kind) if hasattr(name, "id")}:
            found.append((f"{path.relative_to(ROOT)}:{node.lineno}", "entry of" in comment.lower()))
    return found


def test_a_broad_except_stands_at_an_entry_only():
    """Elsewhere it would hide errors: one a module, at the entry of a process or thread, which it says."""
    found = [broad for path in MODULES if (broad := broad_excepts(path))]
    assert len(found) > 3
    assert [one for broad in found for one, says_why in broad if not says_why] == []
    assert [broad for broad in found if len(broad) > 1] == []


def nodes(tree: ast.AST, *kinds: type[ast.AST]) -> Iterator[Any]:
    """What is of these kinds in a tree, at any depth."""
    return (node for node in ast.walk(tree) if isinstance(node, kinds))


def called(function: ast.AST) -> set[str]:
    """The names of what it calls; `pytest.raises` and its kin with the module."""
    functions = [call.func for call in nodes(function, ast.Call)]
    names = {f.attr for f in functions if isinstance(f, ast.Attribute)}
    return names | {ast.unparse(f) for f in functions}


def helpers(path: Path) -> dict[str, ast.AST]:
    """Functions and methods of a file of tests, and of those files of tests that it imports from."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    files = [ROOT / f"{node.module.replace('.', '/')}.py" for node in nodes(tree, ast.ImportFrom)]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files if file in TESTS]
    return {f.name: f for each in [*trees, tree] for f in nodes(each, *FUNCTIONS)}


def asserts(name: str, known: dict[str, ast.AST], seen: frozenset[str] = frozenset()) -> bool:
    """Whether a test or helper contains an assertion, or calls a helper that does."""
    function = known[name]
    calls = called(function)
    if calls & ASSERTING or next(nodes(function, ast.Assert), None) is not None:
        return True
    further = calls & known.keys() - seen - {name}
    return any(asserts(helper, known, seen | {name}) for helper in further)


def test_every_test_can_fail():
    """Each asserts something, itself or by a helper of the tests; that nothing is raised is not enough."""
    idle = [
        f"{path.relative_to(ROOT)} {name}"
        for path in TESTS
        if path.name.startswith("test_")
        for known in [helpers(path)]
        for name in known
        if name.startswith("test_") and not asserts(name, known)
    ]
    assert idle == []


def test_a_test_that_asserts_nothing_is_seen():
    """An assertion of the product does not count, nor one that a called helper does not reach."""
    source = """
def test_idle(): check_keys(); helper()
def test_through_a_helper(): deeper()
def test_refusal():
    with pytest.raises(ValueError): int("x")
def helper(): print(1)
def deeper(): helper(); assert_it()
def assert_it(): assert 1
"""
    known = {function.name: function for function in nodes(ast.parse(source), *FUNCTIONS)}
    assert [name for name in known if name.startswith("test_") and not asserts(name, known)] == [
        "test_idle"
    ]
