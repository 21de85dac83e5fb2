"""How a command ends where its output cannot be written."""

from __future__ import annotations

import os
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
    "check": ["check", "install"],
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
