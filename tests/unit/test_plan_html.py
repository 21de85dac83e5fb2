"""Does `--html` write a page beside the plan, and nothing in the place of another file?"""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from rayserve import inventory, planning
from rayserve.cli import main
from rayserve.errors import UsageError
from rayserve.page import path_of, text_of
from rayserve.planner.memory.ranges import GIB
from tests.bad_specs import ROOT


@pytest.fixture
def spec(tmp_path):
    """A copy of the example's spec and config."""
    example = ROOT / "inventories" / "example"
    (tmp_path / "model").mkdir()
    (tmp_path / "env" / "all").mkdir(parents=True)
    text = (example / "group_vars" / "all" / "cluster.yml").read_text()
    config = (example / "model" / "config.json").read_text()
    (tmp_path / "model" / "config.json").write_text(config)
    (tmp_path / "env" / "all" / "cluster.yml").write_text(text)
    return tmp_path / "env" / "all" / "cluster.yml"


def run(*args: object):
    """Run the command in this process."""
    return CliRunner().invoke(main, ["plan", *map(str, args)])


def test_html_writes_a_page_beside_the_plan(spec, tmp_path):
    """--html writes the page too, says so, and a second time finds it unchanged."""
    target = tmp_path / "plan.html"
    first = run(spec, "--html", target)
    assert first.exit_code == 0, first.output
    assert str(target) in first.output
    text = target.read_text("utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert text.count("<svg") == 3
    assert "unchanged" in run(spec, "--html", target).output
    assert (spec.parent / "plan.yml").is_file()


def test_html_is_written_for_a_plan_that_did_not_change(spec, tmp_path):
    """The plan on disk stays as it is; only the page is new."""
    run(spec)
    before = (spec.parent / "plan.yml").stat().st_mtime_ns
    report = json.loads(run(spec, "--html", tmp_path / "p.html", "--json").output)
    assert report["changed"] == [str(tmp_path / "p.html")]
    assert (spec.parent / "plan.yml").stat().st_mtime_ns == before


@pytest.mark.parametrize("option", ["--dry-run", "--check"])
def test_a_dry_run_and_a_check_write_no_page(spec, tmp_path, option):
    """What writes nothing writes no page either."""
    run(spec)
    result = run(spec, option, "--html", tmp_path / "p.html")
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "p.html").exists()


@pytest.mark.parametrize(
    "name, word",
    [
        ("no/such/folder/p.html", "no folder"),
        ("", "folder"),
        (".", "folder"),
        ("/dev/null", "no regular file"),
        ("cluster.yml", "is read or written"),
        ("plan.yml", "is read or written"),
        ("link.html", "is read or written"),
        ("a\x00b", "null"),
        ("x" * 300, "too long"),
    ],
)
def test_a_page_takes_no_other_places(spec, monkeypatch, name, word):
    """A folder that is not there, a device, or the spec itself is refused before anything is written."""
    monkeypatch.chdir(spec.parent)
    (spec.parent / "link.html").symlink_to(spec)
    files = inventory.locate(str(spec), None)
    with pytest.raises(UsageError, match="a file for the page") as caught:
        path_of(name, planning.make_plan(files))
    assert word in caught.value.found
    assert run("cluster.yml", "--html", name).exit_code == 2 or "\x00" in name
    assert not (spec.parent / "plan.yml").exists()
    assert spec.read_text().startswith("#")


def test_a_page_that_cannot_be_written_leaves_everything(spec, tmp_path, monkeypatch):
    """A full disk at the page costs neither plan nor page: all files are as they were."""
    target = tmp_path / "p.html"
    target.write_text("<!DOCTYPE html>old")
    real = inventory._write

    def full(path, data):
        if b"<html" in data:
            raise OSError(28, "No space left on device")
        real(path, data)

    monkeypatch.setattr(inventory, "_write", full)
    result = run(spec, "--html", target)
    assert result.exit_code == 4
    assert "No space left" in result.output
    assert target.read_text() == "<!DOCTYPE html>old"
    assert not (spec.parent / "plan.yml").exists()


def test_a_page_takes_the_place_of_a_page_only(spec, tmp_path):
    """A file that is something else, as a config.json, is kept, and nothing is written."""
    other = tmp_path / "other.json"
    other.write_text("{}")
    result = run(spec, "--html", other)
    assert result.exit_code == 2
    assert "no page" in result.output
    assert other.read_text() == "{}"


def test_a_page_compares_the_candidates():
    """With `model.candidates` the page ranks them, and its curves are those of what is served."""
    files = inventory.locate(str(ROOT / "tests" / "cases" / "candidates" / "cluster.yml"), None)
    planned = planning.make_plan(files)
    plan, text = planned.plan, text_of(planned, files.spec.name)
    assert "Candidates" in text
    assert "Why in this order" in text
    assert text.count('class="strong"') == 1
    for name in ("bf16", "fp8", "w8a8", "w4a16"):
        assert f">{name}" in text
    weights = f"{plan.memory.weights_bytes / GIB:.1f} GiB"
    assert weights in text


def test_candidates_and_html_are_one_or_the_other(tmp_path):
    """--candidates writes nothing, so it takes no file."""
    case = ROOT / "tests" / "cases" / "candidates" / "cluster.yml"
    result = run(case, "--candidates", "--html", tmp_path / "p.html")
    assert result.exit_code == 2
    assert "--candidates without options about files" in result.output
