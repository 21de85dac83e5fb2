"""How the results of all stages are added up."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.run_tests import MOST_WORKERS, Count, main, pytest_command, read_results

RESULTS = (
    '<?xml version="1.0"?><testsuites>'
    '<testsuite name="pytest" errors="1" failures="2" skipped="3" tests="10" time="0.1"/>'
    "</testsuites>"
)


def test_the_counts_of_a_stage_come_from_its_results(tmp_path):
    """What neither failed, nor broke, nor was skipped has passed."""
    (tmp_path / "unit.xml").write_text(RESULTS)
    assert read_results(tmp_path / "unit.xml") == Count(passed=4, failed=3, skipped=3)


def test_a_stage_without_results_has_failed(tmp_path):
    """A pytest that died before it wrote anything is not taken for one without tests."""
    assert read_results(tmp_path / "absent.xml") == Count(failed=1)


def test_stages_add_up_to_one_closing_line():
    """The last line is the sum, in the words of test runners."""
    assert str(Count(1, 0, 2) + Count(3, 1, 0)) == "4 passed, 1 failed, 2 skipped"


def test_an_unknown_stage_is_refused(capsys):
    """A misspelt stage is an error, not an empty success."""
    assert main(["units"]) == 2
    assert "lint, unit, contract" in capsys.readouterr().err


@pytest.mark.parametrize("cpus, workers", [(2, 2), (MOST_WORKERS + 1, MOST_WORKERS)])
def test_unit_tests_are_spread_over_the_cpus(cpus, workers):
    """The unit stage has a worker for each CPU, up to a bound."""
    assert f"--numprocesses={workers}" in pytest_command("unit", Path("unit.xml"), cpus)


@pytest.mark.parametrize("stage, cpus", [("unit", 1), ("contract", 8), ("engine", 8)])
def test_other_stages_and_a_single_cpu_have_no_workers(stage, cpus):
    """Engines take all CPUs themselves, and one CPU has nothing to spread over."""
    command = pytest_command(stage, Path("results.xml"), cpus)
    assert not [word for word in command if word.startswith(("--numprocesses", "--dist"))]
    assert command[:2] == ("pytest", f"tests/{stage}")
