"""What does a command line that is wrong tell? The same three answers as every other error."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from rayserve.cli import main
from rayserve.errors import EngineArgumentError, Where
from rayserve.usage import nearby
from tests.bad_specs import ROOT

KEY = "sk-Ab3dEfGh1jKlMn0pQrSt"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with an inventory that is planned, and one that is not."""
    for name, files in {"mine": ("cluster.yml", "plan.yml"), "fresh": ("cluster.yml",)}.items():
        folder = tmp_path / "inventories" / name / "group_vars" / "all"
        folder.mkdir(parents=True)
        for file in files:
            (folder / file).write_text("{}\n")
    (tmp_path / "start.sh").write_text("vllm serve /m\n")
    (tmp_path / "site.yml").write_text("[]\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(*words: str) -> dict[str, str]:
    """The three answers on stderr of a command that ends with 2 and prints nothing else."""
    result = CliRunner().invoke(main, list(words), prog_name="rayserve")
    assert result.exit_code == 2
    assert not result.stdout
    needed, found, do = result.stderr.splitlines()
    parts = {"needed": "error: ", "found": "  found: ", "do": "  do:    "}
    for line, start in zip((needed, found, do), parts.values(), strict=True):
        assert line.startswith(start)
    return {
        part: line.removeprefix(start)
        for (part, start), line in zip(parts.items(), (needed, found, do), strict=True)
    }


@pytest.mark.parametrize(
    "line, needed, found, do",
    [
        ("schema foo", "one of spec, plan, argument-specs, reference for WHAT", "foo", "see `"),
        (
            "plan --dryrun",
            "an option of `rayserve plan`",
            "`--dryrun`",
            "write --dry-run, or see `",
        ),
        ("plan --zzz", "an option of `rayserve plan`", "`--zzz`", "see `rayserve plan --help`"),
        ("paln", "a command of `rayserve`", "`paln`", "write plan, or see `rayserve --help`"),
        ("check hots", "a command of `rayserve check`", "`hots`", "write host, or see `"),
        ("env", "PLAN after `rayserve env`", "nothing", "see `rayserve env --help`"),
        (
            "demo --port 80",
            "a whole number, at least 1024, at most 65535 for --port",
            "80",
            "see `",
        ),
        ("plan a b", "a command line that `rayserve plan` takes", "Got unexpected extra", "see `"),
        ("plan --out", "a command line that `rayserve", "Option '--out' requires", "see `"),
    ],
)
def test_a_wrong_command_line_says_what_was_needed_found_and_to_do(line, needed, found, do):
    """click's refusals have the layout of the toolkit's own, and name what was probably meant."""
    told = refused(*line.split())
    assert told["needed"].startswith(needed)
    assert told["found"].startswith(found)
    assert told["do"].startswith(do)


def test_a_group_without_a_command_shows_its_help(monkeypatch):
    """That is no mistake to explain, but to a program; the exit code stays 2."""
    result = CliRunner().invoke(main, ["check"])
    assert result.exit_code == 2
    assert result.output.startswith("Usage: ")
    monkeypatch.setattr(sys, "argv", ["rayserve", "check", "--json"])
    assert json.loads(CliRunner().invoke(main, ["check"]).stdout)["found"] == "nothing"


@pytest.mark.parametrize(
    "line, do",
    [
        ("env inventories/mine", "name the file in it: inventories/mine/group_vars/all/plan.yml"),
        ("check args inventories/mine", "name the file in it: inventories/mine/group_vars/all/plan.yml"),
        ("check gpu --plan inventories/mine", "name the file in it: inventories/mine/group_vars/all/plan.yml"),
        ("env inventories/fresh", "write it first: rayserve plan inventories/fresh"),
        ("env inventories", "name a plan.yml, as `rayserve plan` writes it"),
        ("convert inventories", "name a file, or - for standard input"),
    ],
)  # fmt: skip
def test_a_folder_in_place_of_a_file_names_the_file_in_it(here, line, do):
    """The file is looked for where an inventory keeps it."""
    told = refused(*line.split())
    assert told["found"] == f"a folder, {line.split()[-1]}"
    assert told["do"].startswith(do)


@pytest.mark.parametrize(
    "line, do",
    [
        ("env nope", "name a plan.yml, as `rayserve plan` writes it"),
        ("check args nope.yml", "name a plan.yml or serve.yml, as `rayserve plan` writes it"),
        ("env inventories/mien", "name inventories/mine/group_vars/all/plan.yml"),
        ("env inventories/mine/plan.yml", "name inventories/mine/group_vars/all/plan.yml"),
        ("deploy inventories/mine/group_vars/all/plan.yaml", "name inventories/mine/group_vars"),
        ("convert nofile", "name a file, or - for standard input"),
        ("convert strat.sh", "name start.sh"),
        ("plan nope", "name the folder or its cluster.yml"),
        ("plan inventories/mien", "write it so: rayserve plan inventories/mine"),
        ("plan mine", "write it so: rayserve plan inventories/mine"),
        ("plan inventories", "name one of its inventories: rayserve plan inventories/fresh or "),
        ("plan .", "name one of its inventories: rayserve plan inventories/fresh or "),
        ("plan strat.sh", "name the folder or its cluster.yml"),
    ],
)
def test_a_misspelt_path_names_the_nearest_that_is_there(here, line, do):
    """Only what would be accepted in its place is named."""
    told = refused(*line.split())
    assert told["found"].startswith("no file at ")
    assert told["do"].startswith(do)


@pytest.mark.parametrize(
    "words",
    [["env", KEY], ["plan", KEY], ["check", "args", KEY], ["schema", KEY], [KEY], ["plan", "a", KEY],
     ["plan", f"--{KEY}"], ["env", "x" * 174 + " " + KEY], ["plan", "x" * 174 + " " + KEY], ["demo", "--port", KEY]],
)  # fmt: skip
def test_a_key_in_a_wrong_place_is_not_repeated(monkeypatch, words):
    """Neither as text nor as JSON, nor the part of it that a cut would leave."""
    shown = CliRunner().invoke(main, words).output
    monkeypatch.setattr(sys, "argv", ["rayserve", *words, "--json"])
    as_json = CliRunner().invoke(main, words).output
    assert json.loads(as_json)["exit_code"] == 2
    for output in (shown, as_json):
        assert output
        assert KEY[3:11] not in output


def test_a_name_cannot_draw_on_the_terminal():
    """Neither a control character nor half a surrogate of a name is printed as it is."""
    assert refused("env", "a\x1b[31mb\udcff")["found"] == "no file at a?[31mb?"


def test_a_folder_that_cannot_be_read_costs_the_hint_alone(tmp_path):
    """What is meant is not told where the system refuses to look."""

    def fails(_path: Path) -> Path | None:
        raise PermissionError

    assert nearby(tmp_path / "nope", fails) is None
    assert nearby(tmp_path / ("x" * 300), lambda path: path if path.is_file() else None) is None


def test_a_verdict_on_arguments_is_told_as_an_error(here, monkeypatch):
    """`check args` prints what its child refused with the place in the file, and its exit code."""
    error = EngineArgumentError("a", found="b", do="c", where=Where("plan.yml", 3, "x.y"))
    monkeypatch.setattr("rayserve.serving.argcheck.check", lambda _path: error.as_dict())
    told = refused("check", "args", "inventories/mine/group_vars/all/plan.yml")
    assert told == {"needed": "plan.yml:3 (x.y): a", "found": "b", "do": "c"}


def test_help_says_which_argument_may_be_left_out():
    """`convert` reads standard input where no file is named."""
    usage = CliRunner().invoke(main, ["convert", "--help"]).output.splitlines()[0]
    assert usage.endswith("[OPTIONS] [FILE]")


def test_a_file_of_another_kind_is_not_what_was_meant(tmp_path):
    """A missing plan.yml below a missing folder is not the file beside it that sounds like the folder."""
    (tmp_path / "services").write_text("")
    result = CliRunner().invoke(main, ["env", str(tmp_path / "rayserve" / "plan.yml")])
    assert result.exit_code == 2
    assert "services" not in result.output.partition("do:")[2]


def test_an_option_without_its_value_names_the_help_of_its_command():
    """The help of the command that was called lists the option, that of the program does not."""
    assert refused("plan", "x", "--html")["do"] == "see `rayserve plan --help`"


def test_how_many_inventories_are_not_named_is_said(here, monkeypatch):
    """A long list of inventories is cut, and the rest counted."""
    for number in range(9):
        shutil.copytree(here / "inventories" / "mine", here / "inventories" / f"n{number}")
    many = len(list((here / "inventories").iterdir()))
    told = refused("plan", "inventories")
    assert told["do"].count("inventories/") == 5
    assert f"or one of {many - 5} more" in told["do"]


def test_a_config_is_named_as_written_and_where_it_was_looked_for(here):
    """`config` is relative to cluster.yml: the error says where that is, without `..`."""
    example = ROOT / "inventories" / "example" / "group_vars" / "all" / "cluster.yml"
    spec = here / "inventories" / "fresh" / "group_vars" / "all" / "cluster.yml"
    text = example.read_text(encoding="utf-8").replace("../../model/", "../")
    spec.write_text(text, encoding="utf-8")
    found = refused("plan", "inventories/fresh")["found"]
    assert found == ("no file at ../config.json, which is inventories/fresh/group_vars/config.json")
    spec.with_name("config.json").mkdir()
    spec.write_text(text.replace("../config.json", "../all/config.json"), encoding="utf-8")
    found = refused("plan", "inventories/fresh")["found"]
    assert found == "inventories/fresh/group_vars/all/config.json: a folder"
