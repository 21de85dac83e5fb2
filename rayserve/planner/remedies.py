"""What would hold, where this does not: which length, batch, cut, checkpoint or number of GPUs?

Every answer is computed by the same judge of memory that refused; none is a rule of thumb.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rayserve.documents import Loc
from rayserve.errors import DoesNotFitError, SpecError
from rayserve.planner.aims import STEP_TOKENS, Chosen, Scene, largest, within_cache
from rayserve.planner.fit import BLOCK_TOKENS, BLOCKS, EngineLimits, Fit
from rayserve.planner.memory.simple import Cut
from rayserve.planner.placement import cuts, sizes_by_heads
from rayserve.planner.profile import scaled_bits
from rayserve.planner.support.divisibility import tensor_sizes
from rayserve.planner.support.limits import cut_shapes
from rayserve.planner.support.schemes import Scheme
from rayserve.planner.weights.architecture import Architecture
from rayserve.planner.weights.module_names import PART
from rayserve.planner.weights.modules import Rotary
from rayserve.planner.weights.quantization import Quantization
from rayserve.planner.weights.storage import BLOCK, CHANNEL, FP8, GROUP, INT8, PACKED, Storage
from rayserve.spec import ClusterSpec, serving_pool

ROUND_TOKENS = 1024
"""Lengths that people are told to write are multiples of this."""
FOUR_BITS, EIGHT_BITS = 5, 9
"""Bits of a weight, with its scales, up to which it counts as one of 4 bits, and of 8."""
GROUP_SIZE = 128
"""Weights that share a scale in most published checkpoints of 4 bits."""
HOST_GPUS = (2, 4, 8)
"""GPUs that hosts are commonly built with."""
MOST_HOSTS = 16
"""Assumption: whoever has not found room in so many hosts takes a smaller model."""
MEASURE = "where only a measurement tells"


@dataclass(frozen=True)
class Reach:
    """Longest max_model_len, in tokens; 0: none."""

    sure: int
    """That fits even where every uncertain term has its worst value."""
    best: int
    """That fits where every one has its best."""


def reach(fit: Fit, cut: Cut, limits: EngineLimits) -> Reach:
    """How long one request may be with these limits, up to their own length."""

    def longest(works: Callable[[Cut, EngineLimits], bool]) -> int:
        def some(blocks: int) -> bool:
            length = blocks * BLOCK_TOKENS
            at = replace(limits, length=length, step_tokens=_step(fit, limits, length))
            return works(cut, at)

        if works(cut, limits):
            return limits.length
        most = limits.length // BLOCK_TOKENS
        return BLOCK_TOKENS * largest(some, 1, most) if most else 0

    return Reach(longest(fit.sure), longest(fit.holds))


def _step(fit: Fit, limits: EngineLimits, length: int) -> int:
    """Tokens of a step for that length: without chunked prefill one holds the longest prompt."""
    if fit.spec.scheduling.chunked_prefill:
        return limits.step_tokens
    written = fit.spec.limits.max_num_batched_tokens
    return max(length, written if written != "auto" else fit.gpu.step_tokens)


def does_not_fit(
    spec: ClusterSpec, fit: Fit, cut: Cut, limits: EngineLimits, seqs: int = 1
) -> DoesNotFitError:
    """The refusal of limits that do not fit, with the nearest value that does.

    `seqs`: max_num_seqs that the planner would choose where memory is no matter.
    """
    do, at = _remedy(spec, fit, cut, limits, seqs)
    needed, found = fit.refusal(cut, limits)
    error = DoesNotFitError(needed, found=found, do=do, where=spec.where(*at))
    error.weights_bytes = fit.weights(cut)
    return error


def _remedy(
    spec: ClusterSpec, fit: Fit, cut: Cut, limits: EngineLimits, seqs: int
) -> tuple[str, Loc]:
    """(what to do, the key to change)."""
    if fit.blocks:
        return _blocks(spec, fit, cut, limits, seqs)
    if fit.pinned_bytes:
        small = fit.pinned_bytes <= limits.length * fit.token_bytes(cut)
        do = "raise kv_cache_gib, or write auto" if small else "write kv_cache_gib: auto"
        return do, ("limits", "kv_cache_gib")
    if told := _shorter(spec, fit, cut, limits, seqs):
        return told, ("limits", "max_model_len")
    if told := _smaller_step(spec, fit, cut, limits):
        return told, ("limits", "max_num_seqs")
    return _elsewhere(spec, fit, cut, limits), ("model", "config")


def _blocks(
    spec: ClusterSpec, fit: Fit, cut: Cut, limits: EngineLimits, seqs: int
) -> tuple[str, Loc]:
    """The number of blocks to write, or that nobody should write one."""
    least, sure, best = fit.block_range(cut, limits)

    def held(blocks: int, judge: str) -> int:
        fixed = _argued(fit, {**spec.engine_args, BLOCKS: blocks})
        return blocks if blocks >= least and getattr(fixed, judge)(cut, limits) else 0

    told = _written(BLOCKS, held(sure, "sure"), held(best, "holds"))
    if told and fit.blocks < least:
        told = f"write {BLOCKS}: {least} at least, for one request, and {best} at most"
    free = _argued(fit, {key: value for key, value in spec.engine_args.items() if key != BLOCKS})
    if free.holds(cut, limits):
        return f"{told}, or remove it" if told else "remove it", ("engine_args", BLOCKS)
    if told:
        return told, ("engine_args", BLOCKS)
    do, at = _remedy(free.spec, free, cut, limits, seqs)
    return f"remove engine_args.{BLOCKS}, and {do}", at


def _argued(fit: Fit, arguments: dict[str, Any]) -> Fit:
    """The judge of the same spec with other `engine_args`."""
    return _refit(fit, fit.spec.model_copy(update={"engine_args": arguments}))


def _shorter(spec: ClusterSpec, fit: Fit, cut: Cut, limits: EngineLimits, seqs: int) -> str:
    """The max_model_len to write; empty: none helps."""
    best = reach(fit, cut, limits).best // ROUND_TOKENS * ROUND_TOKENS
    if not best or best >= limits.length:
        return ""
    few = limits
    if seqs > limits.seqs:
        held = within_cache(
            Scene(spec, fit, None, cut), Chosen(seqs), replace(limits, seqs=seqs, length=best)
        )
        few = replace(limits, seqs=max(limits.seqs, held.value))
    sure = reach(fit, cut, few).sure // ROUND_TOKENS * ROUND_TOKENS
    told = _written("max_model_len", sure, best)
    return f"{told}{within(spec, sure or best)}"


def within(spec: ClusterSpec, length: int) -> str:
    """Which other written keys must follow a max_model_len of so many tokens (spec/rules.py)."""
    most, work = spec.door.max_tokens, spec.workload
    asked = work.prompt_tokens + work.output_tokens
    keys = [f"door.max_tokens ({most})"] if most != "auto" and most > length else []
    if "workload" in spec.model_fields_set and asked > length:
        keys.append(f"prompt_tokens and output_tokens of workload ({asked} together)")
    return f", with {' and '.join(keys)} no larger than it" if keys else ""


def _smaller_step(spec: ClusterSpec, fit: Fit, cut: Cut, limits: EngineLimits) -> str:
    """The max_num_seqs or max_num_batched_tokens to write; empty: neither helps."""
    wanted = spec.limits
    free = wanted.max_num_batched_tokens == "auto"

    def sequences(count: int) -> EngineLimits:
        step = max(count, fit.gpu.step_tokens) if free else limits.step_tokens
        return replace(limits, seqs=count, step_tokens=step)

    def tokens(count: int) -> EngineLimits:
        return replace(limits, seqs=min(limits.seqs, count), step_tokens=count)

    told = ""
    if wanted.max_num_seqs != "auto":
        told = _written("max_num_seqs", *_most(fit, cut, sequences, (1, limits.seqs)))
    if not told and not free:
        least = STEP_TOKENS if spec.scheduling.chunked_prefill else limits.length
        span = (min(limits.step_tokens, least), limits.step_tokens)
        sure, best = _most(fit, cut, tokens, span)
        told = _written("max_num_batched_tokens", sure, best)
        if told and wanted.max_num_seqs != "auto" and wanted.max_num_seqs > (sure or best):
            told += f", with max_num_seqs ({wanted.max_num_seqs}) no larger than it"
    return f"{told}: the room of more takes the memory" if told else ""


def _most(
    fit: Fit, cut: Cut, at: Callable[[int], EngineLimits], span: tuple[int, int]
) -> tuple[int, int]:
    """The largest number of a range that fits for sure, and at best; 0: none."""
    sure = largest(lambda count: fit.sure(cut, at(count)), *span)
    return sure, largest(lambda count: fit.holds(cut, at(count)), *span)


def _written(name: str, sure: int, best: int) -> str:
    """The value to write; empty: there is none."""
    if not best:
        return ""
    if not sure:
        return f"write {name}: {best} at the very best, {MEASURE}"
    if sure >= best:
        return f"write {name}: {best} at most"
    return f"write {name}: {sure}, which is sure to fit, or {best} at the very best, {MEASURE}"


# ── where neither length nor batch is the trouble ───────────────────────────────────────────────


@dataclass(frozen=True)
class _Way:
    """Something else that may be tried."""

    fit: Fit
    cut: Cut
    told: str


def _elsewhere(spec: ClusterSpec, fit: Fit, cut: Cut, limits: EngineLimits) -> str:
    """What holds the weights: as little as possible beyond the pool that is there."""
    stays = _first(_of_pool(spec, fit, cut), limits)
    if stays:
        return stays
    lighter = _first(_of_fewer_bits(spec, fit), limits)
    ways = [lighter] if lighter else []
    if more := _first(_of_more_gpus(spec, fit, cut), limits):
        ways.append(more)
    if ways:
        return ", or ".join(ways)
    fewer = "no checkpoint of 8 or 4 bits a weight" if _bits(fit) else "no other cut"
    return (
        f"take a smaller model or larger GPUs: {fewer} fits, nor do {MOST_HOSTS} such hosts hold it"
    )


def _first(ways: Iterable[_Way], limits: EngineLimits) -> str:
    """The first way that is sure to hold, else the first that may, said so; empty: none."""
    maybe = ""
    for way in ways:
        try:
            if way.fit.sure(way.cut, limits):
                return way.told
            if not maybe and way.fit.expects(way.cut, limits):
                maybe = f"{way.told}, {MEASURE}"
        except SpecError:  # a cut that vLLM does not make
            continue
    return maybe


def _of_pool(spec: ClusterSpec, fit: Fit, cut: Cut) -> Iterator[_Way]:
    """With the hosts, the GPUs and the checkpoint that are there."""
    usual = type(spec.limits).model_fields["gpu_memory_utilization"].default
    if spec.limits.gpu_memory_utilization < usual:
        limits = spec.limits.model_copy(update={"gpu_memory_utilization": usual})
        roomy = _refit(fit, spec.model_copy(update={"limits": limits}))
        yield _Way(roomy, cut, f"write gpu_memory_utilization: {usual}")
    if spec.parallelism.tensor == spec.parallelism.pipeline == "auto":
        return  # all were tried
    for other in _pool_cuts(spec, fit):
        told = f"write parallelism: {{tensor: {other.tensor}, pipeline: {other.pipeline}}}"
        yield _Way(fit, other, told)


def _of_fewer_bits(spec: ClusterSpec, fit: Fit) -> Iterator[_Way]:
    for bits in _bits(fit):
        light = _lighter(fit, bits)
        for cut in _pool_cuts(spec, light):
            yield _Way(
                light,
                cut,
                f"take a checkpoint of {bits} bits a weight in all linear layers{_as(spec, cut)}",
            )


def _as(spec: ClusterSpec, cut: Cut) -> str:
    wanted = spec.parallelism
    kept = {(wanted.tensor, cut.tensor), (wanted.pipeline, cut.pipeline)}
    if all(written in ("auto", found) for written, found in kept):
        return ""
    return f" with tensor {cut.tensor} x pipeline {cut.pipeline}"


def _bits(fit: Fit) -> tuple[int, ...]:
    """Fewer bits a weight than the checkpoint has, in which models are published."""
    bits = fit.profile.weight_bits
    return (8, 4) if bits > EIGHT_BITS else (4,) if bits > FOUR_BITS else ()


def _of_more_gpus(spec: ClusterSpec, fit: Fit, cut: Cut) -> Iterator[_Way]:
    """With more GPUs of the same kind: on one host, as far as hosts are built, and on more hosts."""
    pool = serving_pool(spec)
    larger = [(1, gpus) for gpus in HOST_GPUS if gpus > pool.gpus_per_host]
    more = [(hosts, pool.gpus_per_host) for hosts in range(pool.hosts + 1, MOST_HOSTS + 1)]
    least = fit.weights(cut) * cut.tensor * cut.pipeline / 2
    seen = {cut, *_pool_cuts(spec, fit)}
    for hosts, gpus in sorted((*larger, *more), key=lambda one: (math.prod(one), one[0])):
        sizes = _sizes(fit, gpus)
        # Of a host's GPUs in several stages more may be sure than of as many ranks, which NCCL joins.
        whole = [Cut(one, gpus // one) for one in sorted(sizes, reverse=True) if gpus % one == 0]
        ways = cuts(hosts, gpus, sizes, fit.profile.layers)
        for other in (*whole, *ways) if hosts == 1 else ways:
            ranks = other.tensor * other.pipeline
            if other in seen or ranks * fit.requested_bytes < least:
                continue
            seen.add(other)
            where = f"{gpus} such GPUs on a host" if hosts == 1 else f"{hosts} such hosts"
            told = f"take {where} (tensor {other.tensor} x pipeline {other.pipeline})"
            yield _Way(fit, other, told)


def _pool_cuts(spec: ClusterSpec, fit: Fit) -> list[Cut]:
    pool = serving_pool(spec)
    sizes = _sizes(fit, pool.gpus_per_host)
    return list(cuts(pool.hosts, pool.gpus_per_host, sizes, fit.profile.layers))


def _sizes(fit: Fit, gpus: int) -> tuple[int, ...]:
    """Sizes of tensor parallelism on a host of so many GPUs, ascending."""
    sizes = sizes_by_heads(fit.profile, gpus)
    architecture = fit.architecture
    if architecture is None:
        return sizes
    shapes = cut_shapes(architecture, {}, _schemes(architecture), fp8_compute=True)
    whole = bool(fit.spec.engine_args.get("enable_expert_parallel"))
    return tuple(set(sizes) & set(tensor_sizes(shapes, gpus, expert_parallel=whole))) or (1,)


def _schemes(architecture: Architecture) -> tuple[Scheme, ...]:
    """The formats of the matrices, as far as a cut must keep their groups and blocks whole."""
    formats = architecture.quantization
    stored = [storage for _, storage in formats.groups if storage] if formats is not None else []
    return tuple(
        Scheme(
            formats.method if formats is not None else "",
            f"int{one.bits}" if one.kind in {PACKED, INT8} else one.kind,
            group=one.group or -1,
            block=one.block if one.scale == BLOCK else None,
        )
        for one in stored
    )


def _lighter(fit: Fit, bits: int) -> Fit:
    """The same model with weights of so many bits."""
    scaled = scaled_bits(bits, GROUP_SIZE if bits == 4 else 0)
    profile = replace(fit.profile, weight_bits=scaled)
    architecture = fit.architecture
    if architecture is None:
        held = int(fit.checkpoint_bytes * scaled / fit.profile.weight_bits)
        return Fit(fit.spec, profile, None, fit.gpu, held)
    storage = Storage(FP8, CHANNEL)
    if bits == 4:
        storage = Storage(PACKED, GROUP, bits=4, group=GROUP_SIZE)
    # Towers are left as they are in what is published.
    left = tuple(
        {
            module.name.split(".")[0]
            for module in architecture.tower
            if not isinstance(module, Rotary)
        }
    )
    formats = Quantization("compressed-tensors", ((("Linear",), storage),), left, PART)
    return Fit(fit.spec, profile, replace(architecture, quantization=formats), fit.gpu)


def _refit(fit: Fit, spec: ClusterSpec) -> Fit:
    return Fit(spec, fit.profile, fit.architecture, fit.gpu, fit.checkpoint_bytes, fit.starts)
