"""Does `make bench-planner` run all parts, and does its one table hide nothing that was missed?"""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import planner_report
from benchmarks.planner_bars import Bar, bar_lines, columns, read_json, write_part
from benchmarks.planner_report import main, read_bars

GOOD = {"name": "a", "cases": 3, "measured": "1 %", "wanted": "≤ 2 %", "passed": True}
MISSED = {**GOOD, "name": "b", "measured": "3 %", "passed": False}


def part(bars=None, code=0, text=""):
    """A program that stands for a part: it writes these bars to its last argument, and ends so."""
    written = "" if bars is None else json.dumps({"rows": [], "bars": bars})
    return (
        "import sys, pathlib\n"
        f"print({text!r})\n"
        f"written = {written!r}\n"
        "if written: pathlib.Path(sys.argv[1]).write_text(written)\n"
        f"sys.exit({code})"
    )


@pytest.fixture
def parts(monkeypatch):
    """Programs in place of the parts' commands, by name."""
    programs = dict.fromkeys(planner_report.PARTS, part([GOOD]))
    monkeypatch.setattr(
        planner_report,
        "command",
        lambda name, cases, configs, out: [sys.executable, "-c", programs[name], str(out)],
    )
    monkeypatch.setattr(planner_report.importlib.util, "find_spec", lambda name: object())
    return programs


def run(tmp_path, capfd, *more):
    """Exit code and closing table, with cases given."""
    code = main([str(tmp_path / "c.json"), "--configs", "m.json", "--out", str(tmp_path), *more])
    return code, capfd.readouterr().out.rpartition("── the planner ──")[2]


def test_all_passed_is_exit_code_0(parts, tmp_path, capfd):
    """Every part has its lines in one table."""
    code, table = run(tmp_path, capfd)
    assert code == 0
    assert table.count("passed") == len(planner_report.PARTS) + 1
    assert f"{len(planner_report.PARTS)} passed, 0 missed" in table


def test_a_missed_bar_is_exit_code_1_and_the_others_run(parts, tmp_path, capfd):
    """The part after the one that missed is in the table."""
    parts["accuracy"] = part([GOOD, MISSED], code=1)
    code, table = run(tmp_path, capfd)
    assert code == 1
    assert "MISSED" in table
    assert f"{len(planner_report.PARTS)} passed, 1 missed" in table


@pytest.mark.parametrize(
    "program",
    [
        part(None, code=1, text="Traceback"),  # nothing written
        part(None, code=0),  # claims success, and left nothing
        part([GOOD], code=3),  # all bars passed, and yet it failed
        part([], code=0),  # no bar at all
        part([{"name": "x"}], code=0),  # not a bar
    ],
)
def test_a_part_that_breaks_is_missed(parts, tmp_path, capfd, program):
    """A crash, a file that is missing or broken, or none but good bars after a failure: never passed."""
    parts["rivals"] = program
    code, table = run(tmp_path, capfd)
    assert code == 1
    assert "rivals: runs to its end" in table


def test_an_old_file_is_not_taken_for_a_new_one(parts, tmp_path, capfd):
    """What an earlier run left is removed before the part starts."""
    (tmp_path / "planner-engine.json").write_text(json.dumps({"rows": [], "bars": [GOOD]}))
    parts["engine"] = part(None, code=0)
    code, _ = run(tmp_path, capfd)
    assert code == 1


def test_a_part_that_does_not_end_is_ended(parts, tmp_path, capfd, monkeypatch):
    """After the limit it is stopped, and the table says so."""
    monkeypatch.setattr(planner_report, "PART_LIMIT_S", 0.5)
    parts["cost"] = "import time; time.sleep(60)"
    code, table = run(tmp_path, capfd, "--only", "cost")
    assert code == 1
    assert "not over after" in table


def test_without_cases_the_other_parts_run(parts, tmp_path, capfd):
    """What needs logged starts is named as left out, and does not fail the run."""
    code = main(["--out", str(tmp_path)])
    table = capfd.readouterr().out.rpartition("── the planner ──")[2]
    assert code == 0
    assert "left out: accuracy (no cases given)" in table
    assert "left out: rivals (no cases given)" in table
    assert "4 passed, 0 missed" in table


def test_cases_without_configs_are_refused(parts, capsys):
    """One without the other is a slip, not a wish to leave out half."""
    assert main(["cases.json"]) == 2
    assert "CONFIGS" in capsys.readouterr().err


def test_a_part_that_is_not_built_is_missed(tmp_path, capfd):
    """A part without a module is a line in the table, not a traceback."""
    parts = planner_report.PARTS
    try:
        planner_report.PARTS = ("nothing",)
        assert main(["--only", "nothing", "--out", str(tmp_path)]) == 1
    finally:
        planner_report.PARTS = parts
    assert "there is no such command" in capfd.readouterr().out


def test_numeric_bars_are_read_too():
    """The accuracy benchmark gives a value and a limit; a bar without cases was not measured."""
    bar = {"name": "w", "value": 0.05, "limit": 0.1, "at_least": False, "count": 9, "passed": True}
    empty = {**bar, "count": 0, "passed": False}
    found = read_bars({"rows": [1], "bars": [bar, empty]})
    assert found[0] == Bar("w", "0.050", "≤ 0.1", passed=True, cases=9)
    assert found[1].measured.startswith("not measured")
    assert read_bars({"summary": {"bars": [{**bar, "at_least": True}]}})[0].wanted == "≥ 0.1"


def test_the_real_commands_name_their_inputs(tmp_path):
    """Cases and configs go to the parts that need them, and to no other."""
    cases = [tmp_path / "a.json", tmp_path / "b.json"]
    command = planner_report.command("rivals", cases, tmp_path / "m.json", tmp_path / "o.json")
    assert command[1:3] == ["-m", "benchmarks.planner_rivals"]
    assert command[3:6] == [str(cases[0]), str(cases[1]), "--configs"]
    alone = planner_report.command("engine", cases, None, tmp_path / "o.json")
    assert alone[3:] == ["--json", str(tmp_path / "o.json")]


def test_a_table_is_aligned_and_a_part_writes_its_bars(tmp_path):
    """First column to the left, others to the right; the file holds what the summary reads."""
    assert columns([("a", "b"), ("ccc", "10")]) == ["a     b", "ccc  10"]
    path = tmp_path / "deep" / "part.json"
    write_part(path, [{"id": 1}], [Bar("q", "1", "2", passed=False, cases=4)])
    assert read_bars(read_json(path)) == (Bar("q", "1", "2", passed=False, cases=4),)
    assert bar_lines([Bar("q", "1", "2", passed=False)])[1].endswith("MISSED")


@pytest.mark.parametrize("content", [None, "{", "\udcff"])
def test_an_unreadable_file_is_named(tmp_path, capsys, content):
    """A file that is missing or is no JSON ends with code 2 and its name, without a traceback."""
    path = tmp_path / "cases.json"
    if content is not None:
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(SystemExit) as ended:
        read_json(path)
    assert ended.value.code == 2
    assert "cases.json" in capsys.readouterr().err
