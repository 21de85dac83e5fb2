"""How do people read latencies on a terminal? As ranges, with the bound and what limits them."""

from __future__ import annotations

from collections.abc import Sequence

from rayserve.plan import FirstTokenTime, LatencyEstimate, NextTokenTime

FIRST = ("first token", "expected ms", "bound", "limited by", "all cached")
NEXT = ("each next token", "expected ms", "bound", "limited by", "")


def latency_lines(latency: LatencyEstimate) -> list[str]:
    """The latency table, of one replica without a queue."""
    anew = [row for row in latency.ttft if not row.cached_tokens]
    cached = {row.prompt_tokens: row for row in latency.ttft if row.cached_tokens}
    rows = [FIRST]
    for row in anew:
        hit = cached.get(row.prompt_tokens)
        what = f"  {_count(row.prompt_tokens, 'token')}"
        rows.append((what, *_figures(row), _range(hit) if hit is not None else ""))
    rows.append(NEXT)
    for step in latency.tpot:
        what = f"  {_count(step.batch, 'sequence')} of {step.context_tokens:,}"
        rows.append((what, *_figures(step), ""))
    return _aligned(rows)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _figures(row: FirstTokenTime | NextTokenTime) -> tuple[str, str, str]:
    return _range(row), _digits(row.bound_ms), row.limited_by


def _range(row: FirstTokenTime | NextTokenTime) -> str:
    return f"{_digits(row.low_ms)}-{_digits(row.high_ms)}"


def _digits(ms: float) -> str:
    """No more digits than mean something."""
    return f"{ms:,.0f}" if ms >= 10 else f"{ms:.1f}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns: the first and the fourth to the left, figures to the right."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            text.ljust(width) if at in (0, 3) else text.rjust(width)
            for at, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return lines
