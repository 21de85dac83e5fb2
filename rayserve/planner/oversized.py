"""Which written step, batch or block takes the memory, and which number does a plan take instead?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from rayserve.planner.aims import STEP_TOKENS, largest
from rayserve.planner.fit import BLOCK_TOKENS, EngineLimits, Fit
from rayserve.planner.lengths import Try, written
from rayserve.planner.memory.simple import Cut
from rayserve.spec import ClusterSpec

BLOCK_SIZE = "block_size"
KERNEL_BLOCKS = 128
"""The largest block of which an attention backend takes multiples (data/precisions.yml)."""


def shorter_blocks(
    spec: ClusterSpec, fit: Fit, cut: Cut, limits: EngineLimits, attempt: Try
) -> str:
    """The block_size to write, where a request takes too much since it takes whole blocks; empty."""
    size = spec.engine_args.get(BLOCK_SIZE)
    if not isinstance(size, int) or size <= BLOCK_TOKENS:
        return ""
    # What divides the written size is taken too: every backend takes multiples of a power of two.
    step = math.gcd(size, KERNEL_BLOCKS)

    def of(count: int) -> dict[str, Any]:
        return {"engine_args": {**spec.engine_args, BLOCK_SIZE: count * step}}

    def most(judge: Callable[[Fit, Cut, EngineLimits], bool]) -> int:
        # No cache has more tokens than a GPU has bytes for.
        held = fit.requested_bytes // max(1, fit.token_bytes(cut))
        span = 1, max(1, min(size, held) // step)
        return largest(lambda n: judge(argued(fit, of(n)["engine_args"]), cut, limits), *span)

    counts = _planned(spec, of, (most(Fit.sure), most(Fit.holds)), attempt)
    told = told_number(BLOCK_SIZE, *(count * step for count in counts))
    return f"{told}, or remove it" if told else ""


def smaller_step(
    spec: ClusterSpec, fit: Fit, cut: Cut, limits: EngineLimits, attempt: Try
) -> Iterator[tuple[str, str]]:
    """(key, what to write) of max_num_seqs and of max_num_batched_tokens; empty: it does not help."""
    wanted = spec.limits
    free = wanted.max_num_batched_tokens == "auto"

    def sequences(count: int) -> EngineLimits:
        step = max(count, fit.gpu.step_tokens) if free else limits.step_tokens
        return replace(limits, seqs=count, step_tokens=step)

    def tokens(count: int) -> EngineLimits:
        return replace(limits, seqs=min(limits.seqs, count), step_tokens=count)

    def with_seqs(count: int) -> dict[str, Any]:
        return {"limits": wanted.model_copy(update={"max_num_seqs": count})}

    def with_tokens(count: int) -> dict[str, Any]:
        changed: dict[str, Any] = {"max_num_batched_tokens": count}
        if wanted.max_num_seqs != "auto":
            changed["max_num_seqs"] = min(wanted.max_num_seqs, count)
        return {"limits": wanted.model_copy(update=changed)}

    if wanted.max_num_seqs != "auto":
        found = _most(fit, cut, sequences, (1, limits.seqs))
        yield (
            "max_num_seqs",
            told_number("max_num_seqs", *_planned(spec, with_seqs, found, attempt)),
        )
    if not free:
        least = STEP_TOKENS if spec.scheduling.chunked_prefill else limits.length
        span = (min(limits.step_tokens, least), limits.step_tokens)
        sure, best = _planned(spec, with_tokens, _most(fit, cut, tokens, span), attempt)
        told = told_number("max_num_batched_tokens", sure, best)
        if told and wanted.max_num_seqs != "auto" and wanted.max_num_seqs > (sure or best):
            told += f", with max_num_seqs ({wanted.max_num_seqs}) no larger than it"
        yield "max_num_batched_tokens", told


def _planned(
    spec: ClusterSpec,
    of: Callable[[int], dict[str, Any]],
    found: tuple[int, int],
    attempt: Try,
) -> tuple[int, int]:
    """Of the number that fits for sure and the one at best, those of which a plan says so; 0: none.

    Memory was asked for the least limits and one cut; a plan may choose longer requests and another
    cut, and is then sure of a smaller number only.
    """

    def told(count: int, *, sure: bool) -> bool:
        made = attempt(spec.model_copy(update=of(count))) if count else None
        return made is not None and (made.sure or not sure)

    fewer = (found[0] // part for part in (1, 2, 4))
    least = next((count for count in fewer if told(count, sure=True)), 0)
    return least, found[1] if told(found[1], sure=False) else least


def _most(
    fit: Fit, cut: Cut, at: Callable[[int], EngineLimits], span: tuple[int, int]
) -> tuple[int, int]:
    """The largest number of a range that fits for sure, and at best; 0: none."""
    sure = largest(lambda count: fit.sure(cut, at(count)), *span)
    return sure, largest(lambda count: fit.holds(cut, at(count)), *span)


def told_number(name: str, sure: int, best: int) -> str:
    """The number to write; empty: there is none."""
    return written(name, str(sure or ""), str(best or ""))


def argued(fit: Fit, arguments: dict[str, Any]) -> Fit:
    """The judge of the same spec with other `engine_args`."""
    return refit(fit, fit.spec.model_copy(update={"engine_args": arguments}))


def refit(fit: Fit, spec: ClusterSpec) -> Fit:
    """The judge of another spec of the same model."""
    return Fit(spec, fit.profile, fit.architecture, fit.gpu, fit.checkpoint_bytes, fit.starts)
