"""Which curves does the page of a plan show, and what does each say in a sentence?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from rayserve.plan import FirstTokenTime, NextTokenTime, Plan
from rayserve.planner.curves import Capacity, Curves
from rayserve.planner.views.charts import (
    Axis,
    Limit,
    Point,
    Series,
    chart,
    decade_axis,
    doubling_axis,
    legend,
    zero_axis,
)
from rayserve.planner.views.figures import (
    between,
    milliseconds,
    milliseconds_range,
    milliseconds_tick,
    sequences,
    short_tokens,
)
from rayserve.planner.views.markup import Markup, element, table

_T = TypeVar("_T")
NUMBERS = frozenset({0, 1, 2, 3, 4})
READING = (
    "Bands reach from the lowest to the highest that is expected; dotted is the bound of the hardware's "
    "peak rates, which nothing beats. One replica, no queue."
)
TERM_NAMES = {
    "weights": "reading weights",
    "kv": "reading the KV cache",
    "compute": "matrix products",
    "activations": "activations",
    "allreduce": "all-reduces",
    "pipeline": "between stages",
    "offload": "weights in host memory",
    "launch": "small kernels and launches",
    "host": "the host",
}


def _figure(
    name: str,
    title: str,
    says: str,
    series: Sequence[Series],
    axes: tuple[Axis, Axis],
    limit: Limit | None,
    figures_table: Markup,
) -> Markup:
    across, up = axes
    picture = chart(
        name, title=title, description=says, series=series, across=across, up=up, limit=limit
    )
    return element(
        "figure",
        element("h3", title),
        element("p", says, class_="say"),
        legend(series) if len(series) > 1 else "",
        picture,
        element("details", element("summary", "The figures"), figures_table),
        class_="card",
    )


def capacity_figure(plan: Plan, curves: Curves) -> Markup:
    """Sequences at once against their length."""
    points = curves.capacity
    if len(points) < 2:
        return Markup()
    most = plan.door.max_in_flight
    series = [
        Series(
            "KV cache",
            [Point(p.context_tokens, p.low, p.high, expected=p.expected) for p in points],
        )
    ]
    ends = [most, *(p.low for p in points), *(p.high for p in points)]
    axes = (
        doubling_axis("tokens of each sequence", (p.context_tokens for p in points), short_tokens),
        decade_axis("sequences at once", ends, lambda count: f"{count:,g}"),
    )
    rows = [
        (f"{p.context_tokens:,}", sequences(p.expected), _span(sequences(p.low), sequences(p.high)))
        for p in _few(points)
    ]
    return _figure(
        "capacity",
        "Sequences at once, by their length",
        _says_capacity(points, most),
        series,
        axes,
        Limit(most, f"max_num_seqs {most}"),
        table(
            "Sequences that the KV cache holds",
            ("tokens", "expected", "range"),
            rows,
            numbers=NUMBERS,
        ),
    )


def _says_capacity(points: Sequence[Capacity], most: int) -> str:
    """Which limit is met first, at which length."""
    enough = [point.context_tokens for point in points if point.low >= most]
    longest = points[-1]
    full = sequences(longest.expected)
    if enough and enough[-1] == longest.context_tokens:
        return (
            f"Even at {longest.context_tokens:,} tokens the KV cache holds {full} sequences: "
            f"max_num_seqs ({most}) is the limit."
        )
    if not enough:
        return f"The KV cache is the limit at every length: {full} at {longest.context_tokens:,} tokens."
    return (
        f"Up to about {enough[-1]:,} tokens each, {most} sequences (max_num_seqs) fit for certain; "
        f"at {longest.context_tokens:,} tokens it is {full}."
    )


def next_token_figure(plan: Plan, curves: Curves) -> Markup:
    """Time a token against the batch."""
    contexts = dict.fromkeys(time.context_tokens for time in curves.tpot)
    groups = [[t for t in curves.tpot if t.context_tokens == context] for context in contexts]
    if not groups or len(groups[0]) < 2:
        return Markup()
    series = [
        Series(
            f"{times[0].context_tokens:,} tokens of context",
            [Point(t.batch, t.low_ms, t.high_ms, bound=t.bound_ms) for t in times],
        )
        for times in groups
    ]
    slo = plan.scaling.tpot_slo_ms
    ends = [*(t.high_ms for t in curves.tpot), *([slo] if slo else [])]
    axes = (
        doubling_axis("sequences in a batch", (t.batch for t in groups[0]), short_tokens),
        zero_axis("time a token", ends, milliseconds_tick),
    )
    rows = [
        (f"{t.batch}", f"{t.context_tokens:,}", *_times(t)) for times in groups for t in _few(times)
    ]
    one, all_of_them = groups[0][0], groups[0][-1]
    return _figure(
        "tpot",
        "Time per further token, by batch",
        f"{milliseconds_range(one.low_ms, one.high_ms)} for one sequence, "
        f"{milliseconds_range(all_of_them.low_ms, all_of_them.high_ms)} for {all_of_them.batch} at "
        "once.",
        series,
        axes,
        Limit(slo, f"promised: {slo:g} ms (slo.tpot_ms)") if slo else None,
        table(
            "Time per further token (TPOT)",
            ("batch", "context", "expected", "bound", "limited by"),
            rows,
            numbers=NUMBERS - {4},
        ),
    )


def first_token_figure(plan: Plan, curves: Curves) -> Markup:
    """Time to the first token against the prompt, without and with a cached prefix."""
    missed = [time for time in curves.ttft if not time.cached_tokens]
    held = [time for time in curves.ttft if time.cached_tokens]
    if len(missed) < 2:
        return Markup()
    named = [("nothing cached", missed), ("whole prefix cached", held)]
    series = [
        Series(name, [Point(t.prompt_tokens, t.low_ms, t.high_ms, bound=t.bound_ms) for t in times])
        for name, times in named
        if len(times) > 1
    ]
    slo = plan.scaling.ttft_slo_ms
    shown = [point for one in series for point in one.points]
    ends = [*(p.bound for p in shown), *(p.high for p in shown), *([slo] if slo else [])]
    axes = (
        doubling_axis("tokens of the prompt", (t.prompt_tokens for t in missed), short_tokens),
        decade_axis("time to the first token", ends, milliseconds_tick),
    )
    rows = [
        (f"{t.prompt_tokens:,}", f"{t.cached_tokens:,}", *_times(t))
        for _, times in named
        for t in _few(times)
    ]
    return _figure(
        "ttft",
        "Time to the first token, by prompt",
        _says_prompt(missed, slo),
        series,
        axes,
        Limit(slo, f"promised: {milliseconds_tick(slo)} (slo.ttft_ms)") if slo else None,
        table(
            "Time to the first token (TTFT) without a queue",
            ("prompt", "cached", "expected", "bound", "limited by"),
            rows,
            numbers=NUMBERS - {4},
        ),
    )


def terms_figure(plan: Plan) -> Markup:
    """What the expected request's first and next token spend their time on."""
    if plan.latency is None:
        return Markup()
    first, then = plan.latency.ttft[0], plan.latency.tpot[0]
    groups: list[tuple[str, FirstTokenTime | NextTokenTime]] = [
        (f"First token of {first.prompt_tokens:,}, nothing cached", first),
        (f"Next token after {then.context_tokens:,}, batch {then.batch}", then),
    ]
    shown = [(name, time) for name, time in groups if time.terms]
    if not shown:
        return Markup()
    return element(
        "figure",
        element("h3", "Where the time goes"),
        element("p", "For the expected request; each term from low to high.", class_="say"),
        *(_terms(name, time) for name, time in shown),
        class_="card",
    )


def _terms(name: str, time: FirstTokenTime | NextTokenTime) -> Markup:
    """A track for each term, the largest first, on a scale that they share."""
    most = max(term.high_ms for term in time.terms) or 1.0
    ordered = sorted(time.terms, key=lambda term: term.low_ms + term.high_ms, reverse=True)
    rows = [
        element(
            "li",
            element("span", TERM_NAMES.get(term.name, term.name)),
            element("span", milliseconds_range(term.low_ms, term.high_ms), class_="value"),
            element(
                "span",
                element(
                    "i",
                    style=f"left:{100 * term.low_ms / most:.2f}%;"
                    f"width:{100 * (term.high_ms - term.low_ms) / most:.2f}%",
                ),
                class_="track",
                aria_hidden="true",
            ),
        )
        for term in ordered
    ]
    total = milliseconds_range(time.low_ms, time.high_ms)
    return element("div", element("h4", f"{name}: {total}"), element("ul", *rows, class_="tracks"))


def _says_prompt(missed: Sequence[FirstTokenTime], slo: float) -> str:
    longest = missed[-1]
    text = (
        f"{milliseconds_range(longest.low_ms, longest.high_ms)} for a prompt of "
        f"{longest.prompt_tokens:,} tokens without a queue."
    )
    kept = [time.prompt_tokens for time in missed if time.high_ms <= slo]
    if slo and len(kept) < len(missed):
        text += (
            f" Up to about {kept[-1]:,} tokens the promise of {milliseconds(slo)} is sure to be kept."
            if kept
            else f" The promise of {milliseconds(slo)} is not sure to be kept."
        )
    return text


def _times(time: FirstTokenTime | NextTokenTime) -> tuple[str, str, str]:
    span = milliseconds_range(time.low_ms, time.high_ms)
    return span, milliseconds(time.bound_ms), time.limited_by


def _span(low: str, high: str) -> str:
    return between(low, high) or low


def _few(points: Sequence[_T]) -> Iterable[_T]:
    """At most a dozen of the points, the last one among them."""
    every = -(-len(points) // 12)
    return reversed(points[::-1][::every])
