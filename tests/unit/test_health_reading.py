"""Reading a host: commands that hang, texts that are none, what the command line makes of it."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from rayserve.cli import main
from rayserve.health import gate, wants
from rayserve.health.checks.engine import check_alive
from rayserve.health.checks.fabric import BandwidthFact
from rayserve.health.checks.kernel_log import SEVERITY, STATUS, STEPS, xids
from rayserve.health.facts import engine as engine_module
from rayserve.health.facts import run as run_module
from rayserve.health.facts.gpu import parse_cuda
from rayserve.health.facts.host import owner, parse_mdstat
from rayserve.health.facts.pci import parse_acs
from rayserve.health.facts.run import Output, run
from rayserve.health.readings.kernel_log import faults
from rayserve.health.readings.nvidia_smi import UnreadableError, parse_matrix, parse_query
from rayserve.health.results import Check, CheckResult, Status, metrics, render, worst
from rayserve.inventory import read_plan
from tests.bad_specs import ROOT

CHECK = Check("example", "what is wanted", "driver")


def test_a_command_that_hangs_is_killed_with_its_children() -> None:
    """A command beyond its limit is over at once, and so is what it has started."""
    script = "import subprocess, time; subprocess.run(['sleep', '60'])"
    began = time.monotonic()
    answer = run([sys.executable, "-c", script], 0.5)
    assert answer.ending == "no answer within 0.5 s"
    assert time.monotonic() - began < 5


def test_a_command_that_is_missing_is_said_to_be() -> None:
    """No such program is an ending, not an exception."""
    assert run(["no-such-program-at-all"], 1).ending == "no-such-program-at-all is not installed"


@pytest.mark.parametrize(
    "script, ending",
    [
        ("raise SystemExit(3)", "exit code 3"),
        ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
        ("print('fine')", ""),
    ],
)
def test_how_a_command_ended_is_said(script: str, ending: str) -> None:
    """Exit codes and signals are named."""
    assert run([sys.executable, "-c", script], 20).ending == ending


def test_a_command_speaks_english() -> None:
    """The language of the host does not change what is parsed."""
    answer = run([sys.executable, "-c", "import os; print(os.environ['LC_ALL'])"], 20)
    assert answer.text.strip() == "C"


@given(st.text(max_size=300))
def test_no_text_breaks_a_reader(text: str) -> None:
    """Whatever a tool prints, a reader gives facts or says that it cannot read it."""
    cuda = parse_cuda(Output(text))
    assert cuda is None or cuda.ending or "devices" in text
    assert all(fault.text in text for fault in faults(text.splitlines()))
    assert all(array.split(": ")[0] in text for array in parse_mdstat(text))
    assert all(bridge in text for bridge in parse_acs(text) or ())
    for read in (parse_query, parse_matrix):
        try:
            told = read(text) is not None
        except UnreadableError as error:
            told = bool(str(error))
        assert told


@given(st.from_regex(r"NVRM: Xid \(PCI:0000:[0-9a-f]{2}:00\): [0-9]{1,5}, .{0,40}", fullmatch=True))
def test_every_xid_line_is_one_fault(line: str) -> None:
    """A line of the driver's form gives one fault with its code, whatever follows it."""
    found = list(faults([line]))
    code = line.partition("): ")[2].partition(",")[0]
    assert [fault.code for fault in found] == [int(code)]


def test_the_table_of_codes_is_whole() -> None:
    """Every code has an action with a step and a verdict; those that depend name on what."""
    assert set(STEPS) == set(STATUS) == set(SEVERITY)
    for code, meaning in xids().items():
        assert meaning.action in STEPS, code
        assert meaning.title
        assert meaning.see or meaning.action != "look", code


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    """algbw x 2 (n - 1) / n: 4 GiB among 8 ranks in 32.32 ms are 232.5 GB/s (nccl-tests issue 175)."""
    assert BandwidthFact(8, 4 * 2**30, 0.03232).bus_gb_s == pytest.approx(232.56, abs=0.05)


def test_the_worst_verdict_counts() -> None:
    """fail is worse than warn, warn than pass, pass than skip."""
    results = [CHECK.skipped("no"), CHECK.passed("a"), CHECK.warned("b", why="w", do="d")]
    assert worst([]) is Status.SKIP
    assert worst(results) is Status.WARN
    assert worst([*results, CHECK.failed("c", why="w", do="d")]) is Status.FAIL


def test_metrics_are_in_prometheus_text_format() -> None:
    """Each check is a sample with its verdict as a number, and quotes are escaped."""
    text = metrics([CHECK.failed("x", why="w", do="d")], host='a"b', now_s=12.5)
    assert 'rayserve_check_status{host="a\\"b",check="example"} 3\n' in text
    assert 'rayserve_check_time_seconds{host="a\\"b"} 12.500\n' in text
    assert text.endswith("\n")


def test_a_fault_shows_its_page() -> None:
    """What a person reads names what was expected, why, what to do, and where more stands."""
    text = render([CHECK.failed("seen", why="because", do="this")])
    for part in (
        "seen",
        "what is wanted",
        "because",
        "this",
        "docs/runbooks/driver.md",
        "1 failed",
    ):
        assert part in text


def test_checks_skipped_for_one_reason_share_a_line() -> None:
    """Each is named once, with its reason, at the place of the first; the count stays."""
    names = ("one", "two", "three")
    one, two, three = (Check(name, "it").skipped("no GPU") for name in names)
    results = [one, CHECK.passed("fine"), two, Check("four", "it").skipped("no plan"), three]
    lines = render(results).splitlines()
    assert lines[0] == "skip  one, two, three: no GPU"
    assert [line.split()[0] for line in lines] == ["skip", "pass", "skip", "5"]
    assert lines[2] == "skip  four: no plan"
    assert lines[3].endswith("4 skipped")


@pytest.mark.parametrize("health", [0, 503])
def test_a_dead_engine_names_the_logs_of_the_ray_that_runs_here(
    monkeypatch: pytest.MonkeyPatch, health: int
) -> None:
    """RAY_TMPDIR moves the replica's log, and the advice follows it."""
    monkeypatch.setenv("RAY_TMPDIR", "/var/elsewhere")
    monkeypatch.setattr(engine_module, "read_units", lambda _run: {})
    monkeypatch.setattr(engine_module, "_status", lambda *_: (health, "refused"))
    wanted = wants.wanted_of(read_plan(str(ROOT / "inventories/demo/group_vars/all/plan.yml")))
    alive = check_alive(engine_module.read_engine_facts(wanted))
    assert alive.do.endswith("/var/elsewhere/ray/session_latest/logs/serve")


@pytest.fixture
def verdict(monkeypatch: pytest.MonkeyPatch) -> list[CheckResult]:
    """What `rayserve check host` finds; a test changes it."""
    found = [CHECK.passed("fine")]
    monkeypatch.setitem(gate.ROOMS, "host", (lambda _: found,))
    return found


def test_the_exit_code_follows_the_worst_verdict(verdict: list[CheckResult]) -> None:
    """0 while nothing fails, also with a warning; 4 when a check fails."""
    runner = CliRunner()
    assert runner.invoke(main, ["check", "host"]).exit_code == 0
    verdict.append(CHECK.warned("w", why="w", do="d"))
    assert runner.invoke(main, ["check", "host"]).exit_code == 0
    verdict.append(Check("other", "x").failed("f", why="w", do="d"))
    assert runner.invoke(main, ["check", "host"]).exit_code == 4


def test_the_textfile_is_whole_and_readable(verdict: list[CheckResult], tmp_path: Path) -> None:
    """--textfile writes the metrics for another user, and leaves nothing else in the folder."""
    del verdict
    path = tmp_path / "rayserve.prom"
    done = CliRunner().invoke(main, ["check", "host", "--textfile", str(path), "--json"])
    assert (done.exit_code, json.loads(done.stdout)["status"]) == (0, "pass")
    assert 'check="example"} 0' in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_takes_no_textfile_is_a_clear_error(verdict: list[CheckResult]) -> None:
    """Exit code 4, and the message names the path."""
    del verdict
    done = CliRunner().invoke(main, ["check", "host", "--textfile", "/no/such/folder/x.prom"])
    assert done.exit_code == 4
    assert "/no/such/folder/x.prom" in done.stderr


@pytest.mark.parametrize("kind", ["a pipe", "a plan"])
def test_a_textfile_takes_the_place_of_metrics_only(
    verdict: list[CheckResult], tmp_path: Path, kind: str
) -> None:
    """A pipe, a device or another file is not replaced."""
    del verdict
    path = tmp_path / "x"
    if kind == "a pipe":
        os.mkfifo(path)
    else:
        path.write_text("rayserve_plan: {}\n")
    before = path.stat()
    done = CliRunner().invoke(main, ["check", "host", "--textfile", str(path)])
    assert done.exit_code in (2, 4)
    assert (path.stat().st_ino, path.stat().st_mode) == (before.st_ino, before.st_mode)


def test_the_second_textfile_takes_the_place_of_the_first(
    verdict: list[CheckResult], tmp_path: Path
) -> None:
    """A timer writes the same file again and again."""
    del verdict
    command = ["check", "host", "--textfile", str(tmp_path / "x.prom")]
    assert [CliRunner().invoke(main, command).exit_code for _ in range(2)] == [0, 0]


@pytest.mark.parametrize(
    "name, command, known_as",
    [
        ("python", ["/v/bin/python", "-u", "/v/ray/dashboard/dashboard.py", "--port=8265"],
         "python /v/ray/dashboard/dashboard.py"),
        ("python3.11", ["python3.11", "-m", "http.server"], "python3.11"),
        ("python", ["ray::IDLE"], "python"),
        ("nginx", ["nginx: master process", "/etc/x.py"], "nginx"),
        ("raylet", [], "raylet"),
    ],
)  # fmt: skip
def test_an_interpreter_is_known_by_its_script(name, command, known_as):
    """Who holds a port is the script that a Python runs; every other process has a name of its own."""
    assert owner(name, command) == known_as


def test_a_process_that_outlives_its_kill_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where even SIGKILL does not end a command in time, the answer comes all the same, without a warning."""
    monkeypatch.setattr(run_module, "AFTER_KILL_S", 0.0)
    monkeypatch.setattr(os, "killpg", lambda *_: None)
    began = time.monotonic()
    answer = run([sys.executable, "-c", "import time; time.sleep(8)"], 0.2)
    assert answer.ending == "no answer within 0.2 s"
    assert time.monotonic() - began < 5
    gc.collect()
    monkeypatch.undo()
    for process in run_module._left_behind:
        process.kill()
        process.wait()
    assert run_module._left_behind
