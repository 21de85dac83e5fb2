"""Which tensors does one rank hold, and how many bytes of GPU memory do its weights take?

The answer is what vLLM prints as "Model loading took": every tensor in the order in which vLLM makes
it, then what each quantization method does to its tensors after loading, played through the rules of
PyTorch's allocator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rayserve.planner.weights.allocator import CachingAllocator
from rayserve.planner.weights.architecture import Architecture
from rayserve.planner.weights.formats import (
    RELEASE,
    Step,
    Target,
    expert_after,
    expert_steps,
    linear_after,
    linear_steps,
)
from rayserve.planner.weights.modules import (
    MLA,
    Absorbed,
    Embedding,
    Experts,
    Layer,
    Linear,
    Module,
    Rotary,
    Tensor,
    share,
)
from rayserve.planner.weights.stages import stage_range
from rayserve.planner.weights.storage import FP8, Storage

FLOAT32 = 4
MLA_WORKSPACE_BYTES = 128 * 2**20
FLASHINFER_MLA_EAGER, FLASHINFER_MLA_LAZY = (0, 12), (0, 32)
"""Versions from which and until which the FlashInfer workspace belongs to an MLA model's weights. Seen
in logs of 0.19 (0.125 GiB more on one GPU and on each of two), not in those of 0.7 and 0.8; 0.32.0
makes it at first use. Where between these it came and went is not known."""
MLA_MULTIPLIED_OUT = (0, 7)
"""This version kept products of MLA's projections beside them (VLLM_MLA_PERFORM_MATRIX_ABSORPTION).
Its source was not at hand: inferred from one log, DeepSeek-R1 on 8 H200, 83.88 GiB a GPU."""


@dataclass(frozen=True, slots=True)
class Place:
    """A rank, and how the model is divided.

    Ranks of one tensor group hold equally much, so a pipeline stage stands for all its ranks.
    """

    tensor: int = 1
    pipeline: int = 1
    stage: int = 0
    expert_ranks: int = 1
    """Ranks that share out whole experts; 1 without expert parallelism."""
    draft: bool = False
    """The model's own guessing layers are loaded too; they live on the last stage."""
    vision: bool = True
    """False for `--language-model-only`."""
    target: Target = field(default_factory=Target)


def stage_modules(architecture: Architecture, place: Place) -> Iterator[Module]:
    """The modules of a rank, in the order in which vLLM builds them."""
    first, last = place.stage == 0, place.stage == place.pipeline - 1
    if place.vision:
        yield from architecture.tower
    if first or (last and architecture.tied):
        yield from architecture.embedding
    for index in stage_range(len(architecture.layers), place.pipeline, place.stage):
        yield from architecture.layers[index].modules
    if last:
        yield from architecture.tail
        if place.draft:
            for layer in architecture.draft:
                yield from layer.modules


def allocations(architecture: Architecture, place: Place) -> Iterator[Step]:
    """Each tensor of a rank as (name, bytes) in load order; `RELEASE` bytes give one back."""
    modules = list(stage_modules(architecture, place))
    if any(layer.attention.kind == MLA for layer in architecture.layers):
        yield from _workspaces(place.target)
    tables: set[Rotary] = set()
    for module in modules:
        if isinstance(module, Rotary):
            if module in tables:
                continue
            tables.add(module)
        yield from made(architecture, module, place)
    for module in modules:
        yield from _after(architecture, module, place)


def _workspaces(target: Target) -> Iterator[Step]:
    """Buffers that modules of MLA backends make when the backends are compared, used or not.

    cutlass_mla.py makes its own as it is imported, which happens on compute capability 10 alone;
    flashinfer_mla.py did so too before it came to wait for the first use.
    """
    if 10.0 <= target.capability < 11.0:
        yield "mla.cutlass_workspace", MLA_WORKSPACE_BYTES
    if FLASHINFER_MLA_EAGER <= target.version < FLASHINFER_MLA_LAZY and not target.rocm:
        yield "mla.flashinfer_workspace", MLA_WORKSPACE_BYTES


def _storage(architecture: Architecture, module: Linear | Experts) -> Storage | None:
    quantization = architecture.quantization
    if quantization is None:
        return None
    if isinstance(module, Experts):
        return quantization.storage(module.name, module.parts, expert=True)
    return quantization.storage(module.name, module.parts) if module.quantizable else None


def made(architecture: Architecture, module: Module, place: Place) -> Iterator[Step]:
    """The tensors of a module on a rank as it is made, before anything is loaded."""
    element, tensor = architecture.element_bytes, place.tensor
    if isinstance(module, Linear):
        yield from linear_steps(
            module, _storage(architecture, module), tensor, element, place.target
        )
    elif isinstance(module, Experts):
        held = module.local(tensor, place.expert_ranks)
        storage = _storage(architecture, module)
        yield from expert_steps(module, storage, held, element, place.target)
        if place.expert_ranks > 1:
            yield f"{module.name}.expert_map", module.count * FLOAT32
    elif isinstance(module, Tensor):
        size = module.local(tensor) * (module.element_bytes or element)
        yield module.name, size
    elif isinstance(module, Embedding):
        rows = module.local(tensor)
        yield f"{module.name}.weight", rows * module.hidden * element
        if module.bias:
            yield f"{module.name}.bias", rows * element
    elif isinstance(module, Rotary):
        since = module.in_transformers
        if since == (0, 0) or place.target.version < since:
            yield from _rotary_steps(module, element)


def _rotary_steps(table: Rotary, element: int) -> Iterator[Step]:
    """The table and what its computation in 32 bits leaves behind as free blocks.

    `_compute_cos_sin_cache` of rotary_embedding/base.py: positions, angles, cosines and sines exist
    side by side with their concatenation, which is then turned into the model's type.
    """
    name = f"rotary.{table.label}.{table.positions}x{table.size}"
    half = table.positions * (table.size // 2) * FLOAT32
    kept = table.element_bytes or element
    yield f"{name}.positions", table.positions * FLOAT32
    for part in ("angles", "cosines", "sines"):
        yield f"{name}.{part}", half
    yield f"{name}.float32", 2 * half
    for part in ("positions", "angles", "cosines", "sines"):
        yield f"{name}.{part}", RELEASE
    if kept != FLOAT32:
        yield f"{name}.table", table.positions * table.size * kept
        yield f"{name}.float32", RELEASE


def _after(architecture: Architecture, module: Module, place: Place) -> Iterator[Step]:
    element = architecture.element_bytes
    if isinstance(module, Linear):
        storage = _storage(architecture, module)
        yield from linear_after(module, storage, place.tensor, element, place.target)
    elif isinstance(module, Experts):
        held = module.local(place.tensor, place.expert_ranks)
        storage = _storage(architecture, module)
        yield from expert_after(module, storage, held, element, place.target)
    elif isinstance(module, Absorbed):
        yield from _absorbed_steps(architecture, module, place)


def _absorbed_steps(architecture: Architecture, module: Absorbed, place: Place) -> Iterator[Step]:
    element, storage = architecture.element_bytes, _storage(architecture, module.source)
    if storage is not None:
        inputs, outputs = module.source.local(place.tensor)
        yield f"{module.name}.absorbed", inputs * sum(outputs) * element
    if place.target.version == MLA_MULTIPLIED_OUT:
        heads = share(module.heads, place.tensor)
        size = 1 if storage is not None and storage.kind == FP8 else element
        wide = heads * module.latent
        yield f"{module.name}.W_Q_UK", module.queries.inputs * wide * size
        yield f"{module.name}.W_UV_O", wide * module.output.outputs[0] * size
        yield f"{module.name}.W_QR", module.queries.inputs * heads * module.rope * element


def replay(steps: Iterable[Step]) -> int:
    """Bytes that PyTorch counts as allocated after `steps`."""
    allocator = CachingAllocator()
    at: dict[str, int] = {}
    for name, size in steps:
        if size == RELEASE:
            allocator.release(at.pop(name))
        else:
            at[name] = allocator.allocate(size)
    return allocator.allocated_bytes


def weights_bytes(architecture: Architecture, place: Place) -> int:
    """Bytes of the weights on a rank, as vLLM prints them."""
    if place not in architecture.weighed:
        architecture.weighed[place] = replay(allocations(architecture, place))
    return architecture.weighed[place]


def stage_weights(architecture: Architecture, place: Place) -> tuple[int, ...]:
    """Bytes of the weights on a rank of each pipeline stage; `place.stage` does not matter."""
    return tuple(
        weights_bytes(
            architecture,
            Place(
                place.tensor,
                place.pipeline,
                stage,
                place.expert_ranks,
                place.draft,
                place.vision,
                place.target,
            ),
        )
        for stage in range(place.pipeline)
    )


def layer_parameters(layer: Layer) -> int:
    """Elements of a layer before any cut, tables left out: what a checkpoint holds of it."""
    total = 0
    for module in layer.modules:
        if isinstance(module, Linear):
            rows = sum(module.outputs)
            total += rows * module.inputs + (rows if module.bias else 0)
        elif isinstance(module, Experts):
            total += module.count * module.width * module.hidden * (3 if module.gated else 2)
        elif isinstance(module, Tensor):
            total += module.elements
    return total


def stored_bytes(architecture: Architecture, *, draft: bool, vision: bool) -> int:
    """Bytes of all tensors before any cut, as a checkpoint in the compute type holds them.

    Without what vLLM makes of them: padding of the vocabulary, rotary tables, repacked weights.
    """
    place = Place(draft=draft, vision=vision)
    total = 0
    for module in stage_modules(architecture, place):
        if isinstance(module, Rotary):
            continue
        total += sum(size for _, size in made(architecture, module, place) if size != RELEASE)
        if isinstance(module, Embedding):
            row = module.hidden + (1 if module.bias else 0)
            total -= (module.local(1) - module.vocab) * row * architecture.element_bytes
    return total
