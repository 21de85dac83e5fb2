"""What would other contexts, batches and prompts be like on the planned replica?

A plan has the few figures that a decision needs; a curve needs more. They come from the same functions
as the plan's own, at the plan's limits, so that both agree where they meet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rayserve.plan import FirstTokenTime, MemoryEstimate, NextTokenTime, Plan
from rayserve.planner.fit import EngineLimits, Fit
from rayserve.planner.memory.simple import Cut
from rayserve.planner.speed.latency import Estimate
from rayserve.planner.timing import Timing, read_timing

SHORTEST_TOKENS = 256
"""Where curves over lengths begin."""
POINTS_PER_DOUBLING = 4
STEP_TOKENS = 16
"""Lengths are multiples of the usual block, so that rounding up to one draws no steps."""


@dataclass(frozen=True)
class Capacity:
    """How many sequences of a length the KV cache holds at once."""

    context_tokens: int
    low: float
    expected: float
    high: float


@dataclass(frozen=True)
class Curves:
    """All curves of a plan; an empty one cannot be said."""

    stages: tuple[MemoryEstimate, ...] = ()
    """The memory of a rank of each pipeline stage."""
    capacity: tuple[Capacity, ...] = ()
    tpot: tuple[NextTokenTime, ...] = ()
    ttft: tuple[FirstTokenTime, ...] = ()


NO_CURVES = Curves()


def curves(plan: Plan, fit: Fit) -> Curves:
    """The curves of a plan from what its own figures came from."""
    timing = read_timing(fit)
    args, placement = plan.replica.engine_arguments(), plan.replica.placement
    cut = Cut(placement.tensor_parallel_size, placement.pipeline_parallel_size)
    limits = EngineLimits(
        step_tokens=args["max_num_batched_tokens"],
        seqs=args["max_num_seqs"],
        length=args["max_model_len"],
    )
    held = [(length, fit.concurrency(cut, limits, length)) for length in lengths(limits.length)]
    return Curves(
        stages=tuple(fit.stages(cut, limits)),
        capacity=tuple(
            Capacity(length, *found) for length, found in held if math.isfinite(found[-1])
        ),
        tpot=tuple(_next_tokens(plan, timing, cut, limits)) if timing is not None else (),
        ttft=(
            tuple(_first_tokens(plan, timing, cut, limits, fit.block_tokens(cut, limits)))
            if timing is not None
            else ()
        ),
    )


def _next_tokens(
    plan: Plan, timing: Timing, cut: Cut, limits: EngineLimits
) -> Iterator[NextTokenTime]:
    """By batch, at the plan's least and longest context, as far as the plan's own rows go."""
    rows = plan.latency.tpot if plan.latency is not None else []
    contexts = sorted({row.context_tokens for row in rows})
    for context in dict.fromkeys(contexts[:1] + contexts[-1:]):
        most = max(row.batch for row in rows if row.context_tokens == context)
        for batch in batches(most):
            found = timing.token(cut, limits, batch, context)
            yield NextTokenTime(batch=batch, context_tokens=context, **_span(found))


def _first_tokens(
    plan: Plan, timing: Timing, cut: Cut, limits: EngineLimits, block: int
) -> Iterator[FirstTokenTime]:
    """By prompt, with nothing cached and, where the plan caches prefixes, with all whole blocks that
    come before its last token.
    """
    rows = plan.latency.ttft if plan.latency is not None else []
    longest = max((row.prompt_tokens for row in rows), default=0)
    for caching in dict.fromkeys(row.cached_tokens > 0 for row in rows):
        for prompt in lengths(longest):
            cached = (prompt - 1) // block * block if caching else 0
            if caching and not cached:
                continue
            found = timing.first(cut, limits, prompt, cached)
            yield FirstTokenTime(prompt_tokens=prompt, cached_tokens=cached, **_span(found))


def _span(estimate: Estimate) -> dict[str, Any]:
    total = estimate.total
    return {
        "bound_ms": total.bound,
        "low_ms": total.low,
        "high_ms": total.high,
        "limited_by": estimate.limited_by,
    }


def lengths(longest: int) -> list[int]:
    """Lengths up to the longest one, some for each doubling."""
    first = min(SHORTEST_TOKENS, max(1, longest // 4))
    steps = math.floor(math.log2(longest / first) * POINTS_PER_DOUBLING)
    found = {first, longest}
    for step in range(steps + 1):
        length = round(longest / 2 ** (step / POINTS_PER_DOUBLING) / STEP_TOKENS) * STEP_TOKENS
        if first < length < longest:
            found.add(length)
    return sorted(found)


def batches(most: int) -> list[int]:
    """Batch sizes from one to the most, all small ones and some for each doubling."""
    found = {1, most}
    size = 1.0
    while size < most:
        found.add(round(size))
        size *= 2 ** (1 / POINTS_PER_DOUBLING)
    return sorted(found)
