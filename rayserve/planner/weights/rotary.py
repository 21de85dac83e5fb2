"""How large is the table of rotary positions that vLLM computes for a layer?

`get_rope` of vllm/model_executor/layers/rotary_embedding: positions x rotary size, cosines and sines
of half the size each, in the model's type. Which positions depends on the kind of scaling.
"""

from __future__ import annotations

from rayserve.planner.weights.facts import Facts
from rayserve.planner.weights.modules import Rotary

MROPE_POSITIONS = 4
"""MRotaryEmbedding holds this many times the positions, for long videos."""
STRETCHED = {"yarn", "deepseek_yarn", "deepseek_llama_scaling"}
LONGEST = 2**28
"""Positions; more would be a mistake in the config."""


def rope_facts(facts: Facts, kind: str = "") -> Facts:
    """The rope parameters of layers of `kind`, under their new or their old name."""
    stated = facts.inner("rope_parameters", "rope_scaling")
    if stated is None:
        return Facts({}, facts.where)
    if kind and stated.has(kind):
        return stated.inner(kind) or stated
    nested = any(isinstance(value, dict) for value in stated.data.values())
    return Facts({}, facts.where) if nested and not stated.has("rope_type") else stated


def read_rotary(
    facts: Facts,
    size: int,
    *,
    kind: str = "",
    partial: float = 1.0,
    scaled: bool = True,
    mrope: bool = False,
    element_bytes: int = 0,
    label: str = "",
) -> Rotary | None:
    """The table of one kind of layer; None where the config knows no positions.

    Args:
        facts: the text model's config.
        size: elements of a head that attention rotates at most.
        kind: the layer kind, where `rope_parameters` has one entry each.
        partial: the family's share of a head that is rotated, where the config is silent.
        scaled: whether `rope_scaling` concerns these layers.
        mrope: the family rotates in three dimensions.
        element_bytes: of the table; 0 for the activations' type.
        label: tells tables of equal shape apart.
    """
    positions = facts.optional("max_position_embeddings", most=LONGEST)
    if not positions:
        return None
    rope = rope_facts(facts, kind) if scaled else Facts({}, facts.where)
    title = rope.text("rope_type", rope.text("type", "default"))
    factor = rope.number("factor", 1.0, most=2**16)
    trained = rope.optional("original_max_position_embeddings", most=LONGEST)
    trained = trained or facts.optional("original_max_position_embeddings", most=LONGEST)
    if title in STRETCHED:
        positions = int((trained or positions / factor) * factor)
    elif title == "linear":
        positions = int(positions * factor)
    elif title in {"longrope", "su"}:
        positions += trained
    if mrope or rope.has("mrope_section"):
        positions *= MROPE_POSITIONS
    stated = rope.number("partial_rotary_factor", 0, most=1) or facts.number(
        "partial_rotary_factor", partial, most=1
    )
    rotated = rope.optional("rope_dim") or facts.optional("rotary_dim") or int(size * stated)
    if title == "proportional":
        rotated = size
    base = rope.data.get("rope_theta") or facts.data.get("rope_theta") or ""
    return Rotary(positions, rotated, f"{label}{title}{base}", element_bytes)
