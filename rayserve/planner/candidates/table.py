"""How do people read a comparison? As one table, the reasons below it, and what the figures rest on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rayserve.planner.candidates.record import CandidateRow, Comparison, Quality
from rayserve.units import GIB

KEPT = 4
"""Unquantized parts that are named."""
HEAD = (
    "rank", "name", "format", "weights", "KV tokens", "length", "full", "expected", "TTFT ms",
    "TPOT ms", "SLO", "accuracy", "verdict",
)  # fmt: skip
RIGHT = {
    "weights", "KV tokens", "length", "full", "expected", "TTFT ms", "TPOT ms", "accuracy",
}  # fmt: skip
LEGEND = (
    "* served   weights: GiB a GPU   length: max_model_len   full: requests of that length at once   "
    "expected: of {tokens} tokens   {batch}"
)


def comparison_text(comparison: Comparison) -> str:
    """The comparison in plain text."""
    lines = [_title(comparison), *_table([HEAD, *map(cells, comparison.rows)])]
    if any(row.rank for row in comparison.rows):
        lines.append(f"  {legend(comparison)}")
    lines += ["", "why"]
    lines += _list((f"{_rank(row)} {row.name}", why(row)) for row in comparison.rows)
    told = details(comparison.rows)
    if told:
        lines += ["", "details", *_list(told)]
    return "\n".join(lines)


def _title(comparison: Comparison) -> str:
    promises = [
        f"{name} {value:g} ms"
        for name, value in (
            ("TTFT", comparison.ttft_slo_ms),
            ("TPOT", comparison.tpot_slo_ms),
        )
        if value
    ]
    return (
        f"{comparison.name}: {len(comparison.rows)} checkpoints on {comparison.gpus} x "
        f"{comparison.gpu}; aim {comparison.aim}, {comparison.prompt_tokens} + "
        f"{comparison.output_tokens} tokens a request"
        + (f"; SLO {', '.join(promises)}" if promises else "")
    )


def legend(comparison: Comparison) -> str:
    """What the columns are."""
    tokens = comparison.prompt_tokens + comparison.output_tokens
    batch = "TPOT: one request alone"
    if comparison.aim == "throughput":
        batch = "TPOT: with as many requests as run at once"
    return LEGEND.format(tokens=tokens, batch=batch)


def cells(row: CandidateRow) -> tuple[str, ...]:
    """A row below HEAD."""
    name = f"{row.name} *" if row.served else row.name
    quality = "not known"
    if row.quality is not None:  # rounded down: only what loses nothing has 100
        quality = f"{math.floor(10 * row.quality.recovery_percent) / 10:.1f} %"
    if not row.format:
        quality = ""
    known = row.rank > 0 and row.max_concurrency > 0
    return (
        _rank(row),
        name,
        " + ".join(part.partition(" ")[0] for part in row.format.split(" + ")),
        f"{row.weights_bytes / GIB:.1f}" if row.weights_bytes else "",
        f"{row.kv_tokens:,}" if known else "",
        f"{row.max_model_len:,}" if row.max_model_len else "",
        f"{row.max_concurrency:.1f}" if known else "",
        f"{row.expected_concurrency:.1f}" if row.expected_concurrency else "",
        _range(row.ttft.low_ms, row.ttft.high_ms) if row.ttft is not None else "",
        _range(row.tpot.low_ms, row.tpot.high_ms) if row.tpot is not None else "",
        row.slo if row.rank else "",
        quality,
        row.verdict.partition(":")[0] if not row.rank else row.verdict,
    )


def _range(low: float, high: float) -> str:
    digits = 0 if high >= 100 else 1
    return f"{low:.{digits}f}-{high:.{digits}f}"


def _rank(row: CandidateRow) -> str:
    return str(row.rank) if row.rank else "-"


def why(row: CandidateRow) -> str:
    """Why a checkpoint has its rank, or none."""
    return row.reason if row.rank else f"{row.verdict}; {row.reason}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns that hold something, as wide as their widest cell."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    lines = []
    for index in range(len(rows)):
        cells = []
        for column in columns:
            width = max(map(len, column))
            text = column[index]
            cells.append(text.rjust(width) if column[0] in RIGHT else text.ljust(width))
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines


def _list(pairs: Iterable[tuple[str, str]]) -> list[str]:
    found = list(pairs)
    width = max(len(name) for name, _ in found)
    return [f"  {name:<{width}}  {text}" for name, text in found]


def details(rows: Sequence[CandidateRow]) -> list[tuple[str, str]]:
    """(who, what): what the figures rest on; what several checkpoints share is told once."""
    names: dict[str, list[str]] = {}
    for row in rows:
        for text in _facts(row):
            names.setdefault(text, []).append(row.name)
    sizes = sorted({row.kv_bytes_per_token for row in rows if row.kv_bytes_per_token})
    for size in sizes:
        names[f"KV cache: {size:,} bytes a token on each GPU"] = [
            row.name for row in rows if row.kv_bytes_per_token == size
        ]
    sources = {row.quality.source: row.quality.published for row in rows if row.quality}
    pairs = [(_who(who, rows), text) for text, who in names.items()]
    pairs += [(key, text) for key, text in sources.items() if key]
    return pairs


def _who(names: Sequence[str], rows: Sequence[CandidateRow]) -> str:
    return "all" if len(names) == len(rows) > 1 else ", ".join(names)


def _facts(row: CandidateRow) -> list[str]:
    """What is to be known of one checkpoint beside its figures."""
    found = [f"runs as {row.runs_as}"] if row.runs_as else []
    quality, traits = row.quality, row.traits
    if quality is not None and quality.source:
        found.append(_published(quality))
    elif quality is None and row.format:
        found.append("accuracy: nothing published was found for this format")
    if traits is None:
        return found
    if traits.unquantized:
        found.append(f"not quantized: {', '.join(traits.unquantized[:KEPT])}")
    found.append(f"attention: {'; '.join(traits.attention)}")
    if traits.positions:
        found.append(traits.positions)
    if traits.float32:
        found.append(f"kept in 32 bits: {', '.join(traits.float32)}")
    return found


def _published(quality: Quality) -> str:
    span = f"{quality.low_percent:g} to {quality.high_percent:g} %"
    if quality.low_percent == quality.high_percent:
        span = f"{quality.low_percent:g} %"
    note = f"; {quality.note}" if quality.note else ""
    return (
        f"{span} of the accuracy is left, of {quality.model} "
        f"({'; '.join(quality.benchmarks)}) [{quality.source}]{note}"
    )
