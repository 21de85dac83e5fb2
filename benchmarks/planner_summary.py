"""Which bars does the planner meet over all cases, and how wide are its ranges?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.planner_rows import CaseRow, relative


@dataclass(frozen=True)
class Bar:
    """A measured figure and what it must be."""

    name: str
    value: float
    limit: float
    at_least: bool = False
    count: int = 0

    @property
    def passed(self) -> bool | None:
        """Whether the figure is good enough; None where no case asks, which is neither."""
        if not self.count:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def line(self) -> str:
        """One line of the report."""
        word = "at least" if self.at_least else "at most"
        if self.passed is None:
            return f"----  {self.name}: not measured, no case ({word} {self.limit:g})"
        mark = "pass" if self.passed else "FAIL"
        return f"{mark}  {self.name}: {self.value:.3f} ({word} {self.limit:g}; {self.count} cases)"

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"passed": self.passed}


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def bars(rows: Sequence[CaseRow]) -> list[Bar]:
    """All bars, in percent where they are shares."""
    weights = [100 * abs(e) for row in rows if (e := row.weights_error) is not None]
    cache = [100 * abs(e) for row in rows if (e := row.cache_error) is not None]
    kv = [100 * abs(e) for row in rows if (e := row.kv_error) is not None]
    inside = [row.inside for row in rows if row.inside is not None]
    judged = [row for row in rows if row.verdict]
    wrong = [row for row in judged if row.memory_refusal and row.verdict.startswith("fits")]
    refused = [row for row in judged if row.memory_refusal]
    decided = [row.verdict_right for row in judged if row.verdict_right is not None]
    return [
        Bar("weights, mean error %", _mean(weights), 0.1, count=len(weights)),
        Bar("weights, worst error %", max(weights, default=0), 1, count=len(weights)),
        Bar("cache from its bytes, worst error %", max(cache, default=0), 0.5, count=len(cache)),
        Bar("KV GiB end to end, median error %", percentile(kv, 0.5), 2, count=len(kv)),
        Bar("KV GiB end to end, p95 error %", percentile(kv, 0.95), 6, count=len(kv)),
        Bar("logged KV inside the range %", 100 * _mean(inside), 95, True, len(inside)),
        Bar("decided verdicts right %", 100 * _mean(decided), 95, True, len(decided)),
        Bar("`fits` on a case refused for memory", len(wrong), 0, count=len(refused)),
    ]


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def errors_by_family(rows: Sequence[CaseRow]) -> dict[str, dict[str, float]]:
    """Each family's own errors of the KV cache end to end, and the p95 of all others without it."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.kv_error is not None:
            found.setdefault(row.family, []).append(100 * abs(row.kv_error))
    return {
        family: {
            "cases": len(own),
            "mean_kv_error_percent": _mean(own),
            "worst_kv_error_percent": max(own),
            "p95_without_percent": percentile(
                [error for name, some in found.items() if name != family for error in some], 0.95
            ),
        }
        for family, own in sorted(found.items())
    }


def leave_one_out(rows: Sequence[CaseRow]) -> dict[str, Any]:
    """Errors of the KV cache, in percent, with the empirical bytes refitted without each family.

    What the planner takes from logs are bytes that are added a rank (NCCL, the graphs, the CUDA context)
    and differ by version and number of ranks. Here their sum is fitted anew for every family, as the
    median of what is left over in the logs of the *other* families with that version and number of ranks,
    and the family is judged with it. A family that is alone with its version and ranks has no fit and
    is counted as such.
    """
    judged = [row for row in rows if row.kv_gib is not None and row.logged_kv_gib is not None]
    errors: dict[str, list[float]] = {}
    alone = 0
    for row in judged:
        others = [
            other.logged_kv_gib - other.kv_gib
            for other in judged
            if other.family != row.family
            and other.kv_gib is not None
            and other.logged_kv_gib is not None
            and _class(other) == _class(row)
        ]
        error = relative((row.kv_gib or 0) + statistics.median(others or [0]), row.logged_kv_gib)
        if not others or error is None:
            alone += 1
            continue
        errors.setdefault(row.family, []).append(100 * abs(error))
    every = [error for some in errors.values() for error in some]
    return {
        "cases": len(every),
        "cases_without_another_family": alone,
        "median_kv_error_percent": percentile(every, 0.5),
        "p95_kv_error_percent": percentile(every, 0.95),
        "worst_by_family_percent": {name: max(some) for name, some in sorted(errors.items())},
    }


def _class(row: CaseRow) -> tuple[str, int]:
    """What the added bytes depend on: version without its patch, and ranks."""
    return ".".join(row.version.split(".")[:2]), row.ranks


def median_width(rows: Sequence[CaseRow]) -> float | None:
    """Median width of the ranges of the KV cache, in percent of the logged bytes; None without any."""
    widths = [
        100 * (row.kv_high_gib - row.kv_low_gib) / row.logged_kv_gib
        for row in rows
        if row.kv_high_gib is not None and row.kv_low_gib is not None and row.logged_kv_gib
    ]
    return statistics.median(widths) if widths else None


def table(rows: Sequence[CaseRow], *, verbose: bool) -> Iterator[str]:
    """The report: every row with `verbose`, else those that miss a bar; then the widths."""
    for row in rows:
        if verbose or _notable(row):
            yield _line(row)
    width = median_width(rows)
    if width is not None:
        yield f"median width of the KV ranges: {width:.2f} % of the logged value"
    refusals = [row for row in rows if row.memory_refusal]
    judged = sum(1 for row in refusals if row.verdict)
    yield f"refusals for memory: {judged} of {len(refusals)} judged, the others are out of scope"
    undecided = sum(1 for row in rows if row.verdict and row.verdict_right is None)
    yield f"verdicts that ask for a measurement: {undecided}"
    yield "KV GiB end to end by family: mean and worst error; p95 of the others without it"
    for family, figures in errors_by_family(rows).items():
        yield (
            f"  {family:<28} {figures['cases']:3.0f} cases  {figures['mean_kv_error_percent']:6.2f} %"
            f" {figures['worst_kv_error_percent']:6.2f} %   {figures['p95_without_percent']:6.2f} %"
        )
    left = leave_one_out(rows)
    yield (
        "KV GiB with the empirical bytes refitted without the family: median"
        f" {left['median_kv_error_percent']:.2f} %, p95 {left['p95_kv_error_percent']:.2f} %"
        f" ({left['cases']} cases; {left['cases_without_another_family']} have no other family)"
    )


def _notable(row: CaseRow) -> bool:
    return (
        abs(row.weights_error or 0) > 0.01
        or abs(row.cache_error or 0) > 0.005
        or abs(row.kv_error or 0) > 0.06
        or row.inside is False
        or row.verdict_right is False
    )


def _line(row: CaseRow) -> str:
    parts = [f"{row.id[:44]:<44}"]
    if row.weights_error is not None:
        parts.append(f"weights {100 * row.weights_error:+.3f} %")
    if row.cache_error is not None:
        parts.append(f"cache {100 * row.cache_error:+.2f} %")
    if row.kv_gib is not None:
        logged = "-" if row.logged_kv_gib is None else f"{row.logged_kv_gib:.2f}"
        parts.append(
            f"KV {row.kv_low_gib:.2f} {row.kv_gib:.2f} {row.kv_high_gib:.2f} logged {logged}"
            + ("" if row.inside is not False else " OUT")
        )
    if row.verdict:
        parts.append(row.verdict[:60] + (" WRONG" if row.verdict_right is False else ""))
    reasons = dict.fromkeys(
        reason for reason in (row.no_weights, row.no_cache, row.no_end_to_end) if reason
    )
    return "  ".join([*parts, *(f"[{reason[:80]}]" for reason in reasons)])
