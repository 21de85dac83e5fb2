"""What does a check answer? Verdicts, their order, and how they are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

RUNBOOKS = "docs/runbooks"
"""Folder of the pages that a verdict names."""


class Status(StrEnum):
    """A check's verdict."""

    PASS = "pass"
    SKIP = "skip"
    """It could not be asked here; `why` says what is missing."""
    WARN = "warn"
    """The host serves, but not for long or not well."""
    FAIL = "fail"
    """The host must not serve."""


ORDER = (Status.SKIP, Status.PASS, Status.WARN, Status.FAIL)
"""From nothing said to worst."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One verdict. `why` and `do` are empty where nothing is wrong and nothing needs saying."""

    name: str
    status: Status
    observed: str
    expected: str
    why: str = ""
    do: str = ""
    runbook: str = ""
    """Page under docs/runbooks, without its ending."""

    def as_dict(self) -> dict[str, str]:
        """The same, for `--json`."""
        out = {
            "name": self.name,
            "status": self.status.value,
            "observed": self.observed,
            "expected": self.expected,
        }
        page = f"{RUNBOOKS}/{self.runbook}.md" if self.runbook else ""
        more = (("why", self.why), ("do", self.do), ("runbook", page))
        return out | {key: text for key, text in more if text}


@dataclass(frozen=True, slots=True)
class Check:
    """What a check is called, what it wants, and the page that says more: all but the verdict."""

    name: str
    expected: str
    runbook: str = ""

    def passed(self, observed: str) -> CheckResult:
        """All is as expected."""
        return CheckResult(self.name, Status.PASS, observed, self.expected, runbook=self.runbook)

    def skipped(self, why: str) -> CheckResult:
        """It cannot be asked here."""
        return CheckResult(self.name, Status.SKIP, "not looked at", self.expected, why)

    def warned(self, observed: str, *, why: str, do: str) -> CheckResult:
        """The host serves, but not for long or not well."""
        return self._result(Status.WARN, observed, why, do)

    def failed(self, observed: str, *, why: str, do: str) -> CheckResult:
        """The host must not serve."""
        return self._result(Status.FAIL, observed, why, do)

    def _result(self, status: Status, observed: str, why: str, do: str) -> CheckResult:
        return CheckResult(self.name, status, observed, self.expected, why, do, self.runbook)


def failures(results: Iterable[CheckResult]) -> list[CheckResult]:
    """The results that forbid going on."""
    return [result for result in results if result.status is Status.FAIL]


def worst(results: Iterable[CheckResult]) -> Status:
    """The worst verdict; skip where there is none."""
    return max((result.status for result in results), key=ORDER.index, default=Status.SKIP)


def render(results: Sequence[CheckResult]) -> str:
    """One line a check; what is wrong also says what was expected, why, and what to do.

    Checks that are skipped for the same reason share a line, where the first of them would stand.
    """
    skipped: dict[str, list[str]] = {}
    for result in results:
        if result.status is Status.SKIP:
            skipped.setdefault(result.why, []).append(result.name)
    width = max((len(result.name) for result in results), default=0)
    lines: list[str] = []
    for result in results:
        if result.status is Status.SKIP:
            if names := skipped.pop(result.why, None):
                lines.append(f"skip  {', '.join(names)}: {result.why}")
            continue
        lines.append(f"{result.status.value}  {result.name:{width}}  {result.observed}")
        if result.status in (Status.WARN, Status.FAIL):
            lines.append(f"      expected: {result.expected}")
        if result.why:
            lines.append(f"      why: {result.why}")
        if result.do:
            lines.append(f"      do:  {result.do}")
        if result.status in (Status.WARN, Status.FAIL) and result.runbook:
            lines.append(f"      see: {RUNBOOKS}/{result.runbook}.md")
    counts = {status: sum(result.status is status for result in results) for status in Status}
    said = f"{counts[Status.FAIL]} failed, {counts[Status.WARN]} warned"
    unasked = f", {counts[Status.SKIP]} skipped" if counts[Status.SKIP] else ""
    lines.append(f"{len(results)} checks: {said}{unasked}")
    if worst(results) is Status.SKIP:
        lines.append("nothing was judged: each check was skipped, so nothing is known of this host")
    return "\n".join(lines)


def metrics(results: Sequence[CheckResult], *, host: str, now_s: float) -> str:
    """The verdicts for node_exporter's textfile collector.

    `rayserve_check_status` is 0 pass, 1 skip, 2 warn, 3 fail; `rayserve_check_time_seconds` is when
    the checks ran (Unix time), so that an alert can tell an old file.
    """
    value = {Status.PASS: 0, Status.SKIP: 1, Status.WARN: 2, Status.FAIL: 3}
    lines = [
        "# HELP rayserve_check_status Verdict of a check: 0 pass, 1 skip, 2 warn, 3 fail.",
        "# TYPE rayserve_check_status gauge",
        *(
            f'rayserve_check_status{{host="{_label(host)}",check="{_label(result.name)}"}} '
            f"{value[result.status]}"
            for result in results
        ),
        "# HELP rayserve_check_time_seconds When the checks ran, Unix time.",
        "# TYPE rayserve_check_time_seconds gauge",
        f'rayserve_check_time_seconds{{host="{_label(host)}"}} {now_s:.3f}',
    ]
    return "\n".join(lines) + "\n"


def _label(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
