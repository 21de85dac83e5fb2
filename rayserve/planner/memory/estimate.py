"""Does this model, cut like this, with these limits, fit on these GPUs, and what does the cache hold?

Brings the exact parts (weights, KV cache layout) and the uncertain ones (activation, NCCL, graphs)
together: one budget for each pipeline stage, one cache for all, one verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from rayserve.planner.kv.cache import (
    CacheCapacity,
    CacheLayout,
    CacheSettings,
    cache_capacity,
    cache_layout,
    cache_rules,
    concurrent_batches,
)
from rayserve.planner.kv.caches import layer_caches
from rayserve.planner.kv.layers import LayerCache
from rayserve.planner.memory import terms
from rayserve.planner.memory.budget import Budget, Terms, Verdict, judge, kv_budget, worst
from rayserve.planner.memory.calibration import Measured, Shape, calibrate
from rayserve.planner.memory.encoder import vision_work
from rayserve.planner.memory.offload import NO_OFFLOAD, Offload, offloaded, without
from rayserve.planner.memory.ranges import Range
from rayserve.planner.memory.versions import Batch, Runner, VersionFacts, capture_sizes
from rayserve.planner.support.limits import attentions
from rayserve.planner.support.precision import capability_of, chosen_backend
from rayserve.planner.weights.architecture import Architecture, vocab_rows
from rayserve.planner.weights.formats import FP8_COMPUTE, Target
from rayserve.planner.weights.modules import MLA, Experts, Layer, Linear, Module, share
from rayserve.planner.weights.stages import stage_range
from rayserve.planner.weights.storage import FP8, INT8, PACKED, Storage
from rayserve.planner.weights.tensors import Place, stage_weights

WEIGHTS_LOW, WEIGHTS_HIGH = 0.999, 1.001
"""The replay of the allocator against logs: mean error below 0.1 %."""
PREFILL_BLOCK_TOKENS = 16
SPARSE_BLOCK_TOKENS = 64
"""Blocks of the sparse MLA backends."""
STATES_CACHED = (0, 21)
"""From here prefixes of recurrent models are kept; logs of 0.24 show it, when it began is assumed."""

NOTHING = Range.exact(0)


@dataclass(frozen=True)
class Setup:
    """Hardware and engine settings that memory depends on."""

    total_bytes: int
    """Of one GPU, as CUDA reports it."""
    capability: float
    facts: VersionFacts
    batch: Batch
    utilization: float
    max_model_len: int
    tensor: int = 1
    pipeline: int = 1
    expert_ranks: int = 1
    kv_cache_dtype: str = "auto"
    graphs: bool = True
    interactivity: bool = False
    prefix_caching: bool = True
    pinned_kv_bytes: int = 0
    extra: Range = NOTHING
    """Further weights on every rank: LoRA slots."""
    draft_weights: Range = NOTHING
    """Of a draft model, which lives on the last stage."""
    offload: Offload = NO_OFFLOAD
    """Weights that stay in host memory."""
    draft: bool = False
    """The model's own MTP layers guess."""
    speculative_tokens: int = 0
    extra_caches: tuple[LayerCache, ...] = ()
    """Layers of a draft model, which live on the last stage."""
    rocm: bool = False
    free_bytes: int | None = None
    """Free on the GPU at the start, where it is known."""
    images: int = 1
    """Images of one prompt; 0: vLLM builds no tower."""
    hybrid_manager: bool = True
    blocks_override: int = 0
    """`num_gpu_blocks_override`; 0: none."""
    block_size: int = 16
    kernel_block_sizes: tuple[int, ...] = field(default=(16,))
    starts: tuple[Measured, ...] = ()
    """Real starts of this model with these settings on such GPUs."""

    @property
    def target(self) -> Target:
        """What decides how weights are repacked."""
        return Target(self.capability, self.rocm, self.facts.number)

    @property
    def graph_sizes(self) -> list[int]:
        """Batch sizes of which a CUDA graph is recorded; none where graphs are off."""
        if not self.graphs:
            return []
        return capture_sizes(
            self.facts,
            self.batch,
            capability=self.capability,
            query_tokens=1 + self.speculative_tokens,
            interactivity=self.interactivity,
        )


@dataclass(frozen=True)
class Estimate:
    """What a start would find."""

    budgets: tuple[Budget, ...]
    """Of a rank of each pipeline stage."""
    layout: CacheLayout
    settings: CacheSettings
    expected: CacheCapacity
    lowest: CacheCapacity
    highest: CacheCapacity
    verdict: Verdict
    decisive: int
    """The stage that the verdict is about."""
    stages: tuple[tuple[LayerCache, ...], ...]
    """What each stage's layers keep."""


def estimate(
    architecture: Architecture, setup: Setup, weights: Sequence[int] | None = None
) -> Estimate:
    """Budget, cache and verdict of one replica. `weights`: bytes of each stage, where known already.

    Raises:
        SpecError: vLLM would refuse the layout, or a format's packing is not known.
    """
    settings = cache_settings(architecture, setup)
    stages = layer_caches(
        architecture,
        tensor=setup.tensor,
        pipeline=setup.pipeline,
        kv_cache_dtype=setup.kv_cache_dtype,
        speculative_tokens=setup.speculative_tokens,
        draft=setup.draft,
    )
    stages[-1] += setup.extra_caches
    layout = cache_layout(stages, settings)
    sizes = stage_bytes(architecture, setup) if weights is None else weights
    width = _flashinfer_width(architecture, setup)
    budgets = tuple(
        stage_budget(architecture, setup, stage, size, width) for stage, size in enumerate(sizes)
    )
    if setup.blocks_override:
        budgets = tuple(
            one.with_cache(setup.blocks_override * block)
            for one, block in zip(budgets, layout.stage_block_bytes, strict=True)
        )

    def capacity(sizes: Iterable[int]) -> CacheCapacity:
        return cache_capacity(layout, [max(0, size) for size in sizes], settings)

    expected = capacity(one.kv.expected for one in budgets)
    # One block of the pool is the null block, which no request gets.
    verdicts = [
        judge(one, needed + block, free_bytes=setup.free_bytes)
        for one, needed, block in zip(
            budgets, expected.request_bytes, layout.stage_block_bytes, strict=True
        )
    ]
    verdict = worst(verdicts)
    return Estimate(
        budgets=budgets,
        layout=layout,
        settings=settings,
        expected=expected,
        lowest=capacity(one.kv.low for one in budgets),
        highest=capacity(one.kv.high for one in budgets),
        verdict=verdict,
        decisive=verdicts.index(verdict),
        stages=tuple(map(tuple, stages)),
    )


def cache_settings(architecture: Architecture, setup: Setup) -> CacheSettings:
    """The engine's settings as the cache sees them."""
    v2 = setup.facts.runner is Runner.V2
    attentions = [layer.attention for layer in architecture.layers]
    recurrent = any(attention.state is not None for attention in attentions)
    sparse = any(attention.index_size for attention in attentions)
    return CacheSettings(
        max_model_len=setup.max_model_len,
        max_num_batched_tokens=setup.batch.step_tokens,
        block_size=SPARSE_BLOCK_TOKENS if sparse else setup.block_size,
        kernel_block_sizes=setup.kernel_block_sizes,
        concurrent_batches=concurrent_batches(
            async_scheduling=setup.facts.number >= (0, 14), pipeline=setup.pipeline, v2_runner=v2
        ),
        # Of recurrent models older versions could not keep prefixes.
        prefix_caching=setup.prefix_caching
        and not (recurrent and setup.facts.number < STATES_CACHED),
        hybrid_manager=setup.hybrid_manager,
        blocks_override=setup.blocks_override,
        speculative_tokens=setup.speculative_tokens,
        block_outermost=sparse,
        rules=cache_rules(setup.facts.number, v0=setup.facts.runner is Runner.V0),
    )


def stage_bytes(architecture: Architecture, setup: Setup) -> tuple[int, ...]:
    """Bytes of weights of a rank of each pipeline stage, in host memory or not."""
    return stage_weights(architecture, _place(setup))


def fullest_bytes(architecture: Architecture, setup: Setup, sizes: Sequence[int]) -> int:
    """Of such weights those that are expected on the GPU, on the fullest rank."""
    return max(
        size - _left(architecture, setup, stage).expected for stage, size in enumerate(sizes)
    )


def left_bytes(architecture: Architecture, setup: Setup) -> int:
    """Weights that are expected to stay in host memory, of a rank of the stage with most of them."""
    return max(_left(architecture, setup, stage).expected for stage in range(setup.pipeline))


def left_ranges(architecture: Architecture, setup: Setup) -> list[Range]:
    """Bytes of weights that stay in host memory, of a rank of each stage."""
    return [_left(architecture, setup, stage) for stage in range(setup.pipeline)]


def _left(architecture: Architecture, setup: Setup, stage: int) -> Range:
    """Bytes of a stage's weights that stay in host memory."""
    return offloaded(architecture, setup.offload, replace(_place(setup), stage=stage))


def _place(setup: Setup) -> Place:
    return Place(
        tensor=setup.tensor,
        pipeline=setup.pipeline,
        expert_ranks=setup.expert_ranks,
        draft=setup.draft,
        vision=setup.images > 0,
        target=setup.target,
    )


def stage_budget(
    architecture: Architecture, setup: Setup, stage: int, size: int, width: int
) -> Budget:
    """The memory of one rank of a stage with `size` bytes of weights; `width`: `_flashinfer_width`."""
    weights = Range.exact(size, "shapes through the allocator")
    weights = weights.scaled(WEIGHTS_LOW, WEIGHTS_HIGH)
    weights = without(weights, _left(architecture, setup, stage)) + setup.extra
    if stage == setup.pipeline - 1:
        weights += setup.draft_weights
    work = stage_work(architecture, setup, stage)
    sizes = setup.graph_sizes
    layers = len(stage_range(len(architecture.layers), setup.pipeline, stage))
    graphs = terms.graph_memory(setup.facts, sizes, layers=layers, experts=work.experts is not None)
    if width and setup.graphs:
        graphs = graphs.beside(
            terms.flashinfer_buffer(
                setup.facts, step_tokens=setup.batch.step_tokens, query_width=width
            )
        )
    found = Terms(
        weights=weights,
        activation=terms.activation(setup.facts, work, capability=setup.capability),
        non_torch=terms.non_torch(
            setup.facts,
            tensor=setup.tensor,
            pipeline=setup.pipeline,
            capability=setup.capability,
        ),
        buffers=terms.kept_buffers(setup.facts, work),
        graphs=graphs,
    )
    shape = Shape(setup.tensor, setup.pipeline, setup.batch, setup.max_model_len)
    return kv_budget(
        setup.facts,
        calibrate(found, setup.starts, shape, stage),
        total_bytes=setup.total_bytes,
        utilization=setup.utilization,
        pinned_kv_bytes=setup.pinned_kv_bytes,
        ranks=setup.tensor * setup.pipeline,
    )


def _flashinfer_width(architecture: Architecture, setup: Setup) -> int:
    """Elements of a token's queries on a rank, where FlashInfer attends; 0: another backend does."""
    if setup.rocm or setup.facts.runner is Runner.V0:
        return 0
    capability = capability_of(setup.capability)
    kinds = [
        kind for kind in attentions(architecture, images=setup.images > 0) if kind.kind == "full"
    ]
    chosen = {
        chosen_backend(
            kind, dtype=architecture.dtype, kv=setup.kv_cache_dtype, capability=capability
        )
        for kind in kinds
    }
    if "FLASHINFER" not in chosen:
        return 0
    widths = (one.attention.heads * one.attention.key_size for one in architecture.layers)
    return share(max(widths), setup.tensor)


def stage_work(architecture: Architecture, setup: Setup, stage: int) -> terms.Work:
    """What a rank of a stage computes in the profile run."""
    span = stage_range(len(architecture.layers), setup.pipeline, stage)
    layers = architecture.layers[span.start : span.stop]
    tensor, element = setup.tensor, architecture.element_bytes
    dense = max((layer.mlp.width for layer in layers), default=0)
    return terms.Work(
        step_tokens=setup.batch.step_tokens,
        seqs=setup.batch.seqs,
        hidden=architecture.hidden,
        padded_vocab=vocab_rows(architecture, 1),
        mlp_width=share(dense, tensor),
        dtype_bytes=element,
        tensor=tensor,
        first_stage=stage == 0,
        last_stage=stage == setup.pipeline - 1,
        mixer_width=max((_mixer_width(layer, tensor) for layer in layers), default=0),
        # Sparse MLA expands no context.
        mixer_bytes=0
        if any(layer.attention.index_size for layer in architecture.layers)
        else max((_mixer_bytes(layer, setup, element) for layer in layers), default=0),
        int8_inputs=_kind(architecture, layers) == INT8,
        experts=_experts(architecture, layers, setup),
        vision=vision_work(architecture, setup.batch, tensor=tensor, images=setup.images),
    )


def _mixer_width(layer: Layer, tensor: int) -> int:
    """Elements a token that MLA expands: queries and keys of every head."""
    attention = layer.attention
    if attention.kind != MLA:
        return 0
    return 2 * share(attention.heads, tensor) * attention.key_size


def _mixer_bytes(layer: Layer, setup: Setup, element: int) -> int:
    attention = layer.attention
    if attention.kind != MLA:
        return 0
    context = max(8 * setup.max_model_len, 4 * setup.batch.seqs * PREFILL_BLOCK_TOKENS)
    heads = share(attention.heads, setup.tensor)
    sizes = attention.key_size - attention.rope_size + attention.value_size
    return terms.mla_prefill_bytes(heads, sizes, context, element)


def _experts(
    architecture: Architecture, layers: tuple[Layer, ...], setup: Setup
) -> terms.Experts | None:
    routed = [layer for layer in layers if layer.mlp.experts]
    if not routed:
        return None
    mlp = routed[0].mlp
    width = mlp.expert_width if setup.expert_ranks > 1 else share(mlp.expert_width, setup.tensor)
    return terms.Experts(
        top_k=mlp.experts_per_token,
        width=width,
        kernel=_expert_kernel(_storage(architecture, routed), setup.capability),
        shared_width=share(mlp.shared_width, setup.tensor),
    )


def _expert_kernel(storage: Storage | None, capability: float) -> terms.ExpertKernel:
    if storage is None:
        return terms.ExpertKernel.TRITON
    if storage.kind == PACKED or (storage.kind == FP8 and capability < FP8_COMPUTE):
        return terms.ExpertKernel.MARLIN
    return terms.ExpertKernel.TRITON if storage.kind == FP8 else terms.ExpertKernel.OTHER


def _modules(layers: Iterable[Layer]) -> Iterable[Module]:
    return (module for layer in layers for module in layer.modules)


def _storage(architecture: Architecture, layers: Iterable[Layer]) -> Storage | None:
    """The format of the routed experts."""
    formats = architecture.quantization
    experts = next((one for one in _modules(layers) if isinstance(one, Experts)), None)
    if formats is None or experts is None:
        return None
    return formats.storage(experts.name, experts.parts, expert=True)


def _kind(architecture: Architecture, layers: Iterable[Layer]) -> str:
    """The kind of format of the fused matrices; empty: they are not quantized."""
    formats = architecture.quantization
    if formats is None:
        return ""
    fused = (one for one in _modules(layers) if isinstance(one, Linear) and one.parts)
    storages = (formats.storage(one.name, one.parts) for one in fused)
    return next((storage.kind for storage in storages if storage is not None), "")
