"""What does a plan look like as one page that needs nothing else?

One file: no network, no script, no font but the reader's own. Everything shown as a picture also
stands in a table. The same plan gives the same page, byte for byte.
"""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Sequence

from rayserve import __version__
from rayserve.plan import NamedValue, Plan
from rayserve.planner.candidates.record import Comparison
from rayserve.planner.candidates.table import HEAD, RIGHT, cells, details, legend, why
from rayserve.planner.curves import NO_CURVES, Curves
from rayserve.planner.views import figures
from rayserve.planner.views.markup import Markup, element, escaped, folded, joined, table
from rayserve.planner.views.memory_bars import memory_section
from rayserve.planner.views.parts import is_proven, verdict
from rayserve.planner.views.plots import (
    READING,
    capacity_figure,
    first_token_figure,
    next_token_figure,
    terms_figure,
)

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The browser itself refuses to run or to load anything, whatever stood in the page."""


def page(
    plan: Plan,
    source: str,
    *,
    curves: Curves = NO_CURVES,
    comparison: Comparison | None = None,
) -> str:
    """The whole page of a plan made from the spec named `source`."""
    sections = [
        _head(plan),
        _tiles(plan),
        memory_section(plan, curves),
        _speed(plan, curves),
        _candidates(comparison),
        _notes(plan),
        _choices(plan),
        _limits(plan),
        _foot(plan, source),
    ]
    document = element(
        "html",
        element(
            "head",
            element("meta", charset="utf-8"),
            element("meta", http_equiv="Content-Security-Policy", content=POLICY),
            element("meta", name_="viewport", content="width=device-width, initial-scale=1"),
            element("title", f"{plan.name}: {verdict(plan)}"),
            element("style", _style()),
        ),
        element("body", element("main", *sections)),
        lang="en",
    )
    return f"<!DOCTYPE html>\n{document}\n"


@functools.cache
def _style() -> Markup:
    sheet = importlib.resources.files("rayserve").joinpath("data", "page.css")
    return Markup(sheet.read_text("utf-8"))


def _head(plan: Plan) -> Markup:
    said = verdict(plan)
    kind = "plain" if plan.memory is None else "good" if is_proven(plan) else ""
    placement = plan.replica.placement
    gpu = next((pool.gpu for pool in plan.node_pools if pool.gpu), "")
    logical = "logical GPUs" if plan.replica.device == "cpu" else "GPUs"
    gang = f"{placement.gpus} {gpu or logical}"
    because = plan.memory.because if plan.memory is not None else ""
    return element(
        "header",
        element(
            "div",
            element("h1", plan.name),
            element("span", said, class_=f"verdict {kind}".strip()),
            class_="head",
        ),
        element(
            "p",
            element("strong", plan.replica.served_model_name),
            " from ",
            element("code", plan.replica.model),
            f" on {gang}: tensor {placement.tensor_parallel_size}, "
            f"pipeline {placement.pipeline_parallel_size}. ",
            f"{because[:1].upper()}{because[1:]}." if because else "",
            class_="lead",
        ),
    )


def _tile(name: str, big: str, more: str) -> Markup:
    return element(
        "div",
        element("dt", name),
        element("dd", big, class_="big"),
        element("dd", more, class_="more"),
        class_="tile",
    )


def _tiles(plan: Plan) -> Markup:
    tiles = []
    if plan.memory is not None:
        memory = plan.memory
        span = figures.between(
            f"{memory.max_concurrency_low:g}", f"{memory.max_concurrency_high:g}"
        )
        known = f" ({span})" if span and memory.max_concurrency_high else ""
        tiles.append(
            _tile(
                "KV cache",
                f"{memory.kv_tokens:,} tokens",
                f"{memory.max_concurrency:g} sequences of full length{known}",
            )
        )
    if plan.latency is not None:
        first, then = plan.latency.ttft[0], plan.latency.tpot[0]
        tiles += [
            _tile(
                "First token",
                figures.milliseconds_range(first.low_ms, first.high_ms),
                f"prompt of {first.prompt_tokens:,} tokens; limited by {first.limited_by}",
            ),
            _tile(
                "Each further token",
                figures.milliseconds_range(then.low_ms, then.high_ms),
                f"batch {then.batch}, {then.context_tokens:,} tokens of context; "
                f"limited by {then.limited_by}",
            ),
        ]
    scaling = plan.scaling
    count = figures.between(str(scaling.min_replicas), str(scaling.max_replicas))
    tiles.append(
        _tile(
            "Replicas",
            count or str(scaling.min_replicas),
            f"{plan.replica.placement.gpus} GPUs each; revision {plan.revision}",
        )
    )
    return element("dl", *tiles, class_="tiles")


# ── curves, candidates, choices ─────────────────────────────────────────────────────────────────


def _speed(plan: Plan, curves: Curves) -> Markup:
    shown = [
        capacity_figure(plan, curves),
        next_token_figure(plan, curves),
        first_token_figure(plan, curves),
        terms_figure(plan),
    ]
    drawn = [figure for figure in shown if figure]
    if not drawn:
        return Markup()
    notes = plan.latency.notes if plan.latency is not None else []
    return joined(
        [
            element("h2", "How many, and how fast"),
            element("p", READING, class_="say under"),
            element("div", *drawn, class_="charts"),
            element("ul", *(element("li", note) for note in notes), class_="notes say")
            if notes
            else "",
        ]
    )


def _candidates(comparison: Comparison | None) -> Markup:
    if comparison is None:
        return Markup()
    rows = comparison.rows
    reasons = [(row.name, why(row)) for row in rows]
    facts = details(rows)
    return joined(
        [
            element("h2", "Candidates"),
            element(
                "section",
                table(
                    legend(comparison).replace("   ", "; "),
                    HEAD,
                    map(cells, rows),
                    numbers=frozenset(HEAD.index(name) for name in RIGHT),
                    strong=next((place for place, row in enumerate(rows) if row.served), None),
                ),
                table("Why in this order", ("checkpoint", "because"), reasons, kind="stack"),
                folded("Details", table("What this rests on", ("of", "fact"), facts, kind="stack"))
                if facts
                else "",
                class_="card",
            ),
        ]
    )


def _choices(plan: Plan) -> Markup:
    replica = plan.replica
    engine = _reasons(
        "Chosen for the engine", [*plan.choices, *replica.engine_args, *replica.frontend_args]
    )
    others = [
        folded(name, _reasons(name, values))
        for name, values in (
            ("Environment of the replica's processes", replica.env),
            ("Environment of every Ray node", plan.environment),
        )
        if any(item.reason for item in values)
    ]
    cards = [element("section", part, class_="card") for part in (engine, *others) if part]
    return joined([element("h2", "What was chosen, and why"), *cards]) if cards else Markup()


def _reasons(name: str, values: Sequence[NamedValue]) -> Markup:
    """The values that have a reason, as a table; nothing where none has."""
    rows = [
        (element("code", item.name), element("code", figures.plain(item.value)), item.reason)
        for item in values
        if item.reason
    ]
    return table(name, ("name", "value", "because"), rows, kind="stack") if rows else Markup()


def _limits(plan: Plan) -> Markup:
    """What people wrote, or defaults, where no reason is needed."""
    written = [
        (element("code", item.name), element("code", figures.plain(item.value)))
        for item in [*plan.replica.engine_args, *plan.replica.frontend_args]
        if not item.reason
    ]
    door = [
        (element("code", f"door.{name}"), element("code", figures.plain(value)))
        for name, value in plan.door.model_dump(mode="json").items()
    ]
    return joined(
        [
            element("h2", "As the spec has it"),
            element(
                "section",
                folded(
                    "Engine arguments and limits of the door",
                    table("Without a choice of the planner", ("name", "value"), [*written, *door]),
                ),
                class_="card",
            ),
        ]
    )


def _notes(plan: Plan) -> Markup:
    if not plan.notes:
        return Markup()
    return joined(
        [
            element("h2", "Notes"),
            element("ul", *(element("li", note) for note in plan.notes), class_="notes"),
        ]
    )


def _foot(plan: Plan, source: str) -> Markup:
    return element(
        "footer",
        escaped(
            f"Made by rayserve {__version__} from {source} (SHA-256 {plan.spec_sha256[:12]}…) for "
            f"vLLM {plan.replica.vllm_version}. Ranges are expectations; a start on the hosts has the "
            "last word."
        ),
    )
