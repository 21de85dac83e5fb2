"""How does the page show the memory of a GPU? As a bar to scale, its parts, and how sure each term is."""

from __future__ import annotations

from rayserve.plan import MemoryEstimate, Plan
from rayserve.planner.curves import Curves
from rayserve.planner.views import figures
from rayserve.planner.views.markup import Markup, element, folded, joined, table
from rayserve.planner.views.parts import KV_CACHE, LABELS, Part, memory_bar
from rayserve.units import GIB

TERM_NAMES = {
    "weights": "weights",
    "activation": "activations of a step",
    "non_torch": "NCCL and CUDA's own",
    "buffers": "the engine's buffers",
    "cuda_graphs": "CUDA graphs",
}


def memory_section(plan: Plan, curves: Curves) -> Markup:
    """A bar of each GPU; pipeline stages that differ have one each."""
    if plan.memory is None:
        return Markup()
    stages = list(curves.stages) or [plan.memory]
    alike = all(stage.terms == stages[0].terms for stage in stages)
    shown = [plan.memory] if alike else stages
    cards = []
    for number, memory in enumerate(shown, 1):
        ranks = plan.replica.placement.gpus
        title = f"Each of {ranks} GPUs" if ranks > 1 else "The GPU"
        if not alike:
            title = f"Each GPU of stage {number} of {len(shown)}"
        elif len(stages) < plan.replica.placement.pipeline_parallel_size:
            title = "The fullest GPU"
        cards.append(_bar_card(title, memory))
    return joined([element("h2", "Memory"), *cards])


def _bar_card(title: str, memory: MemoryEstimate) -> Markup:
    bar = memory_bar(memory)

    def share(size_bytes: float) -> str:
        return f"{100 * size_bytes / bar.total_bytes:.3f}%"

    segments = [
        element(
            "i",
            class_=part.key,
            style=f"width:{share(part.expected_bytes)}",
            title=f"{part.label} {figures.gib(part.expected_bytes)} GiB",
        )
        for part in bar.parts
    ]
    if bar.edge_bytes is not None:
        low, high = bar.edge_bytes
        segments.append(element("b", style=f"left:{share(low)};width:{share(high - low)}"))
    spoken = ", ".join(f"{part.label} {figures.gib(part.expected_bytes)}" for part in bar.parts)
    total = f"{figures.gib(memory.total_bytes)} GiB"
    share_taken = memory.requested_bytes / memory.total_bytes
    hatched = " Hatched: where the KV cache may begin." if bar.edge_bytes is not None else ""
    return element(
        "section",
        element("h3", f"{title}: {total}"),
        element(
            "p",
            f"vLLM may take {figures.gib(memory.requested_bytes)} GiB, {share_taken:.0%}.{hatched}",
            class_="say",
        ),
        element("div", *segments, class_="bar", role="img", aria_label=f"In GiB: {spoken}"),
        element(
            "div", element("span", "0"), element("span", total), class_="scale", aria_hidden="true"
        ),
        element("ul", *map(_part, bar.parts), class_="parts"),
        _terms(memory),
        class_="card",
    )


def _part(part: Part) -> Markup:
    span = figures.gib_range(part.low_bytes, part.high_bytes)
    value = [f"{figures.gib(part.expected_bytes)} GiB"]
    if span:
        value.append(element("small", span))
    return element(
        "li",
        element("i", class_=f"swatch {part.key}", aria_hidden="true"),
        element("span", part.label),
        element("span", *value, class_="value"),
    )


def _terms(memory: MemoryEstimate) -> Markup:
    """How sure each term is, and what it rests on."""
    if not memory.terms:
        return Markup()
    rows = [
        (
            TERM_NAMES.get(term.name, term.name),
            _fine(term.expected_bytes),
            f"{_fine(term.low_bytes)} to {_fine(term.high_bytes)}",
            term.basis,
        )
        for term in memory.terms
    ]
    rows.append(
        (
            LABELS[KV_CACHE],
            _fine(memory.kv_bytes),
            f"{_fine(memory.kv_low_bytes)} to {_fine(memory.kv_high_bytes)}",
            "what is left of vLLM's share; the terms err independently",
        )
    )
    return folded(
        "How sure each term is",
        table(
            "GiB of one GPU",
            ("term", "expected", "range", "rests on"),
            rows,
            numbers=frozenset({1, 2}),
            kind="stack",
        ),
    )


def _fine(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f}"
