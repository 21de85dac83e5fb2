"""How do people read latencies on a terminal? As ranges: by prompt, and beside it by context and batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rayserve.plan import FirstTokenTime, LatencyEstimate, NextTokenTime
from rayserve.planner.views.figures import milliseconds, milliseconds_range, number

GAP = "   "


def latency_lines(latency: LatencyEstimate, width: int) -> tuple[list[str], str]:
    """The latency table, of one replica without a queue, and a sentence on what limits it.

    Its two parts stand side by side where `width` has room.
    """
    first, following = _first(latency.ttft), _following(latency.tpot)
    if len(first[0]) + len(GAP) + len(following[0]) <= width:
        blank = " " * len(first[0])
        pairs = itertools.zip_longest(first, following, fillvalue=blank)
        lines = [GAP.join(pair).rstrip() for pair in pairs]
    else:
        lines = [line.rstrip() for line in (*first, *following)]
    one, then = latency.ttft[0], latency.tpot[0]
    return lines, (
        f"bounds of the first row, which nothing beats: {milliseconds(one.bound_ms)} (limited by "
        f"{one.limited_by}), {milliseconds(then.bound_ms)} ({then.limited_by})"
    )


def _first(times: Sequence[FirstTokenTime]) -> list[str]:
    """A row for each prompt."""
    rows = [("first token of", "uncached", "all cached")]
    for prompt in dict.fromkeys(time.prompt_tokens for time in times):
        found = {
            bool(time.cached_tokens): _range(time) for time in times if time.prompt_tokens == prompt
        }
        what = f"{prompt:,} token{'s' if prompt != 1 else ''}"
        rows.append((what, found.get(False, ""), found.get(True, "")))
    return _aligned(rows)


def _following(times: Sequence[NextTokenTime]) -> list[str]:
    """A row for each context, a column for each batch, and one for as many as run at once."""
    contexts = dict.fromkeys(time.context_tokens for time in times)
    groups = {
        context: [time for time in times if time.context_tokens == context] for context in contexts
    }
    batches = sorted({time.batch for group in groups.values() for time in group[:-1]})
    rows = [("next token, ms", *(f"batch {batch}" for batch in batches), "most at once")]
    for context, group in groups.items():
        found = {time.batch: _in_ms(time) for time in group[:-1]}
        most = group[-1]
        cells = [found.get(batch, "") for batch in batches]
        rows.append((f"at {context:,}", *cells, f"{_in_ms(most)} ({most.batch})"))
    return _aligned(rows)


def _in_ms(time: NextTokenTime) -> str:
    return f"{number(time.low_ms)}-{number(time.high_ms)}"


def _range(time: FirstTokenTime) -> str:
    return milliseconds_range(time.low_ms, time.high_ms).replace(" to ", "-")


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.rjust(width) if place else text.ljust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
