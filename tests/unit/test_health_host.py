"""What the checks say of recorded hosts: the whole way from texts to verdicts."""

from __future__ import annotations

import functools
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from rayserve.health.results import CheckResult, Status
from tests.recorded_host import RecordedHost
from tests.yaml_text import load_yaml

CASES: list[dict[str, Any]] = load_yaml(
    Path("tests/cases/health/hosts.yml").read_text(encoding="utf-8")
)


@functools.cache
def verdicts(number: int) -> dict[str, CheckResult]:
    """All verdicts on the host of a case, by the check's name."""
    with tempfile.TemporaryDirectory() as folder:
        return RecordedHost(Path(folder), CASES[number]).results()


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case["name"] for case in CASES])
def test_a_recorded_host_gets_the_right_verdict(number: int) -> None:
    """What a host shows gives the verdict of the case, and says what it saw."""
    case = CASES[number]
    result = verdicts(number)[case["check"]]
    said = f"{result.observed} {result.expected} {result.why} {result.do}"
    assert (result.status.value, case["says"] in said) == (case["status"], True), said


def test_the_sound_host_has_no_fault(tmp_path: Path) -> None:
    """On the host that every case starts from nothing fails and nothing warns."""
    results = RecordedHost(tmp_path, {}).results().values()
    wrong = {result.name: result.observed for result in results
             if result.status in (Status.WARN, Status.FAIL)}  # fmt: skip
    assert wrong == {}
    assert sum(result.status is Status.PASS for result in results) >= 20


def test_every_fault_says_why_and_what_to_do() -> None:
    """Whatever fails or warns in any case has a reason, a next step and a page."""
    for number, case in enumerate(CASES):
        for result in verdicts(number).values():
            if result.status in (Status.WARN, Status.FAIL):
                assert all((result.observed, result.why, result.do, result.runbook)), (case, result)


def test_every_check_is_seen_to_go_wrong_and_right() -> None:
    """For every check there is a case in which it does not pass, and it passes on the sound host."""
    seen: dict[str, set[Status]] = defaultdict(set)
    for number in range(len(CASES)):
        for name, result in verdicts(number).items():
            seen[name].add(result.status)
    bad = {Status.WARN, Status.FAIL}
    assert {name for name, statuses in seen.items() if not statuses & bad} == set()


def test_the_cases_are_many_and_name_their_sources() -> None:
    """At least sixty cases, each with a source and a name of its own."""
    assert len(CASES) >= 60
    assert all(case["source"] for case in CASES)
    assert all(count == 1 for count in Counter(case["name"] for case in CASES).values())
