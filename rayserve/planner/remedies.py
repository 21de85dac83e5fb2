"""What would hold, where this does not: which length, batch, cut, checkpoint or number of GPUs?

Every answer is computed by the same judge of memory that refused; none is a rule of thumb.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from rayserve.documents import Loc
from rayserve.errors import DoesNotFitError, SpecError
from rayserve.planner.fit import BLOCKS, EngineLimits, Fit
from rayserve.planner.lengths import MEASURE, Try, possible, within
from rayserve.planner.memory.simple import Cut
from rayserve.planner.oversized import (
    BLOCK_SIZE,
    argued,
    refit,
    shorter_blocks,
    smaller_step,
    told_number,
)
from rayserve.planner.placement import cuts, gangs, sizes_by_heads
from rayserve.planner.profile import scaled_bits
from rayserve.planner.support.divisibility import tensor_sizes
from rayserve.planner.support.limits import cut_shapes
from rayserve.planner.support.schemes import Scheme
from rayserve.planner.weights.architecture import Architecture
from rayserve.planner.weights.module_names import PART
from rayserve.planner.weights.modules import Rotary
from rayserve.planner.weights.quantization import Quantization
from rayserve.planner.weights.storage import BLOCK, CHANNEL, FP8, GROUP, INT8, PACKED, Storage
from rayserve.spec import ClusterSpec, NodePool, serving_pool

FOUR_BITS, EIGHT_BITS = 5, 9
"""Bits of a weight, with its scales, up to which it counts as one of 4 bits, and of 8."""
GROUP_SIZE = 128
"""Weights that share a scale in most published checkpoints of 4 bits."""
HOST_GPUS = (2, 4, 8)
"""GPUs that hosts are commonly built with."""
MOST_HOSTS = 16
"""Assumption: whoever has not found room in so many hosts takes a smaller model."""
WIDE = "float32"
CUT = "parallelism: {{tensor: {tensor}, pipeline: {pipeline}}}"


def does_not_fit(
    spec: ClusterSpec, fit: Fit, cut: Cut, limits: EngineLimits, attempt: Try | None
) -> DoesNotFitError:
    """The refusal of limits that do not fit, with the nearest value that does.

    `attempt` plans what may be told; None: nobody reads what to do.
    """
    do, at = _remedy(spec, fit, cut, limits, attempt) if attempt else ("", ())
    needed, found = fit.refusal(cut, limits)
    error = DoesNotFitError(needed, found=found, do=do, where=spec.where(*at))
    error.weights_bytes = fit.weights(cut)
    return error


def _remedy(
    spec: ClusterSpec, fit: Fit, cut: Cut, limits: EngineLimits, attempt: Try
) -> tuple[str, Loc]:
    """(what to do, the key to change)."""
    if fit.blocks:
        return _blocks(spec, fit, cut, limits, attempt)
    if fit.pinned_bytes:
        return _pinned(spec, fit, cut, limits, attempt)
    if told := shorter_blocks(spec, fit, cut, limits, attempt):
        return told, ("engine_args", BLOCK_SIZE)
    shorter = _shorter(spec, fit, cut, limits, attempt)
    if told := _narrower(spec, attempt):
        return f"{told}, or {shorter}" if shorter else told, ("precision", "dtype")
    if shorter:
        return shorter, ("limits", "max_model_len")
    for key, told in smaller_step(spec, fit, cut, limits, attempt):
        if told:
            return f"{told}: the room of more takes the memory", ("limits", key)
    return _elsewhere(spec, fit, cut, limits, attempt), ("model", "config")


def _narrower(spec: ClusterSpec, attempt: Try) -> str:
    """That weights and cache of 32 bits become half as large in 16; empty: it does not help."""
    if spec.precision.dtype != WIDE:
        return ""
    precision = spec.precision.model_copy(update={"dtype": "auto"})
    wide = [("write dtype: auto", spec.model_copy(update={"precision": precision}))]
    return _first(wide, attempt)[0]


def _pinned(
    spec: ClusterSpec, fit: Fit, cut: Cut, limits: EngineLimits, attempt: Try
) -> tuple[str, Loc]:
    """That the KV cache takes what is left, and what else is needed where that is too little."""
    free = spec.model_copy(
        update={"limits": spec.limits.model_copy(update={"kv_cache_gib": "auto"})}
    )
    if attempt(free) is None:
        do, at = _remedy(free, refit(fit, free), cut, limits, attempt)
        return f"write kv_cache_gib: auto, and {do}", at
    small = fit.pinned_bytes <= limits.length * fit.token_bytes(cut)
    do = "raise kv_cache_gib, or write auto" if small else "write kv_cache_gib: auto"
    return do, ("limits", "kv_cache_gib")


def _blocks(
    spec: ClusterSpec, fit: Fit, cut: Cut, limits: EngineLimits, attempt: Try
) -> tuple[str, Loc]:
    """The number of blocks to write, or that nobody should write one."""
    least, sure, best = fit.block_range(cut, limits)

    def held(blocks: int, judge: Callable[[Fit, Cut, EngineLimits], bool]) -> int:
        fixed = argued(fit, {**spec.engine_args, BLOCKS: blocks})
        return blocks if blocks >= least and judge(fixed, cut, limits) else 0

    told = told_number(BLOCKS, held(sure, Fit.sure), held(best, Fit.holds))
    if told and fit.blocks < least:
        told = f"write {BLOCKS}: {least} at least, for one request, and {best} at most"
    free = argued(fit, {key: value for key, value in spec.engine_args.items() if key != BLOCKS})
    if free.holds(cut, limits):
        return f"{told}, or remove it" if told else "remove it", ("engine_args", BLOCKS)
    if told:
        return told, ("engine_args", BLOCKS)
    do, at = _remedy(free.spec, free, cut, limits, attempt)
    return f"remove engine_args.{BLOCKS}, and {do}", at


def _shorter(spec: ClusterSpec, fit: Fit, cut: Cut, limits: EngineLimits, attempt: Try) -> str:
    """The max_model_len to write; empty: none helps."""
    found = possible(fit, cut, limits, attempt)
    told, least = found.told(free=spec.limits.max_num_seqs == "auto"), found.sure or found.best
    return f"{told}{within(spec, least.limits.length)}" if least is not None else ""


# ── where neither length nor batch is the trouble ───────────────────────────────────────────────


_Way = tuple[str, ClusterSpec]
"""What to do, and the spec that it makes."""


def _elsewhere(spec: ClusterSpec, fit: Fit, cut: Cut, limits: EngineLimits, attempt: Try) -> str:
    """What holds the weights: as little as possible beyond the pool that is there."""
    stays, _ = _first(_of_pool(spec, fit), attempt)
    if stays:
        return stays
    lighter = _lightest(spec, fit, limits)
    ways = [lighter] if lighter else []
    if more := _more_gpus(spec, fit, cut, limits, attempt):
        ways.append(more)
    if ways:
        return ", or ".join(ways)
    fewer = "no checkpoint of 8 or 4 bits a weight" if _bits(fit) else "no other cut"
    return (
        f"take a smaller model or larger GPUs: {fewer} fits, nor do {MOST_HOSTS} such hosts hold it"
    )


def _first(ways: Iterable[_Way], attempt: Try) -> tuple[str, bool]:
    """(the first way whose plan fits, whether for sure), else the first that may; empty: none."""
    maybe = ""
    for told, spec in ways:
        found = attempt(spec)
        if found is None:
            continue
        said = told.format(tensor=found.cut.tensor, pipeline=found.cut.pipeline)
        if found.sure:
            return said, True
        maybe = maybe or f"{said}, {MEASURE}"
    return maybe, False


def _of_pool(spec: ClusterSpec, fit: Fit) -> Iterator[_Way]:
    """With the hosts, the GPUs and the checkpoint that are there."""
    usual = type(spec.limits).model_fields["gpu_memory_utilization"].default
    if spec.limits.gpu_memory_utilization < usual:
        limits = spec.limits.model_copy(update={"gpu_memory_utilization": usual})
        told = f"write gpu_memory_utilization: {usual}"
        yield told, spec.model_copy(update={"limits": limits})
    if spec.parallelism.tensor == spec.parallelism.pipeline == "auto":
        return  # all were tried
    for cut in _pool_cuts(spec, fit):
        yield f"write {CUT}", _cut_so(spec, cut)


def _cut_so(spec: ClusterSpec, cut: Cut) -> ClusterSpec:
    parts = {"tensor": cut.tensor, "pipeline": cut.pipeline}
    return spec.model_copy(update={"parallelism": spec.parallelism.model_copy(update=parts)})


def _lightest(spec: ClusterSpec, fit: Fit, limits: EngineLimits) -> str:
    """A checkpoint of fewer bits that holds for sure, else one that may; empty: none.

    No plan of it can be made without its config.json, so memory alone is asked.
    """
    maybe = ""
    narrow = ", with dtype: auto" if spec.precision.dtype == WIDE else ""
    for bits in _bits(fit):
        light = _lighter(fit, bits)
        for cut in _pool_cuts(spec, light):
            told = f"take a checkpoint of {bits} bits a weight in all linear layers{_as(spec, cut)}"
            if _asked(light.sure, cut, limits):
                return f"{told}{narrow}"
            if not maybe and _asked(light.expects, cut, limits):
                maybe = f"{told}{narrow}, {MEASURE}"
    return maybe


def _as(spec: ClusterSpec, cut: Cut) -> str:
    wanted = spec.parallelism
    kept = {(wanted.tensor, cut.tensor), (wanted.pipeline, cut.pipeline)}
    if all(key in ("auto", found) for key, found in kept):
        return ""
    return f" with tensor {cut.tensor} x pipeline {cut.pipeline}"


def _bits(fit: Fit) -> tuple[int, ...]:
    """Fewer bits a weight than the checkpoint has, in which models are published."""
    bits = fit.profile.weight_bits
    return (8, 4) if bits > EIGHT_BITS else (4,) if bits > FOUR_BITS else ()


def _more_gpus(spec: ClusterSpec, fit: Fit, cut: Cut, limits: EngineLimits, attempt: Try) -> str:
    """With more GPUs of the same kind: those that fit for sure, else the fewest that may.

    A plan of each costs a tenth of a second. So where some may, up to twice as many are looked at, and
    a plan is made only of those whose memory alone is sure.
    """
    wanted = spec.parallelism
    fixed = not wanted.tensor == wanted.pipeline == "auto"
    maybe, most = "", math.inf
    for pool, able in _larger_pools(spec, fit, cut, limits):
        total = pool.hosts * pool.gpus_per_host
        if total > most:
            break
        sure = [one for one in able if _asked(fit.sure, one, limits)]
        if maybe and not sure:
            continue
        old = serving_pool(spec)
        pools = [pool if one is old else one for one in spec.node_pools]
        there = spec.model_copy(update={"node_pools": pools})
        one_host = f"{pool.gpus_per_host} such GPUs on a host"
        told = f"take {one_host if pool.hosts == 1 else f'{pool.hosts} such hosts'}"
        # Where some hosts may, a plan of more chooses the same cut: only a written one is another.
        ways = (
            []
            if maybe and pool.hosts > 1
            else [(f"{told} (tensor {{tensor}} x pipeline {{pipeline}})", there)]
        )
        written_so = sure if maybe or not fixed else able
        ways += [(f"{told}, with {CUT}", _cut_so(there, one)) for one in written_so]
        said, surely = _first(ways, attempt)
        if surely:
            return said
        if said and not maybe:
            maybe, most = said, 2 * total
    return maybe


def _larger_pools(
    spec: ClusterSpec, fit: Fit, cut: Cut, limits: EngineLimits
) -> Iterator[tuple[NodePool, list[Cut]]]:
    """More GPUs on one host, as far as hosts are built, and more hosts: the fewest GPUs first.

    Each with the cuts that memory allows and no smaller pool had; first the one that a plan chooses.
    """
    pool = serving_pool(spec)
    larger = [(1, gpus) for gpus in HOST_GPUS if gpus > pool.gpus_per_host]
    more = [(hosts, pool.gpus_per_host) for hosts in range(pool.hosts + 1, MOST_HOSTS + 1)]
    least = fit.weights(cut) * cut.tensor * cut.pipeline / 2
    most = spec.replicas.max
    seen = {one for one in _pool_cuts(spec, fit) if gangs(pool, one) >= most}
    for hosts, gpus in sorted((*larger, *more), key=lambda one: (math.prod(one), one[0])):
        sizes = _sizes(fit, gpus)
        # Of a host's GPUs in several stages more may be sure than of as many ranks, which NCCL joins.
        whole = [Cut(one, gpus // one) for one in sorted(sizes, reverse=True) if gpus % one == 0]
        ways = [*(whole if hosts == 1 else []), *cuts(hosts, gpus, sizes, fit.profile.layers)]
        resized = pool.model_copy(update={"hosts": hosts, "gpus_per_host": gpus})
        new = [
            one for one in dict.fromkeys(ways) if one not in seen and gangs(resized, one) >= most
        ]
        seen.update(new)
        able = [
            one
            for one in new
            if one.tensor * one.pipeline * fit.requested_bytes >= least
            and _asked(fit.expects, one, limits)
        ]
        if able:
            yield resized, able


def _asked(judge: Callable[[Cut, EngineLimits], bool], cut: Cut, limits: EngineLimits) -> bool:
    """The judge's answer; no of a cut that vLLM does not make."""
    try:
        return judge(cut, limits)
    except SpecError:
        return False


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
