"""How many requests at once, and how much in a step, for the declared aim?

latency: as many sequences as leave each one's tokens fast, and steps that stall no answer for long.
throughput: as many as the cache holds, as far as the promised time a token allows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from rayserve.planner.fit import EngineLimits, Fit
from rayserve.planner.memory.simple import Cut
from rayserve.planner.timing import Timing, spread
from rayserve.planner.wishes import expected
from rayserve.spec import ClusterSpec

SEQS = 32
"""Where no latency is known."""
STEP_TOKENS = 2048
LEAST_STEP = 512
"""Below it products of a prompt's tokens lose speed (rooflines.COMPUTE_SHARES)."""
FLUENT_MS = 40.0
"""A token's time that still reads fluently: the limit of MLPerf Inference v5.0's interactive test
(Llama 2 70B). People read about a tenth as fast."""
MODEST = 1.5
"""Assumption: how much slower than alone a token may be where even one alone is hardly fluent."""

LEAST = 1.1
"""Assumption: a promise that one alone hardly keeps, or does not keep, still lets a few run."""


@dataclass(frozen=True)
class Chosen:
    """A value and why it was chosen; no reason where a person wrote it."""

    value: int
    reason: str = ""


@dataclass(frozen=True)
class Scene:
    """One model, on one kind of GPU, in one cut: what a choice may ask."""

    spec: ClusterSpec
    fit: Fit
    timing: Timing | None
    cut: Cut


def choose_step(scene: Scene, seqs: int, length: int) -> Chosen:
    """max_num_batched_tokens for so many sequences, where nobody wrote it.

    vLLM's own value for the GPU. With latency for aim and a promised first token, halved while a step
    would stall running answers for longer than that promise.
    """
    wanted = scene.spec.limits.max_num_batched_tokens
    if wanted != "auto":
        return Chosen(wanted)
    gpu, timing = scene.fit.gpu, scene.timing
    tokens = gpu.step_tokens
    own = f"vLLM's own choice for {gpu.name}"
    if timing is None:
        return at_least(Chosen(tokens, f"{own}: long prompts do not stall answers"), seqs)
    promised = scene.spec.slo.ttft_ms if scene.spec.aim == "latency" else 0
    limits = EngineLimits(tokens, seqs, length)
    pause = timing.pause(scene.cut, limits).total
    while promised and pause.middle > promised and tokens // 2 >= max(LEAST_STEP, seqs):
        tokens //= 2
        pause = timing.pause(scene.cut, EngineLimits(tokens, seqs, length)).total
    if tokens < gpu.step_tokens:
        own += f" ({gpu.step_tokens}), halved for slo.ttft_ms"
    reason = f"{own}: answers pause {spread(pause)} while such a step reads a prompt"
    if scene.spec.aim == "throughput":
        prompt, _ = expected(scene.spec, length)
        count = -(-prompt // tokens)
        steps = "one step" if count == 1 else f"{count} steps"
        reason = f"throughput first: {own}; an expected prompt of {prompt:,} tokens takes {steps}"
    return at_least(Chosen(tokens, reason), seqs)


def at_least(step: Chosen, seqs: int) -> Chosen:
    """A step holds a token of each sequence."""
    if seqs <= step.value:
        return step
    return Chosen(seqs, "at least a token for each of max_num_seqs")


def choose_seqs(scene: Scene, step_tokens: int, length: int) -> Chosen:
    """max_num_seqs by speed alone, where nobody wrote it; `within_cache` then looks at memory."""
    spec, timing = scene.spec, scene.timing
    wanted = spec.limits.max_num_seqs
    if wanted != "auto":
        return Chosen(wanted)
    most = scene.fit.gpu.step_seqs
    if spec.limits.max_num_batched_tokens != "auto":
        most = min(most, step_tokens)
    if timing is None:
        return unknown_speed(spec, most)
    ladder = _ladder(most)
    limit_ms, why = _limit(scene, step_tokens, length)
    times = {seqs: _token_ms(scene, step_tokens, length, seqs) for seqs in ladder}
    best = max((seqs for seqs in ladder if times[seqs] <= limit_ms), default=1)
    if best == most:
        whose = "vLLM's own choice" if most == scene.fit.gpu.step_seqs else "a token each of a step"
        return Chosen(best, f"{spec.aim} first: {whose}; a token takes about {times[best]:.0f} ms")
    more = next(seqs for seqs in ladder if seqs > best)
    reason = f"a token of {best} takes about {times[best]:.0f} ms, of {more} {times[more]:.0f} ms"
    return Chosen(best, f"{spec.aim} first: {reason}; {why}")


def unknown_speed(spec: ClusterSpec, most: int) -> Chosen:
    """max_num_seqs where no latency is known: a few for latency, vLLM's own for throughput."""
    if spec.aim == "throughput":
        return Chosen(most, "throughput first: vLLM's own choice")
    reason = "latency first: a token of 32 requests costs little more than one of 4"
    return Chosen(min(SEQS, most), reason)


def within_cache(scene: Scene, seqs: Chosen, limits: EngineLimits) -> Chosen:
    """No more sequences than the KV cache holds at the expected lengths, where the planner chose.

    Fewer sequences leave a larger cache, so their number is that which the cache beside them holds.
    """
    if scene.spec.limits.max_num_seqs != "auto":
        return seqs
    tokens = sum(expected(scene.spec, limits.length))

    def held(count: int) -> bool:
        one = replace(limits, seqs=count)
        return scene.fit.concurrency(scene.cut, one, tokens)[1] >= count

    few = largest(held, 1, seqs.value) or 1
    if few == seqs.value:
        return seqs
    return Chosen(few, f"as many as the KV cache beside them holds at {tokens:,} tokens each")


def largest(works: Callable[[int], bool], least: int, most: int) -> int:
    """The largest number of a range that works, where a smaller one works too; 0: not even `least`."""
    if not works(least):
        return 0
    if works(most):
        return most
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if works(middle) else (least, middle)
    return least


def _ladder(most: int) -> list[int]:
    """Powers of two up to `most`, and `most`."""
    return sorted({*(2**power for power in range(most.bit_length())), most})


def _limit(scene: Scene, step_tokens: int, length: int) -> tuple[float, str]:
    """(longest time of a token in ms, why): by the promise, and for latency by fluency."""
    spec, promised = scene.spec, scene.spec.slo.tpot_ms
    alone = _token_ms(scene, step_tokens, length, 1)
    limit, why = float("inf"), ""
    if spec.aim == "latency":
        limit, why = FLUENT_MS, f"{FLUENT_MS:g} ms read fluently"
        if MODEST * alone > limit:
            limit, why = MODEST * alone, f"alone it takes {alone:.0f} ms"
    kept = max(promised, LEAST * alone)
    return (kept, f"slo.tpot_ms is {promised:g}") if promised and kept < limit else (limit, why)


def _token_ms(scene: Scene, step_tokens: int, length: int, seqs: int) -> float:
    """The middle of what is expected of a token of so many sequences of the expected workload."""
    assert scene.timing is not None  # the callers have looked
    prompt, output = expected(scene.spec, length)
    limits = EngineLimits(max(step_tokens, seqs), seqs, length)
    return scene.timing.token(scene.cut, limits, seqs, prompt + output // 2).total.middle
