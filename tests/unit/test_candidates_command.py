"""Does `rayserve plan --candidates` print, write and end as it should?"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from rayserve import cli, inventory, planning
from rayserve.plan import parse_plan
from rayserve.planner.candidates import (
    CandidateRow,
    Comparison,
)
from tests.bad_specs import ROOT
from tests.unit.compared import CASE, CONFIGS
from tests.yaml_text import load_yaml


# ── on the command line ───────────────────────────────────────────────────────────────────────────
@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the case."""
    shutil.copytree(CASE, tmp_path / "case")
    return tmp_path / "case"


def run(*words: str | Path):
    """The command with these words."""
    return CliRunner().invoke(cli.main, [str(word) for word in words])


def test_the_command_prints_the_table_and_writes_nothing(folder):
    """`rayserve plan --candidates` shows every candidate, reasons and sources, and leaves no file."""
    result = run("plan", "--candidates", folder)
    assert result.exit_code == 0
    for name in CONFIGS:
        assert name in result.output
    assert "arXiv 2411.02355" in result.output
    assert sorted(path.name for path in folder.iterdir()) == ["cluster.yml", "configs"]


def test_the_page_shows_what_the_command_prints(monkeypatch):
    """docs/candidates.md has the real output; UPDATE_GOLDEN=1 writes it anew."""
    page = ROOT / "docs" / "candidates.md"
    head, _, rest = page.read_text().partition("```\n")
    _, _, tail = rest.partition("```\n")
    monkeypatch.chdir(ROOT)
    text = f"{head}```\n{run('plan', '--candidates', 'tests/cases/candidates').output}```\n{tail}"
    if os.environ.get("UPDATE_GOLDEN"):
        page.write_text(text)
    assert page.read_text() == text


def test_the_page_names_every_key_of_a_row():
    """docs/candidates.md describes the JSON in full."""
    text = (ROOT / "docs" / "candidates.md").read_text()
    for model in (CandidateRow, Comparison):
        assert [name for name in model.model_fields if f"`{name}`" not in text] == []


def test_the_command_gives_the_same_as_json(folder):
    """`--json` is one object without nulls, the rows best first."""
    result = run("plan", "--candidates", "--json", folder)
    data = json.loads(result.output)
    assert [one["rank"] for one in data["rows"]] == [1, 2, 3, 0]
    assert data["rows"][-1]["refusal"]["error"] == "DoesNotFitError"
    assert "null" not in result.output


def test_planning_without_a_checkpoint_serves_the_best(folder):
    """`rayserve plan` picks, writes the plan of the pick, and its digest is that of the pick's config."""
    result = run("plan", folder)
    assert result.exit_code == 0, result.output
    plan = parse_plan(load_yaml((folder / "plan.yml").read_text()), "plan.yml")
    first = planning.compare_candidates(inventory.locate(str(folder), None)).rows[0]
    assert plan.replica.model == first.checkpoint
    assert [item.name for item in plan.replica.content] == [f"{first.checkpoint}/config.json"]
    assert plan.choices[0].value == first.name
    assert run("plan", "--check", folder).exit_code == 0


def test_two_revisions_of_one_model_keep_their_own_digests(folder):
    """Candidates that share an id differ by their config.json, and the plan has that of the pick."""
    spec = folder / "cluster.yml"
    lines = [
        line for line in spec.read_text().splitlines() if "- {name: " not in line or "gpu" in line
    ]
    at = next(index for index, line in enumerate(lines) if "candidates:" in line) + 1
    for name, revision in (("w4a16", "a" * 40), ("fp8", "b" * 40)):
        lines.insert(
            at,
            f"      - {{name: {name}, hf_id: some/model, revision: {revision}, "
            f"config: configs/{name}.json}}",
        )
    spec.write_text("\n".join(lines) + "\n")
    assert run("plan", folder).exit_code == 0
    plan = parse_plan(load_yaml((folder / "plan.yml").read_text()), "plan.yml")
    assert plan.choices[0].value == "w4a16"
    picked = (folder / "configs" / "w4a16.json").read_bytes()
    assert [item.value for item in plan.replica.content] == [hashlib.sha256(picked).hexdigest()]
    assert plan.replica.engine_arguments()["revision"] == "a" * 40


def test_where_nothing_fits_the_table_stands_and_the_exit_code_is_3(folder):
    """All candidates failing ends with 3, with the table; planning too, with the reasons."""
    spec = folder / "cluster.yml"
    spec.write_text(spec.read_text().replace("gpus_per_host: 8", "gpus_per_host: 1"))
    result = run("plan", "--candidates", folder)
    assert result.exit_code == 3
    assert result.output.count("does not fit") >= 4
    planned = run("plan", folder)
    assert planned.exit_code == 3
    assert not (folder / "plan.yml").exists()


def test_a_broken_file_is_told_in_its_row(folder):
    """Truncated JSON and a missing file are rows; the pick is made among the rest."""
    (folder / "configs" / "fp8.json").write_text('{"architectures": [')
    (folder / "configs" / "w8a8.json").unlink()
    result = run("plan", "--candidates", folder)
    assert result.exit_code == 0
    assert "fp8    refused: JSON; found" in result.output
    assert "no file at configs/w8a8.json" in result.output
    assert run("plan", folder).exit_code == 0


def test_without_candidates_there_is_nothing_to_compare(folder):
    """`--candidates` on a spec without any says which key to add; with --check it is a usage error."""
    result = run("plan", "--candidates", ROOT / "inventories" / "example")
    assert result.exit_code == 2
    assert "model.candidates" in result.output
    assert run("plan", "--candidates", "--check", folder).exit_code == 2


def test_comparing_four_checkpoints_imports_nothing_heavy():
    """No engine is imported to rank checkpoints."""
    code = (
        "import sys\n"
        "from rayserve.cli import main\n"
        f"main(['plan', '--candidates', {str(CASE)!r}], standalone_mode=False)\n"
        "print([name for name in ('ray', 'torch', 'transformers', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[]"
