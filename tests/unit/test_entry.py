"""How a command ends where its output cannot be written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "help": ["--help"],
    "plan": ["plan", "--dry-run", "inventories/demo"],
    "plan-json": ["plan", "--dry-run", "--json", "inventories/demo"],
    "convert": ["convert", "-"],
    "check": ["check", "fabric"],
    "schema": ["schema", "reference"],
    "wrong-json": ["nosuch", "--json"],
}
each_command = pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
each_buffering = pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
PASTED = "vllm serve meta-llama/Llama-3.1-8B-Instruct --tensor-parallel-size 2"


def run(words, stdout, unbuffered="") -> subprocess.CompletedProcess[str]:
    """A `rayserve` command whose output goes to `stdout`."""
    return subprocess.run(
        [sys.executable, "-m", "rayserve.cli", *words],
        cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": unbuffered}, input=PASTED,
        stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, timeout=60,
    )  # fmt: skip


@each_command
@each_buffering
def test_a_reader_that_went_away_ends_a_command_quietly(words, unbuffered):
    """Behind a pipe that nobody reads, the code is that of SIGPIPE and stderr stays empty."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = run(words, writing, unbuffered)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@each_command
@each_buffering
def test_a_full_disk_behind_stdout_is_one_message(words, unbuffered):
    """Where stdout takes nothing, stderr says so once and the exit code is 1."""
    with Path("/dev/full").open("w") as full:
        done = run(words, full, unbuffered)
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert lines[0] == "error: standard output that can be written"
    assert lines[1] == "  found: No space left on device"
    assert len(lines) == 3


def test_the_files_of_a_plan_are_written_though_nobody_reads_what_it_prints(tmp_path):
    """`rayserve plan | true` has written both files whole."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = run(["plan", "inventories/demo", "--out", str(tmp_path)], writing)
    finally:
        os.close(writing)
    assert done.returncode == 141
    again = run(["plan", "--check", "inventories/demo", "--out", str(tmp_path)], subprocess.PIPE)
    assert again.returncode == 0


@pytest.mark.parametrize("words, code", [(["schema", "spec"], 0), (["nosuch", "--json"], 2)])
def test_a_stdout_that_was_never_open_changes_no_exit_code(words, code):
    """A command started with stdout closed does its work and prints nothing."""
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "rayserve.cli", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (code, b"", b"")


def test_an_unreadable_stderr_leaves_the_exit_code():
    """Where the message itself cannot be printed, the code still tells what happened."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "rayserve.cli", "plan", "nosuch"],
            cwd=ROOT, stderr=full, check=False, timeout=60,
        )  # fmt: skip
    assert done.returncode == 2


@pytest.mark.parametrize(
    "words, code",
    [(["plan", "nosuch"], 2), (["nosuch"], 2), (["plan", "--bogus"], 2), (["env", "nosuch"], 2)],
)
@pytest.mark.parametrize("end", ["full", "no-reader", "closed"])
def test_a_stderr_that_cannot_be_written_leaves_the_exit_code(words, code, end):
    """A full disk, a reader that went away or a closed stderr: the code tells what happened."""
    to = {"full": "2>/dev/full", "closed": "2>&-", "no-reader": "2>&9 9>&-"}[end]
    reading, writing = os.pipe()
    os.close(reading)
    command = ["bash", "-c", f'exec "$@" {to}'.replace("&9 9>&-", f"&{writing}"), "bash"]
    done = subprocess.run(
        [*command, sys.executable, "-m", "rayserve.cli", *words],
        cwd=ROOT, stdout=subprocess.PIPE, check=False, timeout=60, pass_fds=[writing],
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, done.stdout) == (code, b"")


def test_progress_that_nobody_reads_changes_nothing(tmp_path):
    """What a command says on the way, and JSON on stdout, come out the same without a stderr."""
    code = (
        "import click\n"
        "from rayserve.entry import Commands\n"
        "@click.group(cls=Commands)\n"
        "def group(): pass\n"
        "@group.command()\n"
        "def work():\n"
        "    for _ in range(3000): click.echo('fetching config.json', err=True)\n"
        "    click.echo('done')\n"
        "group()\n"
    )
    for end in ("2>/dev/full", "2>&-"):
        done = subprocess.run(
            ["bash", "-c", f'exec "$@" {end}', "bash", sys.executable, "-c", code, "work"],
            cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, "done\n")


def test_a_working_folder_that_was_removed_is_told(tmp_path):
    """A relative name in a folder that is gone is a wrong command line; a full one still works."""
    gone = tmp_path / "gone"
    script = f'mkdir {gone} && cd {gone} && rmdir {gone} && exec "$@"'
    command = ["sh", "-c", script, "sh", sys.executable, "-m", "rayserve.cli", "plan", "--dry-run"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    shutil.copytree(ROOT / "inventories" / "example", tmp_path / "example")
    for name, code in (("../example", 2), (str(tmp_path / "example"), 0)):
        done = subprocess.run(
            [*command, name], env=environment, capture_output=True, text=True, check=False,
            timeout=60,
        )  # fmt: skip
        assert done.returncode == code
        assert ("a working folder that is there" in done.stderr) is bool(code)


@pytest.mark.parametrize("words", [["convert"], ["env"], ["plan"], ["check", "args"]], ids=str)
def test_a_file_whose_reading_fails_is_a_wrong_input(words):
    """A file that opens and cannot be read is one message with code 2."""
    done = subprocess.run(
        [sys.executable, "-m", "rayserve.cli", *words, "/proc/self/mem"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "Input/output error" in done.stderr


def test_an_empty_name_of_a_config_is_no_option_left_out():
    """`convert --config ""` is refused, as any name that is no file."""
    done = run(["convert", "-", "--config", ""], subprocess.PIPE)
    assert done.returncode == 2


def test_a_stdin_that_was_never_open_is_empty():
    """`convert` without a stdin tells that there is no command line, with code 2."""
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-m", "rayserve.cli", "convert"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "found:" in done.stderr
