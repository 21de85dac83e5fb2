"""How long may one request be, and how many users remain then?

One answer for a refused max_model_len and for a note about a shortened one. It is a length that a plan
takes when it is written, since a plan of it was made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from rayserve.planner.aims import largest
from rayserve.planner.fit import BLOCK_TOKENS, EngineLimits, Fit
from rayserve.planner.memory.simple import Cut
from rayserve.spec import ClusterSpec

ROUND_TOKENS = 1024
"""Lengths that people are told to write are multiples of this."""
MEASURE = "where only a measurement tells"


@dataclass(frozen=True)
class Tried:
    """What a plan of another spec of the same model comes to."""

    cut: Cut
    limits: EngineLimits
    sure: bool
    """It says "fits", or, without GPUs, nothing of memory; else only a measurement tells."""


Try = Callable[[ClusterSpec], Tried | None]
"""Plans another spec of the same model; None: it would be refused."""


@dataclass(frozen=True)
class Possible:
    """The longest max_model_len that a plan takes; None: no shorter one helps."""

    sure: Tried | None
    """That is said to fit."""
    best: Tried | None
    """That nothing proves not to fit."""

    def told(self, *, free: bool) -> str:
        """What to write; empty: nothing helps. `free`: max_num_seqs follows, and is told."""
        sure, best = (
            f"{one.limits.length}{f' (max_num_seqs {one.limits.seqs})' if free else ''}"
            if one is not None
            else ""
            for one in (self.sure, self.best)
        )
        return written("max_model_len", sure, best)


def written(name: str, sure: str, best: str) -> str:
    """A key with the value that fits for sure, and the one that may; empty: there is none."""
    if not best:
        return ""
    if not sure:
        return f"write {name}: {best} at the very best, {MEASURE}"
    if sure == best:
        return f"write {name}: {best} at most"
    return f"write {name}: {sure}, which is sure to fit, or {best} at the very best, {MEASURE}"


def possible(fit: Fit, cut: Cut, limits: EngineLimits, attempt: Try, *, above: int = 0) -> Possible:
    """What stays possible below the length of `limits`, and above another.

    Args:
        fit: the judge of memory.
        cut: where to look first; the plan of a length takes its own.
        limits: those that do not fit, with the fewest sequences that the spec allows.
        attempt: makes a plan.
        above: shorter lengths are no answer.
    """
    spec = fit.spec

    def works(length: int, *, sure: bool) -> Tried | None:
        found = attempt(shortened(spec, length)) if length > above else None
        return found if found is not None and (found.sure or not sure) else None

    def longest(judge: Callable[[Cut, EngineLimits], bool], *, sure: bool) -> Tried | None:
        reached = _reach(fit, cut, limits, judge)
        fewest, most = above // ROUND_TOKENS + 1, reached // ROUND_TOKENS
        # A model's own length need be no multiple.
        if reached == limits.length and (found := works(reached, sure=sure)):
            return found
        if most < fewest:
            return None
        if found := works(most * ROUND_TOKENS, sure=sure):
            return found  # as nearly always: memory alone told it
        few = largest(lambda n: bool(works(n * ROUND_TOKENS, sure=sure)), fewest, most)
        return works(few * ROUND_TOKENS, sure=sure)

    best = longest(fit.holds, sure=False)
    return Possible(longest(fit.sure, sure=True) if best else None, best)


def _reach(
    fit: Fit, cut: Cut, limits: EngineLimits, works: Callable[[Cut, EngineLimits], bool]
) -> int:
    """The longest request that memory alone allows with these limits, up to their own length."""

    def some(blocks: int) -> bool:
        length = blocks * BLOCK_TOKENS
        return works(cut, replace(limits, length=length, step_tokens=_step(fit, limits, length)))

    if works(cut, limits):
        return limits.length
    most = limits.length // BLOCK_TOKENS
    return BLOCK_TOKENS * largest(some, 1, most) if most else 0


def _step(fit: Fit, limits: EngineLimits, length: int) -> int:
    """Tokens of a step for that length: without chunked prefill one holds the longest prompt."""
    if fit.spec.scheduling.chunked_prefill:
        return limits.step_tokens
    written = fit.spec.limits.max_num_batched_tokens
    return max(length, written if written != "auto" else fit.gpu.step_tokens)


# ── a shorter length in the spec ────────────────────────────────────────────────────────────────


def shortened(spec: ClusterSpec, length: int) -> ClusterSpec:
    """The spec with a max_model_len, and with what must follow it where it is written."""
    door, work = spec.door, spec.workload
    limits = spec.limits.model_copy(update={"max_model_len": length})
    changed: dict[str, object] = {"limits": limits}
    if door.max_tokens != "auto" and door.max_tokens > length:
        changed["door"] = door.model_copy(update={"max_tokens": length})
    if "workload" in spec.model_fields_set and work.prompt_tokens + work.output_tokens > length:
        output = min(work.output_tokens, max(1, length // 2))
        tokens = {"prompt_tokens": max(1, length - output), "output_tokens": output}
        changed["workload"] = work.model_copy(update=tokens)
    return spec.model_copy(update=changed)


def within(spec: ClusterSpec, length: int) -> str:
    """Which other written keys must follow a max_model_len of so many tokens (spec/rules.py)."""
    most, work = spec.door.max_tokens, spec.workload
    asked = work.prompt_tokens + work.output_tokens
    keys = [f"door.max_tokens ({most})"] if most != "auto" and most > length else []
    if "workload" in spec.model_fields_set and asked > length:
        keys.append(f"prompt_tokens and output_tokens of workload ({asked} together)")
    return f", with {' and '.join(keys)} no larger than it" if keys else ""
