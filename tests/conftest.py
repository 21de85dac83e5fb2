"""What holds for every test: markers by folder, unit tests without warnings, no unlisted skip in CI."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Time says nothing about an example: machines are slow and shared.
settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any-machine")

TESTS = Path(__file__).parent
MARKED_FOLDERS = ("contract", "engine", "hosts")

_skipped = pytest.StashKey[list[tuple[str, str]]]()


def pytest_configure(config):
    """Start the list of skipped tests: (where, reason)."""
    config.stash[_skipped] = []
    config.pluginmanager.register(SkipRecorder(config.stash[_skipped]))


def pytest_collection_modifyitems(items):
    """Mark tests by their folder; in tests/unit every warning is an error."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in MARKED_FOLDERS:
            item.add_marker(folder)
        elif folder == "unit":
            item.add_marker(pytest.mark.filterwarnings("error"), append=False)


class SkipRecorder:
    """Remembers every skip, of a test and of a whole module alike."""

    def __init__(self, skipped: list[tuple[str, str]]) -> None:
        self.skipped = skipped

    def pytest_runtest_logreport(self, report):
        """A test was skipped (an expected failure is not a skip)."""
        if report.skipped and not hasattr(report, "wasxfail"):
            self.skipped.append((report.nodeid, _reason(report.longrepr)))

    def pytest_collectreport(self, report):
        """A module was skipped while it was imported."""
        if report.skipped:
            self.skipped.append((report.nodeid, _reason(report.longrepr)))


def _reason(longrepr) -> str:
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return text.removeprefix("Skipped: ")


def refused_skips(skipped: list[tuple[str, str]], allowed: list[str]) -> list[str]:
    """The skips whose reason begins with none of the allowed words."""
    return [
        f"{where}: {reason}" for where, reason in skipped if not reason.startswith(tuple(allowed))
    ]


def allowed_reasons() -> list[str]:
    """What tests/allowed_skips.txt lists."""
    lines = (TESTS / "allowed_skips.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def pytest_sessionfinish(session):
    """With CI set, an unlisted skip fails the run."""
    green_in_ci = os.environ.get("CI") and session.exitstatus == pytest.ExitCode.OK
    if green_in_ci and refused_skips(session.config.stash[_skipped], allowed_reasons()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    """Name the skips that failed the run."""
    if not os.environ.get("CI"):
        return
    refused = refused_skips(config.stash[_skipped], allowed_reasons())
    if refused:
        terminalreporter.section("skips that tests/allowed_skips.txt does not allow")
        for line in refused:
            terminalreporter.write_line(line)
