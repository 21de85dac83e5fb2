"""Does everything pass? Runs the named stages in order, all of them, and adds up the tests.

    python scripts/run_tests.py lint unit contract engine

Each pytest stage is a process of its own: what contract tests import (vLLM takes over 1 GiB) must
not stay in memory while engines run. Unit tests share nothing and are spread over the CPUs; the other
stages start engines, which take them all. The last line reads `N passed, N failed, N skipped`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
CONTROLLER_BIN = ROOT / ".venv-ansible" / "bin"
RESULTS = ROOT / "build" / "test"
PLAYBOOKS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "playbooks").glob("*.yml"))

LINT = (
    ("ruff check", ("ruff", "check", ".")),
    ("ruff format", ("ruff", "format", "--check", ".")),
    ("mypy", ("mypy",)),
    ("layers", ("lint-imports",)),
    ("locks", ("python", "scripts/lock.py", "--check")),
)
ANSIBLE = (
    ("yamllint", ("yamllint", "--strict", ".")),
    ("syntax", ("ansible-playbook", "--syntax-check", "site.yml", *PLAYBOOKS)),
    ("ansible-lint", ("ansible-lint", "--offline", "--strict")),
)
"""Of the controller's own environment; a stage of its own, since it takes a minute."""
STAGES = ("lint", "unit", "contract", "engine", "ansible", "hosts")
NO_TESTS_COLLECTED = 5
SPREAD = frozenset({"unit"})
MOST_WORKERS = 8
"""Each worker collects all tests for itself; from here on that costs more than it brings."""


@dataclass(frozen=True, slots=True)
class Count:
    """How many tests ended in which way; a failed linter counts as one failed test."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(
            self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped
        )

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def run(command: Sequence[str], folder: Path = BIN) -> int:
    """Run a command of one of the environments in the repository root."""
    # ansible-lint looks for ansible-playbook on PATH.
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    command = [str(folder / command[0]), *command[1:]]
    return subprocess.run(command, cwd=ROOT, check=False, env=environment).returncode


def lint(commands: Sequence[tuple[str, Sequence[str]]], folder: Path) -> Count:
    """All linters, also after one has failed."""
    failures = 0
    for name, command in commands:
        started = time.monotonic()
        failed = run(command, folder) != 0
        failures += failed
        verdict = "FAILED" if failed else "ok"
        print(f"lint: {name}: {verdict} ({time.monotonic() - started:.1f} s)", flush=True)
    return Count(failed=failures)


def measure(stage: str) -> Count:
    """One stage, by its name."""
    if stage == "lint":
        return lint(LINT, BIN)
    return lint(ANSIBLE, CONTROLLER_BIN) if stage == "ansible" else test(stage)


def test(stage: str) -> Count:
    """One folder of tests. A stage that is not there, or that is empty, counts as nothing."""
    folder = ROOT / "tests" / stage
    if not any(folder.rglob("test_*.py")):
        print(f"{stage}: no tests", flush=True)
        return Count()
    results = RESULTS / f"{stage}.xml"
    results.unlink(missing_ok=True)
    code = run(pytest_command(stage, results, len(os.sched_getaffinity(0))))
    count = read_results(results)
    if code not in (0, NO_TESTS_COLLECTED) and not count.failed:
        count += Count(failed=1)  # a refused skip, a crash or an interrupted session
    return count


def pytest_command(stage: str, results: Path, cpus: int) -> tuple[str, ...]:
    """How pytest is called for a stage on a machine of `cpus` CPUs; `results`: its JUnit file."""
    command = ("pytest", f"tests/{stage}", "--durations=10", f"--junitxml={results}")
    workers = min(cpus, MOST_WORKERS)
    if stage not in SPREAD or workers < 2:
        return command
    return (*command, f"--numprocesses={workers}", "--dist=loadfile")


def read_results(path: Path) -> Count:
    """The counts of a JUnit file; one failure when there is none."""
    if not path.is_file():
        return Count(failed=1)
    suite = next(iter(ET.parse(path).getroot()))
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    return Count(total - failed - skipped, failed, skipped)


def main(stages: Sequence[str]) -> int:
    """Run the stages; 0 when nothing failed."""
    unknown = [stage for stage in stages if stage not in STAGES]
    if unknown or not stages:
        print(f"error: stages are {', '.join(STAGES)}", file=sys.stderr)
        return 2
    RESULTS.mkdir(parents=True, exist_ok=True)
    total = Count()
    for stage in stages:
        started = time.monotonic()
        print(f"── {stage} ──", flush=True)
        count = measure(stage)
        print(f"{stage} took {time.monotonic() - started:.0f} s: {count}", flush=True)
        total += count
    print(total)
    return 1 if total.failed else 0


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
