"""What does an architecture bring along: attention, positions, and what no quantization touches?

All of it is read from the same description that weights and KV cache follow (planner/weights), which
follows the model files of the pinned vLLM.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from rayserve.errors import Where
from rayserve.planner.candidates.record import Traits
from rayserve.planner.weights import modules
from rayserve.planner.weights.architecture import Architecture
from rayserve.planner.weights.facts import Facts
from rayserve.planner.weights.modules import (
    Absorbed,
    Attention,
    Embedding,
    Experts,
    Linear,
    Module,
    Rotary,
    Tensor,
)
from rayserve.planner.weights.rotary import rope_facts

FLOAT32 = 4
CACHE_SCALE = re.compile(r"\._(k|v|q|prob)_scale$")
TOWER = "vision tower"


def traits_of(architecture: Architecture, config: Mapping[str, Any], where: Where) -> Traits:
    """The traits of one checkpoint; `where` is for messages.

    Raises:
        SpecError: `rope_scaling` of config.json is malformed.
    """
    positions, claimed = _positions(config, where)
    return Traits(
        parameters=sum(size for _, _, size in _parameters(architecture)),
        attention=_attention(architecture),
        positions=positions,
        claimed_positions=claimed,
        unquantized=_unquantized(architecture),
        float32=_float32(architecture),
    )


# ── attention ─────────────────────────────────────────────────────────────────────────────────────
def _attention(architecture: Architecture) -> list[str]:
    layers = len(architecture.layers)
    kinds = Counter(text for layer in architecture.layers if (text := _kind(layer.attention)))
    return [
        text if count == layers else f"{text}, {count} of {layers} layers"
        for text, count in kinds.items()
    ]


def _kind(own: Attention) -> str:
    """One layer's attention; empty where it has none."""
    if own.kind == modules.NONE:
        return ""
    if own.kind == modules.MLA:
        sparse = ", sparse" if own.index_size else ""
        return f"MLA of {own.latent_size + own.rope_size} elements a token{sparse}"
    if own.kind == modules.MAMBA:
        return "Mamba-2 state of a fixed size"
    if own.kind == modules.LINEAR:
        return "linear attention, state of a fixed size"
    ratio = own.heads // max(1, own.kv_heads)
    title = "MHA" if ratio == 1 else "MQA" if own.kv_heads == 1 else "GQA"
    text = f"{title} {ratio}:1 ({own.heads} heads, {own.kv_heads} KV)"
    if own.window:
        what = "chunks" if own.kind == modules.CHUNKED else "window"
        text += f", {what} of {own.window} tokens"
    return text


# ── positions ─────────────────────────────────────────────────────────────────────────────────────
def _positions(config: Mapping[str, Any], where: Where) -> tuple[str, int]:
    """The positions in words, and how many of them the makers of the checkpoint claim."""
    whole = Facts(config, where)
    inner = whole.inner("text_config", "language_config", "llm_config")
    text = Facts({**config, **inner.data}, where) if inner is not None else whole
    limit = text.optional("max_position_embeddings", "n_positions")
    rope = rope_facts(text)
    kind = rope.text("rope_type", rope.text("type", "default"))
    first = rope.optional("original_max_position_embeddings")
    if not limit:
        return "", 0
    if kind == "default":
        return f"{limit} positions", limit
    if first and first < limit:
        return f"{limit} positions, extended with {kind} from {first}", limit
    factor = rope.number("factor", 1.0)
    return f"{limit} positions, which {kind} x{factor:g} stretches", limit


# ── what stays as it was ──────────────────────────────────────────────────────────────────────────
def _all(architecture: Architecture) -> Iterator[tuple[str, Module]]:
    """Every module once, with the part of the model that it belongs to."""
    for module in (*architecture.embedding, *architecture.tail):
        yield "", module
    for layer in architecture.layers:
        for module in layer.modules:
            yield "", module
    for module in architecture.tower:
        yield TOWER, module


def _parameters(architecture: Architecture) -> Iterator[tuple[str, Module, int]]:
    """(part, module, weights) of everything that a checkpoint holds."""
    for part, module in _all(architecture):
        if isinstance(module, Linear):
            size = module.inputs * sum(module.outputs)
        elif isinstance(module, Experts):
            size = module.count * module.hidden * module.width * (3 if module.gated else 2)
        elif isinstance(module, Embedding):
            size = module.vocab * module.hidden
        elif isinstance(module, Tensor) and not CACHE_SCALE.search(module.name):
            size = module.elements
        else:
            continue
        yield part, module, size


def _unquantized(architecture: Architecture) -> list[str]:
    formats = architecture.quantization
    if formats is None:
        return []
    sizes: Counter[str] = Counter()
    for part, module, size in _parameters(architecture):
        if isinstance(module, Linear):
            storage = formats.storage(module.name, module.parts) if module.quantizable else None
        elif isinstance(module, Experts):
            storage = formats.storage(module.name, module.parts, expert=True)
        else:
            storage = None
        if storage is None:
            sizes[part or _title(module)] += size
    return [f"{name} ({_count(size)})" for name, size in sizes.most_common()]


def _float32(architecture: Architecture) -> list[str]:
    found = dict.fromkeys(
        _title(module)
        for _, module in _all(architecture)
        if isinstance(module, Linear | Tensor | Rotary) and module.element_bytes == FLOAT32
    )
    states = (layer.attention.state for layer in architecture.layers)
    if any(state is not None and state.element_bytes == FLOAT32 for state in states):
        found["recurrent state"] = None
    return list(found)


def _title(module: Module) -> str:
    """What people call a module: the kind of part that it is, without its place."""
    if isinstance(module, Rotary):
        return "rotary table"
    if isinstance(module, Absorbed):
        return "absorbed projections"
    if CACHE_SCALE.search(module.name):
        return "KV scales"
    name = module.name.removesuffix(".weight").removesuffix(".bias")
    last = name.rpartition(".")[2]
    if re.search(r"norm", last):
        return "norms"
    return "router" if last in {"gate", "router"} else last


def _count(size: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return str(size)
