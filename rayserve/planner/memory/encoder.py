"""Which images does the profile run send through a vision tower?

vLLM encodes as many of the largest images as a step's encoder budget holds. The largest image follows
from the published processor of each tower; nothing of it stands in config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rayserve.planner.memory.terms import Vision, images_profiled
from rayserve.planner.memory.versions import Batch
from rayserve.planner.weights.architecture import Architecture
from rayserve.planner.weights.families import FAMILIES
from rayserve.planner.weights.modules import share


@dataclass(frozen=True)
class Image:
    """The largest image of a tower's published processor."""

    pixels: int
    """Elements of its pixel tensor."""
    patches: int
    """Positions in the tower."""
    tokens: int
    """Embeddings in the prompt."""
    hidden: int
    width: int
    """Of the tower's MLP; half as much again where it is gated."""


_QWEN_PATCHES = 65536
"""Of 12,845,056 pixels (`max_pixels`) in patches of 14, four of which are one token."""
LARGEST: Mapping[str, Image] = {
    "internvl": Image(13 * 3 * 448 * 448, 13 * 1025, 13 * 256, 1024, 4096),
    "llava": Image(3 * 336 * 336, 577, 576, 1024, 4096),
    "gemma3": Image(3 * 896 * 896, 4096, 256, 1152, 4304),
    "gemma4": Image(3 * 896 * 896, 4096, 280, 1152, 4304),
    "mistral3": Image(3 * 1540 * 1540, 110 * 110, 55 * 55, 1024, 6144),
    "llama4": Image(17 * 3 * 336 * 336, 17 * 576, 17 * 144, 1408, 5632),
    "kimi_vl": Image(4096 * 588, 4096, 1024, 1152, 4304),
    "kimi_k25": Image(4096 * 588, 4096, 1024, 1152, 4304),
    "granite_vision": Image(11 * 3 * 384 * 384, 11 * 729, 7290, 1152, 4304),
    "qwen2_vl": Image(_QWEN_PATCHES * 1176, _QWEN_PATCHES, _QWEN_PATCHES // 4, 1280, 5120),
    "qwen2_5_vl": Image(_QWEN_PATCHES * 1176, _QWEN_PATCHES, _QWEN_PATCHES // 4, 1280, 5130),
    "qwen3_vl": Image(_QWEN_PATCHES * 1536, _QWEN_PATCHES, _QWEN_PATCHES // 4, 1152, 4304),
    "qwen3_5": Image(_QWEN_PATCHES * 1536, _QWEN_PATCHES, _QWEN_PATCHES // 4, 1152, 4304),
}


def vision_work(
    architecture: Architecture, batch: Batch, *, tensor: int, images: int = 1
) -> Vision | None:
    """The tower's work in the profile run; None without a tower or with no images allowed."""
    family = FAMILIES.get(architecture.name)
    image = LARGEST.get(family.tower) if family is not None else None
    if image is None or not architecture.tower or not images:
        return None
    count = images_profiled(batch.step_tokens, batch.seqs, image.tokens, per_prompt=images)
    return Vision(
        pixels=image.pixels * count,
        patches=image.patches * count,
        output_tokens=image.tokens * count,
        hidden=image.hidden,
        width=share(image.width, tensor),
    )
