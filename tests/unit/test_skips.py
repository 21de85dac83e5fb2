"""Which skipped tests CI accepts, and do all of conftest's rules hold where tests are spread?"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SPREAD = ("--numprocesses=2", "--dist=loadfile")
GOOD = "def test_good():\n    pass\n"
SKIPPED = "import pytest\n\ndef test_skipped():\n    pytest.skip({!r})\n"
SKIPPED_MODULE = "import pytest\n\npytest.skip({!r}, allow_module_level=True)\n"
WARNS = "import warnings\n\ndef test_warns():\n    warnings.warn('old')\n"
ALLOWED = ["GPU", "own-kernel hosts"]


@pytest.fixture
def refused():
    """The function under test, from tests/conftest.py, which is no importable package."""
    from tests.conftest import refused_skips

    return lambda reason: refused_skips([("tests/a.py::b", reason)], ALLOWED)


@pytest.mark.parametrize("reason", ["GPU: none here", "own-kernel hosts need root"])
def test_a_listed_reason_is_accepted(refused, reason):
    """A reason that begins with a listed word may skip."""
    assert refused(reason) == []


@pytest.mark.parametrize("reason", ["no GPU", "needs root", ""])
def test_any_other_reason_is_refused_and_named(refused, reason):
    """A reason that is not listed is shown with its test."""
    assert refused(reason) == [f"tests/a.py::b: {reason}"]


def spread(folder: Path, **modules: str) -> subprocess.CompletedProcess[str]:
    """What CI sees of these unit tests, run by two workers under the conftest.py of this repository."""
    unit = folder / "tests" / "unit"
    unit.mkdir(parents=True)
    for name in ("conftest.py", "allowed_skips.txt"):
        shutil.copy(TESTS / name, folder / "tests")
    for name, text in modules.items():
        (unit / f"test_{name}.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "tests/unit", *SPREAD, "--junitxml=out.xml"],
        cwd=folder,
        env={**os.environ, "CI": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_workers_fail_a_run_for_unlisted_skips_and_name_them(tmp_path):
    """A test and a module that skip without a listed reason turn a green run red."""
    done = spread(
        tmp_path,
        good=GOOD,
        one=SKIPPED.format("not today"),
        whole=SKIPPED_MODULE.format("not here"),
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    _, _, refused = done.stdout.partition("does not allow")
    assert "tests/unit/test_one.py::test_skipped: not today" in refused
    assert "tests/unit/test_whole.py: not here" in refused


def test_workers_accept_listed_skips_and_take_warnings_for_errors(tmp_path):
    """A listed reason may skip, a warning may not pass, and one JUnit file has the results of all."""
    done = spread(tmp_path, good=GOOD, one=SKIPPED.format(listed()), warns=WARNS)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "UserWarning: old" in done.stdout
    assert "does not allow" not in done.stdout
    (suite,) = ET.parse(tmp_path / "out.xml").getroot()
    counts = {key: suite.get(key) for key in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "3", "failures": "1", "errors": "0", "skipped": "1"}


def listed() -> str:
    """A reason that tests/allowed_skips.txt lists."""
    from tests.conftest import allowed_reasons

    return allowed_reasons()[0]
