"""How the results of all stages are added up."""

from __future__ import annotations

from scripts.run_tests import Count, main, read_results

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
