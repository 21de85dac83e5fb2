"""Which layers share a block table, and how large is a page of each?

vLLM gives every group of layers its own block table, and all groups draw blocks from one pool, so
a page takes the same bytes in all of them. The rules are those of vLLM 0.32
(vllm/v1/core/kv_cache_utils.py: get_kv_cache_groups and what it calls).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rayserve.errors import SpecError
from rayserve.planner.kv.layers import CacheKind, LayerCache
from rayserve.units import round_up

WHOLE = frozenset({CacheKind.FULL, CacheKind.MLA})
"""Kinds that keep every token."""
LOCAL = frozenset({CacheKind.SLIDING, CacheKind.CHUNKED})
PADDING_RATIO = 1.5
"""Buckets whose sizes differ by less are padded to the largest (get_kv_cache_groups)."""
MLA_BLOCK_TOKENS = 128
"""Blocks of an MLA model with states are multiples of this (Platform._align_hybrid_block_size)."""


@dataclass(frozen=True)
class PageSpec:
    """How one layer's cache is cut into pages."""

    layer: LayerCache
    kind: CacheKind
    """As it is allocated: a sliding layer may get pages for the whole context."""
    block_size: int
    """Tokens of a page; of no meaning for states."""
    padded_bytes: int = 0
    """Bytes that a page is stretched to; 0: none."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in this layer."""
        if self.padded_bytes:
            return self.padded_bytes
        if self.kind is CacheKind.MAMBA:
            return sum(self.layer.state_bytes)
        return self.block_size * self.layer.token_bytes

    @property
    def stride_bytes(self) -> int:
        """Bytes from one page of this layer to its next, where layers lie one after another."""
        return round_up(self.page_bytes, self.layer.alignment_bytes)

    @property
    def window(self) -> int:
        """Tokens of the window that limits what is kept; 0: none."""
        return self.layer.window if self.kind in LOCAL else 0

    @property
    def shape(self) -> tuple[object, ...]:
        """What two layers must have in common to be one bucket."""
        layer = replace(self.layer, kind=self.kind, window=self.window)
        return layer, self.block_size, self.padded_bytes


@dataclass(frozen=True)
class CacheGroup:
    """Layers with one block table."""

    layers: tuple[int, ...]
    """Places in the sequence of layers that the groups were made of."""
    specs: tuple[PageSpec, ...]
    """One for each layer."""
    mixed: bool
    """The layers' pages differ in size, so a block is one page of each layer."""

    @functools.cached_property
    def distinct(self) -> tuple[PageSpec, ...]:
        """The specs without repetitions: a model has a hundred layers of two or three kinds."""
        return tuple(dict.fromkeys(self.specs))

    @property
    def block_size(self) -> int:
        """Tokens of one block."""
        return self.specs[0].block_size

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of one layer; of all layers together where they are mixed."""
        if self.mixed:
            return sum(spec.page_bytes for spec in self.specs)
        return self.specs[0].page_bytes


def aligned_block_size(
    layers: Sequence[LayerCache], block_size: int, kernel_block_sizes: Sequence[int] = (16,)
) -> int:
    """Block size in use, once a page of attention is to hold a recurrent layer's state.

    `block_size` is the operator's or the backend's choice, `kernel_block_sizes` the smallest block
    of each attention backend in use (16 for FlashAttention and Triton, 32 for vLLM's CPU kernels,
    64 for FlashMLA). Hence 544 tokens for Qwen3-Next in bf16 on one GPU.
    """
    state = max((sum(layer.state_bytes) for layer in layers), default=0)
    token = max((layer.token_bytes for layer in layers), default=0)
    if not state or not token:
        return block_size
    step = max(kernel_block_sizes[0], block_size)
    if any(layer.kind is CacheKind.MLA for layer in layers):
        step = max(step, MLA_BLOCK_TOKENS)
    needed = step * -(-state // (step * token))
    return max(block_size, round_up(needed, math.lcm(*kernel_block_sizes)))


def page_specs(layers: Sequence[LayerCache], block_size: int, state_block: int) -> list[PageSpec]:
    """Pages of each layer before groups are made, `block_size` from `aligned_block_size`.

    `state_block` is the number of tokens after which a recurrent layer's state is kept.
    """
    states = any(layer.kind is CacheKind.MAMBA for layer in layers)
    token = max((layer.token_bytes for layer in layers), default=0)
    # A state takes a page of the attention layers, so that both come from one pool.
    padded = block_size * token if states and token else 0
    specs = []
    for layer in layers:
        recurrent = layer.kind is CacheKind.MAMBA
        own = sum(layer.state_bytes)
        specs.append(
            PageSpec(
                layer=layer,
                kind=layer.kind,
                block_size=state_block if recurrent else block_size,
                padded_bytes=padded if recurrent and padded != own else 0,
            )
        )
    return specs


def group_layers(
    specs: Sequence[PageSpec],
    *,
    hybrid_manager: bool = True,
    block_outermost: bool = False,
    scale_before_padding: bool = False,
) -> tuple[CacheGroup, ...]:
    """Groups of the layers of a whole model (all pipeline stages), in vLLM's order.

    `hybrid_manager` False gives every layer pages for the whole context. `scale_before_padding`
    raises the block size of a layer with small pages also where it has to be padded afterwards.

    Raises:
        SpecError: vLLM would refuse to start, or the layout is one that is not modelled.
    """
    if not specs:
        return ()
    if not hybrid_manager:
        specs = _promoted(specs)
    if _uniform(specs):
        return (CacheGroup(tuple(range(len(specs))), tuple(specs), mixed=False),)
    if _same_type(specs):
        return (CacheGroup(tuple(range(len(specs))), tuple(specs), mixed=True),)
    if block_outermost and len({spec.page_bytes for spec in specs}) > 1:
        raise SpecError(
            "a cache whose layers have pages of one size, or one kind of attention",
            found="several kinds with pages of several sizes, packed into one block",
            do="measure the cache of this model: its packing is not modelled",
        )
    unified = _unified(specs, scale_before_padding=scale_before_padding)
    if unified is None:
        return _whole_context(specs)
    return _split(unified)


def _uniform(specs: Sequence[PageSpec]) -> bool:
    """Whether all layers are one bucket.

    Raises:
        SpecError: all of them got pages for the whole context, but have different windows.
    """
    if all(spec.kind is CacheKind.FULL for spec in specs):
        local = [spec.layer for spec in specs if spec.layer.kind in LOCAL]
        for kind in LOCAL:
            windows = {layer.window for layer in local if layer.kind is kind}
            if len(windows) > 1:
                raise SpecError(
                    "layers of one window size, where every layer keeps the whole context",
                    found=f"windows of {', '.join(map(str, sorted(windows)))} tokens",
                    do="leave the hybrid KV cache manager on",
                )
        # vLLM has no spec for both kinds; as one type they still share a block table.
        if len({layer.kind for layer in local}) > 1:
            return False
    return len({spec.shape for spec in set(specs)}) == 1


def _same_type(specs: Sequence[PageSpec]) -> bool:
    """Whether all layers need the same number of blocks, whatever their page size."""
    if len({spec.block_size for spec in specs}) > 1:
        return False
    first = specs[0]
    if first.kind in WHOLE:
        return all(spec.kind in WHOLE for spec in specs)
    if first.kind in LOCAL:
        return all(spec.kind is first.kind and spec.window == first.window for spec in specs)
    return all(
        spec.kind is CacheKind.MAMBA
        and spec.page_bytes == first.page_bytes
        and spec.layer.checkpoint_blocks == first.layer.checkpoint_blocks
        for spec in specs
    )


def _promoted(specs: Sequence[PageSpec]) -> Sequence[PageSpec]:
    """The layers with pages for the whole context, where that makes them one kind.

    Raises:
        SpecError: layers with states remain beside attention.
    """
    if _uniform(specs) or _same_type(specs):
        return specs
    blocks = {spec.block_size for spec in specs if spec.kind in WHOLE}
    promoted = list(specs)
    if blocks and any(spec.kind in LOCAL for spec in specs):
        promoted = [
            replace(
                spec,
                kind=CacheKind.FULL,
                block_size=next(iter(blocks)) if len(blocks) == 1 else spec.block_size,
            )
            if spec.kind in LOCAL
            else spec
            for spec in specs
        ]
    if _uniform(promoted) or _same_type(promoted):
        return promoted
    raise SpecError(
        "the hybrid KV cache manager, for a model with several kinds of cache",
        found="it is switched off",
        do="leave disable_hybrid_kv_cache_manager out",
    )


def _whole_context(specs: Sequence[PageSpec]) -> tuple[CacheGroup, ...]:
    """One group, where pages of MLA and of sliding layers cannot be made equal.

    Raises:
        SpecError: the layers cannot be one group either.
    """
    kinds = {spec.kind for spec in specs}
    if CacheKind.CHUNKED not in kinds and {CacheKind.MLA, CacheKind.SLIDING} <= kinds:
        promoted = _promoted(specs)
        return (CacheGroup(tuple(range(len(promoted))), tuple(promoted), mixed=True),)
    raise SpecError(
        "layers whose pages can be made equal",
        found="MLA layers beside others, whose page is no multiple of theirs",
        do="take a model that this version of vLLM serves",
    )


def _unified(specs: Sequence[PageSpec], *, scale_before_padding: bool) -> Sequence[PageSpec] | None:
    """The layers with pages of one size: larger blocks where that divides, padding elsewhere.

    None where an MLA page would have to be padded.
    """
    largest = max(spec.page_bytes for spec in specs)
    unified = []
    for spec in specs:
        ratio, rest = divmod(largest, spec.page_bytes)
        scaled = replace(spec, block_size=spec.block_size * ratio, padded_bytes=0)
        if ratio == 1 and not rest:
            unified.append(spec)
        elif spec.kind is CacheKind.MAMBA:
            unified.append(replace(spec, padded_bytes=largest))
        elif not rest and not spec.padded_bytes:
            unified.append(scaled)
        elif spec.kind is CacheKind.MLA:
            return None
        else:
            base = scaled if scale_before_padding else spec
            unified.append(replace(base, padded_bytes=largest))
    return unified


def _split(specs: Sequence[PageSpec]) -> tuple[CacheGroup, ...]:
    """Buckets of equal layers, each cut into groups of about the same number of layers."""
    buckets: dict[tuple[object, ...], list[int]] = {}
    for index, spec in enumerate(specs):
        buckets.setdefault(spec.shape, []).append(index)
    smallest = min(len(bucket) for bucket in buckets.values())
    largest = max(len(bucket) for bucket in buckets.values())
    size = largest if largest < smallest * PADDING_RATIO else smallest
    groups = []
    for bucket in buckets.values():
        count = -(-len(bucket) // size)
        # Strided, so that every pipeline stage has its share of each group.
        for start in range(count):
            members = tuple(bucket[start::count])
            groups.append(CacheGroup(members, tuple(specs[i] for i in members), mixed=False))
    return tuple(groups)
