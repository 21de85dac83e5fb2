"""Are the ledgers beside a spec collected once, and refused where they are none?"""

from __future__ import annotations

import json
import os
import shutil

import pytest

from rayserve import inventory
from rayserve.plan import parse_plan
from tests.command import run
from tests.golden_specs import GOLDEN, plan_of
from tests.start_lines import lines, start_line
from tests.yaml_text import load_yaml

SPEC = GOLDEN / "one-host-w4a16.yml"


PLAN = plan_of(SPEC)


def beside(example):
    """The folder of spec and plan."""
    return example / "group_vars" / "all"


def planned(example):
    """The plan on disk."""
    path = beside(example) / "plan.yml"
    return parse_plan(load_yaml(path.read_text()), str(path))


def test_a_plan_with_starts_is_the_same_wherever_it_is_made(example, tmp_path):
    """--starts keeps the comparable lines beside the spec; from then on they are enough."""
    host = tmp_path / "host.jsonl"
    host.write_bytes(lines(start_line(planned(example)), start_line(PLAN, vllm_version="0.1")))
    before = planned(example)
    result = run("plan", example, "--starts", host)
    assert result.exit_code == 0, result.output
    assert "1 comparable starts, 1 of them new; not used: 1" in result.output
    assert "wrote" in result.output
    assert len((beside(example) / "starts.jsonl").read_bytes().splitlines()) == 1
    after = planned(example)
    assert after.memory is not None
    assert after.memory.calibrated
    assert after.revision == before.revision
    host.unlink()
    assert run("plan", example, "--check").exit_code == 0
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(example, elsewhere)
    assert run("plan", elsewhere, "--check").exit_code == 0
    (beside(example) / "starts.jsonl").unlink()
    assert run("plan", example, "--check").exit_code == 2


def test_starts_are_collected_once(example, tmp_path):
    """The same file again, or twice, adds nothing, and more hosts add theirs."""
    host = tmp_path / "host.jsonl"
    host.write_bytes(lines(start_line(planned(example))))
    assert run("plan", example, "--starts", host, "--starts", host).exit_code == 0
    assert "unchanged" in run("plan", example, "--starts", host).output
    more = tmp_path / "more.jsonl"
    more.write_bytes(lines(start_line(planned(example), started_at=1.8e9)))
    report = json.loads(run("plan", example, "--starts", more, "--json").output)
    assert report["plan"]["start"]["starts"] == 2
    assert report["starts"] == [f"{more}: 1 comparable starts, 1 of them new"]
    assert any(path.endswith("starts.jsonl") for path in report["changed"])


def test_a_dry_run_keeps_no_starts(example, tmp_path):
    """It shows the calibrated plan, and writes nothing."""
    host = tmp_path / "host.jsonl"
    host.write_bytes(lines(start_line(planned(example))))
    result = run("plan", example, "--starts", host, "--dry-run")
    assert "by real starts" in result.output
    assert not (beside(example) / "starts.jsonl").exists()


def loop(path):
    """A link to itself."""
    path.symlink_to(path)


HOSTILE = {
    "missing": (lambda path: None, "No such file"),
    "a folder": (lambda path: path.mkdir(), "a folder"),
    "a loop of links": (loop, "symbolic links"),
    "a pipe": (os.mkfifo, "regular file"),
    "prose": (lambda path: path.write_text("# Starts\n\nNone yet.\n"), "line 1: not JSON"),
    "empty": (lambda path: path.touch(), "an empty file"),
    "huge": (lambda path: path.write_bytes(b"x" * (inventory.MAX_BYTES + 1)), "4 MiB"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_file_that_is_no_ledger_is_refused(example, tmp_path, case):
    """One clear error, exit code 2, and nothing is written."""
    make, word = HOSTILE[case]
    path = tmp_path / "bad"
    make(path)
    result = run("plan", example, "--starts", path)
    assert result.exit_code == 2, result.output
    assert word in result.output
    assert "Traceback" not in result.output
    assert not (beside(example) / "starts.jsonl").exists()


def test_a_loop_beside_the_spec_is_refused(example):
    """The file that is meant to be there cannot be read: no plan leaves it out silently."""
    loop(beside(example) / "starts.jsonl")
    result = run("plan", example)
    assert result.exit_code == 2
    assert "symbolic links" in result.output


def test_damaged_lines_beside_the_spec_are_noted(example):
    """They are no evidence; the plan says how many and why, and is made all the same."""
    good = lines(start_line(planned(example)))
    (beside(example) / "starts.jsonl").write_bytes(b"\x00\n{}\n" + good + good[:100])
    result = run("plan", example)
    assert result.exit_code == 0, result.output
    (note,) = [note for note in planned(example).notes if note.startswith("starts.jsonl")]
    assert "1 of 4 starts are comparable" in note
    assert "3 that cannot be believed (line 1: not JSON" in note
