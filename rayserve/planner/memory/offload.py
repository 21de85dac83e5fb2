"""How much of a rank's weights stays in host memory, where the engine is told to leave some there?

vLLM moves parameters of the decoder layers, and of towers, one by one as layers are made, until
`cpu_offload_gb` is reached or passed (UVAOffloader of vllm/model_executor/offloader/uva.py). Where
loading repacks weights, tensors with a new name come back to the GPU (device_loading_context of
model_loader/utils.py), so of a quantized checkpoint it is not known how much stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rayserve.planner.memory.ranges import Range
from rayserve.planner.weights.architecture import Architecture
from rayserve.planner.weights.formats import RELEASE
from rayserve.planner.weights.modules import Rotary
from rayserve.planner.weights.stages import stage_range
from rayserve.planner.weights.tensors import Place, made
from rayserve.units import GIB

BASIS = "less what cpu_offload_gb leaves in host memory"


@dataclass(frozen=True)
class Offload:
    """What the engine's arguments ask for, for each rank."""

    most_bytes: int = 0
    """Bytes after which no further parameter is moved; 0: none is moved so."""
    picked: bool = False
    """Only parameters of given names are moved."""
    prefetch: bool = False
    """Whole layers are moved, and read ahead (PrefetchOffloader), which takes the place of the rest."""

    def __bool__(self) -> bool:
        return self.prefetch or self.most_bytes > 0


NO_OFFLOAD = Offload()


def read_offload(arguments: Mapping[str, object]) -> Offload:
    """Of engine arguments; which of both ways is taken follows create_offloader (offloader/base.py)."""
    backend = arguments.get("offload_backend", "auto")
    group, size = arguments.get("offload_group_size"), arguments.get("cpu_offload_gb")
    prefetch = backend == "prefetch" or (backend == "auto" and bool(group))
    known = isinstance(size, int | float) and not prefetch
    return Offload(
        most_bytes=int(size * GIB) if known and isinstance(size, int | float) else 0,
        picked=bool(arguments.get("cpu_offload_params")),
        prefetch=prefetch,
    )


def offloaded(architecture: Architecture, offload: Offload, place: Place) -> Range:
    """Bytes of a stage's weights that stay in host memory on each of its ranks."""
    if not offload:
        return Range.exact(0)
    span = stage_range(len(architecture.layers), place.pipeline, place.stage)
    layers = [size for index in span for size in _sizes(architecture, index, place)]
    tower = [
        size
        for module in (architecture.tower if place.vision else ())
        for name, size in made(architecture, module, place)
        if size != RELEASE
    ]
    whole = sum(layers) + sum(tower)
    if offload.prefetch:
        return Range(0, 0, whole, BASIS)
    largest = max((*layers, *tower), default=0)
    sure = min(offload.most_bytes, sum(layers))
    unsure = architecture.quantization is not None or offload.picked
    return Range(0 if unsure else sure, sure, min(offload.most_bytes + largest, whole), BASIS)


def _sizes(architecture: Architecture, index: int, place: Place) -> list[int]:
    """Bytes of each parameter of a layer on a rank."""
    return [
        size
        for module in architecture.layers[index].modules
        if not isinstance(module, Rotary)
        for _, size in made(architecture, module, place)
        if size != RELEASE
    ]


def without(weights: Range, kept: Range) -> Range:
    """Weights on the GPU, where `kept` of them are not."""
    if not kept.high:
        return weights
    low = max(0, weights.low - kept.high)
    expected = max(low, weights.expected - kept.expected)
    basis = f"{weights.basis}, {kept.basis}"
    return Range(low, expected, max(expected, weights.high - kept.low), basis)
