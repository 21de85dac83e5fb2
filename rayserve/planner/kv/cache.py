"""How many blocks, tokens and requests does a given number of bytes hold?

The arithmetic by which vLLM turns the bytes left for the KV cache into blocks, and blocks into the
figures it prints at start. With the bytes given, every figure here is exact for vLLM 0.32
(vllm/v1/core/kv_cache_utils.py, vllm/v1/kv_cache_interface.py); `CacheRules` says what is known of
earlier versions, and from where.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rayserve.errors import SpecError
from rayserve.planner.kv.groups import (
    WHOLE,
    CacheGroup,
    PageSpec,
    aligned_block_size,
    group_layers,
    page_specs,
)
from rayserve.planner.kv.layers import CacheKind, LayerCache
from rayserve.units import round_up

V0_LATENT_STEP_BYTES = 256
"""V0 up to 0.7 rounded an MLA row up to this: 576 elements of bf16 became 640."""


@dataclass(frozen=True)
class CacheRules:
    """What differs between versions of vLLM."""

    v0: bool = False
    """The old engine: one pool of equal blocks, every layer keeps the whole context."""
    latent_step_bytes: int = 1
    """An MLA row of a token is rounded up to a multiple of this."""
    hybrid_groups: bool = True
    """Layers of different kinds have block tables of their own."""
    tokens_from_concurrency: bool = True
    """`GPU KV cache size` is concurrency x max_model_len; before: blocks // groups x block size."""
    in_flight_batches: bool = True
    """A window is kept for every batch in flight, not for one."""
    scale_before_padding: bool = False
    """A small page that does not divide the largest gets more tokens before it is padded."""


def cache_rules(version: tuple[int, int], *, v0: bool | None = None) -> CacheRules:
    """The rules of a release (major, minor); `v0` says that an 0.8 ran its old engine.

    Sources: V0's rounding by the blocks that a DeepSeek-R1 start on 0.7.3 printed (18,418 in
    21.43 GiB); the token figure by its code in the 0.20 and 0.24 wheels, and issue 43308, where one
    GPU went from 55k to 525k tokens; batches in flight and padding after scaling by a start of
    Gemma 4 31B with int8 KV on a nightly of May 2026, which fits no other combination tried. Not
    checked against a log: that groups came with 0.10, and when scaling ended (0.32 does not scale).
    """
    old_engine = version < (0, 8) if v0 is None else v0
    if old_engine:
        step = V0_LATENT_STEP_BYTES if version <= (0, 7) else 1
        return CacheRules(True, step, False, False, False, False)
    return CacheRules(
        hybrid_groups=version >= (0, 10),
        tokens_from_concurrency=version >= (0, 21),
        in_flight_batches=version >= (0, 21),
        scale_before_padding=version < (0, 32),
    )


@dataclass(frozen=True)
class CacheSettings:
    """Engine arguments that the cache depends on."""

    max_model_len: int
    max_num_batched_tokens: int
    block_size: int = 16
    """The operator's or the attention backend's choice, before states raise it."""
    kernel_block_sizes: tuple[int, ...] = (16,)
    """Smallest block of each attention backend in use; see `aligned_block_size`."""
    concurrent_batches: int = 1
    """Batches in flight; see `concurrent_batches`."""
    prefix_caching: bool = True
    """Whether it is on for this model; it makes a recurrent layer keep two states, not one."""
    hybrid_manager: bool = True
    speculative_tokens: int = 0
    retained_tokens: int = 0
    """Tokens kept below a window: speculative tokens - 1 with MTP of several modules, else 0."""
    context_parallel: int = 1
    """Decode context parallel size: ranks that share out a request's tokens."""
    blocks_override: int = 0
    """`num_gpu_blocks_override`; 0: none."""
    block_outermost: bool = False
    """Layers are interleaved within a block (sparse MLA on CUDA), not laid one after another."""
    rules: CacheRules = CacheRules()

    @property
    def in_flight_tokens(self) -> int:
        """Tokens that may be scheduled and not yet freed (VllmConfig.max_in_flight_tokens)."""
        batches = self.concurrent_batches if self.rules.in_flight_batches else 1
        return batches * self.max_num_batched_tokens


def concurrent_batches(*, async_scheduling: bool, pipeline: int, v2_runner: bool) -> int:
    """Batches in flight (VllmConfig.max_concurrent_batches).

    Asynchronous scheduling, vLLM's default where nothing forbids it, adds one; with the first
    model runner it does so only without a pipeline.
    """
    if async_scheduling and (v2_runner or pipeline == 1):
        return pipeline + 1
    return pipeline


@dataclass(frozen=True)
class CacheLayout:
    """The cache of a model, before its size is known."""

    block_size: int
    """Tokens of a block of an attention layer that is not scaled."""
    groups: tuple[CacheGroup, ...]
    stage_block_bytes: tuple[int, ...]
    """Bytes of a block on a rank of each pipeline stage; 0 for a model that keeps nothing."""
    page_bytes: int
    """Bytes of a page in each group; the largest where they differ."""


@dataclass(frozen=True)
class CacheCapacity:
    """What a number of bytes holds."""

    num_blocks: int
    blocks_per_request: int
    """Blocks of one request of max_model_len."""
    max_concurrency: float
    """Requests of max_model_len at once, as vLLM prints it; `inf` where nothing is kept."""
    printed_tokens: int
    """`GPU KV cache size` by the version's rule: a figure to compare with a log."""
    request_bytes: tuple[int, ...]
    """Bytes that one request of max_model_len needs on a rank of each stage."""
    fits: bool
    """Whether vLLM would start: one request of max_model_len fits on every stage."""
    estimated_max_model_len: int
    """Longest request that fits everywhere, at most max_model_len; 0: none."""


def cache_layout(stages: Sequence[Sequence[LayerCache]], settings: CacheSettings) -> CacheLayout:
    """Groups and block sizes of a model, whose layers are given for each pipeline stage.

    Layers that share another's cache are skipped. Groups count the remaining layers through all
    stages.

    Raises:
        SpecError: vLLM would refuse to start, or the layout is one that is not modelled.
    """
    kept = [[layer for layer in stage if not layer.shared] for stage in stages]
    layers = [layer for stage in kept for layer in stage]
    if layers and not all(kept):
        raise SpecError(
            "a layer with a cache on every pipeline stage",
            found=f"none on stage {kept.index([]) + 1} of {len(kept)}",
            do="lower pipeline_parallel_size: vLLM divides by this stage's bytes of a block",
        )
    if settings.rules.v0:
        return _v0_layout(kept, settings)
    if settings.context_parallel > 1 and any(layer.kind is CacheKind.SLIDING for layer in layers):
        raise SpecError(
            "decode_context_parallel_size 1 for a model with sliding windows",
            found=str(settings.context_parallel),
            do="leave decode_context_parallel_size out",
        )
    block_size = aligned_block_size(layers, settings.block_size, settings.kernel_block_sizes)
    state_block = block_size if settings.prefix_caching else settings.max_model_len
    specs = page_specs(layers, block_size, state_block)
    groups = group_layers(
        specs,
        hybrid_manager=settings.hybrid_manager and settings.rules.hybrid_groups,
        block_outermost=settings.block_outermost,
        scale_before_padding=settings.rules.scale_before_padding,
    )
    bounds = _bounds(kept)
    return CacheLayout(
        block_size=block_size,
        groups=groups,
        stage_block_bytes=tuple(_block_bytes(groups, span, settings) for span in bounds),
        page_bytes=max((group.page_bytes for group in groups), default=0),
    )


def cache_capacity(
    layout: CacheLayout, available_bytes: Sequence[int], settings: CacheSettings
) -> CacheCapacity:
    """What `available_bytes` (the poorest rank's of each stage) holds.

    Raises:
        SpecError: not one figure for each pipeline stage.
    """
    if len(available_bytes) != len(layout.stage_block_bytes):
        raise SpecError(
            f"bytes for each of {len(layout.stage_block_bytes)} pipeline stages",
            found=str(len(available_bytes)),
            do="give the bytes of the poorest rank of every stage",
        )
    length = settings.max_model_len
    blocks = num_blocks(layout, available_bytes, settings)
    needed = request_bytes(layout, settings, length)
    usable = _usable_bytes(layout, available_bytes, settings)
    return CacheCapacity(
        num_blocks=blocks,
        blocks_per_request=blocks_per_request(layout, settings, length),
        max_concurrency=max_concurrency(layout, blocks, settings, length),
        printed_tokens=_printed_tokens(layout, blocks, settings),
        request_bytes=needed,
        fits=_fits(needed, usable, layout),
        estimated_max_model_len=_longest(layout, usable, settings),
    )


def num_blocks(layout: CacheLayout, available_bytes: Sequence[int], settings: CacheSettings) -> int:
    """Blocks of the pool: those of the poorest stage, or the override."""
    if settings.blocks_override:
        return settings.blocks_override
    pairs = zip(available_bytes, layout.stage_block_bytes, strict=True)
    # A model without a cache still gets one block (the null block).
    return min((max(0, have) // block for have, block in pairs if block), default=1)


def blocks_per_request(layout: CacheLayout, settings: CacheSettings, length: int) -> int:
    """Blocks that one request of `length` tokens claims, through all groups."""
    return sum(
        max(_spec_blocks(spec, settings, length) for spec in group.distinct)
        for group in layout.groups
    )


def max_concurrency(
    layout: CacheLayout, blocks: int, settings: CacheSettings, length: int
) -> float:
    """Requests of `length` tokens that `blocks` hold at once; `inf` where nothing is kept."""
    if settings.rules.v0:
        return blocks * layout.block_size / length
    needed = blocks_per_request(layout, settings, length)
    return blocks / needed if needed else math.inf


def request_bytes(layout: CacheLayout, settings: CacheSettings, length: int) -> tuple[int, ...]:
    """Bytes that one request of `length` tokens claims on a rank of each stage."""
    blocks = blocks_per_request(layout, settings, length)
    return tuple(block * blocks for block in layout.stage_block_bytes)


def _spec_blocks(spec: PageSpec, settings: CacheSettings, length: int) -> int:
    """Blocks of one layer for a request of `length` tokens (each spec's max_memory_usage_bytes)."""
    if spec.kind in WHOLE:
        share = -(-length // settings.context_parallel)
        return -(-share // spec.block_size)
    if spec.kind is CacheKind.MAMBA:
        if settings.prefix_caching:
            return 2 + settings.speculative_tokens + spec.layer.checkpoint_blocks
        return 1 + settings.speculative_tokens
    if spec.kind is CacheKind.CHUNKED:
        return -(-min(spec.window + settings.in_flight_tokens, length) // spec.block_size)
    kept = spec.window - 1 + settings.retained_tokens + settings.in_flight_tokens
    # One more, because a window may begin within a block.
    return -(-min(kept, length) // spec.block_size) + 1


def _bounds(stages: Sequence[Sequence[LayerCache]]) -> list[range]:
    """The places of each stage's layers in the sequence of all."""
    bounds, start = [], 0
    for stage in stages:
        bounds.append(range(start, start + len(stage)))
        start += len(stage)
    return bounds


def _block_bytes(groups: Sequence[CacheGroup], stage: range, settings: CacheSettings) -> int:
    """Bytes of a block on a stage: those of its widest group (_get_kv_cache_bytes_per_block)."""
    here = [
        [spec for place, spec in zip(group.layers, group.specs, strict=True) if place in stage]
        for group in groups
    ]
    if settings.block_outermost:
        widest = max((sum(spec.page_bytes for spec in specs) for specs in here), default=0)
        step = math.lcm(*(spec.layer.alignment_bytes for specs in here for spec in specs))
        return round_up(widest, step)
    return max((sum(spec.stride_bytes for spec in specs) for specs in here), default=0)


def _usable_bytes(
    layout: CacheLayout, available_bytes: Sequence[int], settings: CacheSettings
) -> list[int]:
    """Bytes for requests: one block, the null block, is never lent."""
    usable = []
    for have, block in zip(available_bytes, layout.stage_block_bytes, strict=True):
        pool = settings.blocks_override * block if settings.blocks_override else have
        usable.append(pool if settings.rules.v0 else pool - block)
    return usable


def _fits(needed: Sequence[int], usable: Sequence[int], layout: CacheLayout) -> bool:
    stages = zip(needed, usable, layout.stage_block_bytes, strict=True)
    return all(have > 0 and need <= have for need, have, block in stages if block)


def _longest(layout: CacheLayout, usable: Sequence[int], settings: CacheSettings) -> int:
    """The longest length that fits, found by halving as vLLM does."""
    low, high = 0, settings.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if _fits(request_bytes(layout, settings, middle), usable, layout):
            low = middle
        else:
            high = middle - 1
    return low


def _printed_tokens(layout: CacheLayout, blocks: int, settings: CacheSettings) -> int:
    if not layout.groups:
        return 0
    rules = settings.rules
    if rules.v0:
        return blocks * layout.block_size
    if rules.tokens_from_concurrency:
        concurrency = max_concurrency(layout, blocks, settings, settings.max_model_len)
        return int(concurrency * settings.max_model_len)
    shortest = min(group.block_size for group in layout.groups)
    return blocks // len(layout.groups) * shortest * settings.context_parallel


def _v0_layout(kept: Sequence[Sequence[LayerCache]], settings: CacheSettings) -> CacheLayout:
    """One group of all layers; a row of MLA is rounded up (vllm/worker/cache_engine.py, V0)."""
    layers = [layer for stage in kept for layer in stage]
    if any(layer.kind is CacheKind.MAMBA for layer in layers):
        raise SpecError(
            "vLLM's V1 engine for a model with recurrent layers",
            found="a release whose engine kept states outside the KV cache",
            do="compare with vLLM 0.11 or later",
        )
    specs = []
    for layer in layers:
        row = layer.content_bytes
        if layer.kind is CacheKind.MLA:
            row = round_up(row, settings.rules.latent_step_bytes)
        whole = CacheKind.MLA if layer.kind is CacheKind.MLA else CacheKind.FULL
        specs.append(PageSpec(replace(layer, content_bytes=row), whole, settings.block_size))
    groups = (CacheGroup(tuple(range(len(specs))), tuple(specs), mixed=True),) if specs else ()
    return CacheLayout(
        block_size=settings.block_size,
        groups=groups,
        stage_block_bytes=tuple(_block_bytes(groups, span, settings) for span in _bounds(kept)),
        page_bytes=max((group.page_bytes for group in groups), default=0),
    )
