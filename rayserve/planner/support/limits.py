"""Which shapes and kinds of attention does an architecture ask a cut and a chip for?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayserve.planner.support.divisibility import CutShape
from rayserve.planner.support.precision import Attention
from rayserve.planner.support.schemes import Scheme
from rayserve.planner.weights import modules
from rayserve.planner.weights.architecture import Architecture

IMAGE_PREFIX = {"Gemma3ForConditionalGeneration", "PaliGemmaForConditionalGeneration"}
"""Tokens of an image see each other (transformers_utils/model_arch_config_convertor.py)."""
WHOLE_TOWERS = ("KimiK25", "Gemma4")
"""Their tower falls back to a copy on each rank, or is never cut."""


def attentions(architecture: Architecture, *, images: bool) -> tuple[Attention, ...]:
    """The kinds of attention that a chip must have a backend for, each once.

    `images`: requests may hold some; vLLM attends as to text alone where they may not.
    """
    images = images and architecture.name in IMAGE_PREFIX
    found = []
    for layer in architecture.layers:
        own = layer.attention
        if own.kind == modules.MLA:
            dim = own.latent_size + own.rope_size
            found.append(Attention("sparse_mla" if own.index_size else "mla", dim))
        elif own.kind in {modules.FULL, modules.SLIDING, modules.CHUNKED}:
            sliding = own.kind == modules.SLIDING
            found.append(Attention("full", own.key_size, own.sinks, images, sliding))
    return tuple(dict.fromkeys(found))


def cut_shapes(
    architecture: Architecture,
    config: Mapping[str, Any],
    schemes: tuple[Scheme, ...],
    *,
    fp8_compute: bool,
) -> tuple[CutShape, ...]:
    """What each kind of layer asks of a cut; `config` for the heads of a vision tower.

    `fp8_compute`: the GPU has capability 8.9 or more.
    """
    tower = config.get("vision_config")
    heads = _first(tower, "num_attention_heads", "num_heads") if architecture.tower else 0
    shapes = (
        _shape(
            layer,
            architecture,
            schemes,
            vision_heads=heads,
            fp8_compute=fp8_compute,
        )
        for layer in architecture.layers
    )
    return tuple(dict.fromkeys(shapes))


def _shape(
    layer: modules.Layer,
    architecture: Architecture,
    schemes: tuple[Scheme, ...],
    *,
    vision_heads: int,
    fp8_compute: bool,
) -> CutShape:
    formats = architecture.quantization
    own, mlp, state = layer.attention, layer.mlp, layer.attention.state
    mamba = own.kind == modules.MAMBA
    linear = (state.heads, *(() if mamba else (state.key_heads,))) if state is not None else ()
    return CutShape(
        layers=len(architecture.layers),
        heads=own.heads,
        kv_heads=own.kv_heads,
        vocab=architecture.vocab,
        hidden=architecture.hidden,
        head_dim=own.key_size,
        value_dim=own.value_size,
        latent=own.kind == modules.MLA,
        mlp_width=mlp.width,
        shared_width=mlp.shared_width,
        experts=mlp.experts,
        expert_width=mlp.expert_width,
        vision_heads=vision_heads,
        vision_splits=not architecture.name.startswith(WHOLE_TOWERS),
        linear_heads=linear,
        mamba_groups=state.key_heads if state is not None and mamba else 0,
        schemes=schemes,
        attention_quantized=_quantized(layer, architecture, ".o_proj", ".dense"),
        mlp_quantized=_quantized(layer, architecture, "down_proj", ".fc2"),
        experts_quantized=any(
            formats is None or formats.storage(part.name, part.parts, expert=True) is not None
            for part in layer.modules
            if isinstance(part, modules.Experts)
        ),
        fp8_compute=fp8_compute,
    )


def _quantized(layer: modules.Layer, architecture: Architecture, *ends: str) -> bool:
    """Whether one of the layer's matrices with such a name is quantized."""
    formats = architecture.quantization
    return formats is None or any(
        formats.storage(part.name, part.parts) is not None
        for part in layer.modules
        if isinstance(part, modules.Linear) and part.name.endswith(ends)
    )


def _first(part: object, *names: str) -> int:
    values = (part.get(name) for name in names) if isinstance(part, Mapping) else ()
    return next((value for value in values if type(value) is int), 0)
