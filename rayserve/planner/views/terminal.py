"""What does a plan look like on one screen of a terminal?

name: verdict
model, replica
the memory of a GPU as a bar
latencies
the limits, each with its reason
notes
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import click

from rayserve.plan import DoorPlan, MemoryEstimate, NamedValue, Plan
from rayserve.planner.arguments import OWN_DEFAULT
from rayserve.planner.evidence import evidence_rows
from rayserve.planner.views.figures import between, gib, gib_range, plain
from rayserve.planner.views.latency_table import latency_lines
from rayserve.planner.views.parts import FREE, KV_CACHE, Bar, Part, is_proven, memory_bar, verdict

COLOURS = {
    "weights": "blue",
    "lora": "bright_blue",
    "draft": "bright_cyan",
    "activation": "yellow",
    "other": "red",
    "overhead": "red",
    "graphs": "magenta",
    KV_CACHE: "green",
    FREE: "bright_black",
}
LIMITS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "enforce_eager",
)
"""Engine arguments that decide memory and speed: each has its line. Others have a reason in the plan."""
WIDEST = 100
NARROWEST = 60
INDENT = "  "


@dataclass(frozen=True)
class Style:
    """What a terminal can show."""

    width: int = WIDEST
    colour: bool = False
    blocks: bool = False
    """The encoding has block characters."""


PLAIN = Style()


def style_of(*, terminal: bool, environment: Mapping[str, str], encoding: str, width: int) -> Style:
    """The style of a stream: colours on a terminal, unless NO_COLOR or a dumb terminal forbids them."""
    try:
        "█─╰╯".encode(encoding)
        blocks = True
    except (LookupError, UnicodeEncodeError):
        blocks = False
    dumb = environment.get("TERM", "") in {"dumb", "unknown"}
    colour = terminal and not dumb and not environment.get("NO_COLOR")
    wide = width if terminal and width > 0 else WIDEST
    return Style(max(NARROWEST, min(wide, WIDEST)), colour, blocks)


def table(plan: Plan, style: Style = PLAIN) -> str:
    """Verdict, layout, memory, limits and notes."""
    said = _coloured(verdict(plan), "green" if is_proven(plan) else "yellow", style, bold=True)
    lines = [f"{plan.name} ({plan.profile}): {said}"]
    lines += [*_layout(plan, style), ""]
    if plan.memory is not None:
        lines += [*_memory(plan.memory, plan, style), ""]
    lines += [
        line for name, text in evidence_rows(plan) for line in _wrapped(f"{name}: {text}", style)
    ]
    if plan.latency is not None:
        rows, bounds = latency_lines(plan.latency, style.width - len(INDENT))
        lines += [*(INDENT + row for row in rows), *_wrapped(bounds, style), ""]
    args = [*plan.choices, *plan.replica.engine_args, *plan.replica.frontend_args]
    lines += _limits(args, style)
    lines += [line for note in plan.notes for line in _wrapped(f"note: {note}", style)]
    return "\n".join(lines)


def _layout(plan: Plan, style: Style) -> list[str]:
    placement, scaling = plan.replica.placement, plan.scaling
    hosts = "one host" if placement.executor == "mp" else "across hosts"
    logical = "logical " if plan.replica.device == "cpu" else ""
    cut = f"tensor {placement.tensor_parallel_size} x pipeline {placement.pipeline_parallel_size}"
    many = "s" if placement.gpus != 1 else ""
    gang = f"{placement.gpus} {logical}GPU{many} = {cut}, {hosts}, executor {placement.executor}"
    count = between(str(scaling.min_replicas), str(scaling.max_replicas))
    name, revision = plan.replica.served_model_name, plan.revision
    return [
        *_wrapped(f"{plan.replica.model} as `{name}`, revision {revision}", style),
        *_wrapped(f"replicas: {count or scaling.min_replicas}, each of {gang}", style),
    ]


def _memory(memory: MemoryEstimate, plan: Plan, style: Style) -> list[str]:
    bar = memory_bar(memory)
    width = style.width - 2 * len(INDENT)
    stages = plan.replica.placement.pipeline_parallel_size
    which = "each GPU" if stages == 1 else f"the fullest of the GPUs of {stages} stages"
    share = memory.requested_bytes / memory.total_bytes
    head = (
        f"{which}: {gib(memory.total_bytes)} GiB, of which vLLM may take "
        f"{gib(memory.requested_bytes)} ({share:.0%}); {memory.model} estimate"
    )
    columns = bar_columns(bar, width)
    lines = [*_wrapped(head, style), INDENT + _drawn(bar, columns, style)]
    if bar.edge_bytes is not None:
        lines.append(INDENT + _edge(bar, columns, memory, style))
    lines += _legend(bar, style)
    lines += _cache(memory, plan, style)
    lines += _wrapped(_admitted(plan.door), style)
    return lines


def bar_columns(bar: Bar, width: int) -> list[int]:
    """Columns of each part: in proportion, one at least, `width` in all."""
    columns = [max(1, round(part.expected_bytes / bar.total_bytes * width)) for part in bar.parts]
    columns[columns.index(max(columns))] += width - sum(columns)
    return columns


def _drawn(bar: Bar, columns: list[int], style: Style) -> str:
    return "".join(
        _coloured(_fill(part, style) * count, COLOURS[part.key], style)
        for part, count in zip(bar.parts, columns, strict=True)
    )


def _fill(part: Part, style: Style) -> str:
    if not (style.colour and style.blocks):
        return part.letter
    return "░" if part.key == FREE else "█"


def _swatch(part: Part, style: Style) -> str:
    return _coloured(_fill(part, style), COLOURS[part.key], style)


def _edge(bar: Bar, columns: list[int], memory: MemoryEstimate, style: Style) -> str:
    """A bracket below the columns in which the KV cache may begin, and what it means."""
    width = sum(columns)
    begin = sum(
        count
        for part, count in zip(bar.parts, columns, strict=True)
        if bar.start_bytes(part.key) < bar.start_bytes(KV_CACHE)
    )
    left = round((memory.kv_high_bytes - memory.kv_bytes) / bar.total_bytes * width)
    right = round((memory.kv_bytes - memory.kv_low_bytes) / bar.total_bytes * width)
    first, last = max(0, begin - max(1, left)), min(width - 1, begin + max(1, right) - 1)
    inner = last - first - 1
    bracket = f"╰{'─' * inner}╯" if style.blocks else "^" * (inner + 2)
    text = f"the KV cache begins about here: {gib_range(memory.kv_low_bytes, memory.kv_high_bytes)} GiB"
    if last + 2 + len(text) <= width:
        return f"{' ' * first}{bracket} {text}"
    return f"{text} {bracket}".rjust(last + 1)


def _legend(bar: Bar, style: Style) -> list[str]:
    """What each part is, its size and its range, as many on a line as fit."""
    lines: list[str] = []
    used = 0
    for part in bar.parts:
        span = gib_range(part.low_bytes, part.high_bytes)
        text = f"{part.label} {gib(part.expected_bytes)}{f' ({span})' if span else ''}"
        length = len(text) + 2
        if not lines or used + 3 + length > style.width - len(INDENT):
            lines.append(INDENT + f"{_swatch(part, style)} {text}")
            used = length
        else:
            lines[-1] += f"   {_swatch(part, style)} {text}"
            used += 3 + length
    return lines


def _cache(memory: MemoryEstimate, plan: Plan, style: Style) -> list[str]:
    length = plan.replica.engine_arguments().get("max_model_len", 0)
    span = between(f"{memory.max_concurrency_low:g}", f"{memory.max_concurrency_high:g}")
    full = f"{memory.max_concurrency:g} sequences of {length:,}"
    full += f" ({span})" if span else ""
    if memory.request_tokens:
        many = f"{memory.expected_concurrency:,.0f} requests"
        full += f", {many} of {memory.request_tokens:,} tokens"
    text = f"KV cache: {memory.kv_tokens:,} tokens = {full}"
    said = bool(memory.because) and memory.verdict != "fits"
    return _wrapped(f"{text}; {memory.because}" if said else text, style)


def _admitted(door: DoorPlan) -> str:
    """How many requests a replica takes, and how long an answer may be."""
    return (
        f"requests: {door.max_in_flight:,} at once a replica, {door.max_queued:,} more wait, "
        f"the next get 429; answers of up to {door.max_tokens:,} tokens"
    )


def _limits(args: Iterable[NamedValue], style: Style) -> list[str]:
    """The limits with their reasons, those that nobody had to choose, and how many more reasons the
    plan has.
    """
    known = {item.name: item for item in args}
    limits = [known[name] for name in LIMITS if name in known and known[name].value != "auto"]
    default = [item for item in limits if item.reason.startswith(OWN_DEFAULT)]
    chosen = [item for item in limits if item.reason and item not in default]
    written = [item for item in limits if not item.reason]
    more = sum(bool(item.reason) for item in known.values()) - len(chosen)
    told = [f"written: {_named(written)}"] if written else []
    told += [f"default: {_named(default)}"] if default else []
    told += [f"{more} more reasons in the plan"] if more else []
    lines = _wrapped("; ".join(told), style)
    heads = [f"{item.name} {plain(item.value)}" for item in chosen]
    column = max(map(len, heads), default=0) + 2
    hang = column if 2 * column < style.width else len(INDENT)
    for head, item in zip(heads, chosen, strict=True):
        lines += _wrapped(f"{head:<{column}}{item.reason}", style, hang=hang)
    return lines


def _named(items: Iterable[NamedValue]) -> str:
    return ", ".join(f"{item.name} {plain(item.value)}" for item in items)


def _wrapped(text: str, style: Style, *, hang: int = len(INDENT)) -> list[str]:
    return textwrap.wrap(
        text,
        style.width,
        initial_indent=INDENT,
        subsequent_indent=INDENT + " " * hang,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _coloured(text: str, colour: str, style: Style, *, bold: bool = False) -> str:
    return click.style(text, fg=colour, bold=bold or None) if style.colour else text
