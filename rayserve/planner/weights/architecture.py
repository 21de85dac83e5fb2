"""Layer by layer, what does a config.json describe?

The result holds what every estimate starts from: the modules with their shapes before any cut, what
each layer keeps of a token, the formats of the matrices. An architecture that is not in `FAMILIES` is
said to be unknown; nothing is guessed from its name.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rayserve.engine.models import UNCHANGED
from rayserve.errors import Where
from rayserve.planner.weights import vision
from rayserve.planner.weights.blocks import layer_count
from rayserve.planner.weights.facts import Facts, UnknownModelError
from rayserve.planner.weights.families import FAMILIES, TOWERS, Family
from rayserve.planner.weights.modules import COLUMNS, Embedding, Layer, Linear, Module, norm
from rayserve.planner.weights.names import TEXT_PARTS, canonical
from rayserve.planner.weights.quantization import Quantization, read_quantization

ELEMENT_BYTES = {
    "float32": 4,
    "float": 4,
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
}
"""Types that vLLM computes in, by their names in `--dtype` and in config.json."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model before it is cut."""

    name: str
    hidden: int
    vocab: int
    max_position: int
    """0: the config does not say."""
    dtype: str
    element_bytes: int
    layers: tuple[Layer, ...]
    embedding: tuple[Module, ...]
    tail: tuple[Module, ...]
    """Of the last stage: the final norm, and the output head where it is not tied."""
    tower: tuple[Module, ...]
    """Vision tower and projector; every stage holds them."""
    draft: tuple[Layer, ...]
    tied: bool
    quantization: Quantization | None
    assumed: tuple[str, ...] = ()
    """What the config leaves out and the family's published checkpoints supplied."""
    weighed: dict[Hashable, int] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Bytes of a rank's weights that were reckoned before, by its place."""


def read_architecture(
    config: Mapping[str, Any], where: Where, *, dtype: str = "auto", quantization: str = ""
) -> Architecture:
    """The architecture of a config.json's content.

    Args:
        config: the parsed file.
        where: for messages.
        dtype: the engine's `--dtype`.
        quantization: the engine's `--quantization`, empty where it is not given.

    Raises:
        UnknownModelError: the architecture or the weights' format is not one of ours.
        SpecError: a figure is missing or cannot be.
    """
    whole = Facts(canonical(config), where)
    name, family = _family(whole)
    inner = whole.inner(*TEXT_PARTS)
    text = Facts({**config, **inner.data}, where) if inner is not None else whole
    hidden, vocab = text.count("hidden_size"), text.count("padded_vocab_size", "vocab_size")
    build = family.build(text)
    title, element = _dtype(text, dtype)
    tied = _tied(whole, inner, family)
    formats = read_quantization(whole, quantization)
    embedding: list[Module] = [Embedding("model.embed_tokens", vocab, hidden)]
    if family.around is not None:
        embedding += family.around(text)
    tail = norm("model.norm", hidden, bias=family.norm_bias)
    if not tied:
        tail.append(_head(vocab, hidden, family, formats))
    tower, assumed = _tower(whole, family, hidden)
    return Architecture(
        name=name,
        hidden=hidden,
        vocab=vocab,
        max_position=text.optional("max_position_embeddings"),
        dtype=title,
        element_bytes=element,
        layers=tuple(build(index) for index in range(layer_count(text))),
        embedding=tuple(embedding),
        tail=tuple(tail),
        tower=tuple(tower),
        draft=family.draft(text, build) if family.draft is not None else (),
        tied=tied,
        quantization=formats,
        assumed=assumed,
    )


def _family(facts: Facts) -> tuple[str, Family]:
    names = facts.words("architectures")
    for name in names:
        if name in FAMILIES:
            return name, FAMILIES[name]
    raise UnknownModelError(
        "an architecture that the planner knows",
        found=f"`architectures: {list(names)[:3]}`"[:120] if names else "no `architectures`",
        do=(
            "give the checkpoint's folder: with the headers of its files the weights are exact, "
            "and the rest is bounded"
            if names
            else UNCHANGED
        ),
        where=facts.where,
    )


def _dtype(facts: Facts, flag: str) -> tuple[str, int]:
    stated = flag if flag not in {"", "auto"} else facts.text("dtype", facts.text("torch_dtype"))
    name = stated.removeprefix("torch.")
    if flag in {"", "auto"} and name in {"", "float32", "float"}:
        name = "bfloat16"  # vLLM does not compute in 32 bits unless it is told to
    if name not in ELEMENT_BYTES:
        raise facts.wrong("torch_dtype", f"one of {', '.join(ELEMENT_BYTES)}", stated)
    return name, ELEMENT_BYTES[name]


def _tied(whole: Facts, inner: Facts | None, family: Family) -> bool:
    for facts in (whole, inner):
        if facts is not None and facts.has("tie_word_embeddings"):
            return facts.flag("tie_word_embeddings", default=family.tied)
    return family.tied


def _head(vocab: int, hidden: int, family: Family, formats: Quantization | None) -> Module:
    if formats is not None and formats.head:
        return Linear("lm_head", hidden, (vocab,), COLUMNS)
    return Embedding("lm_head", vocab, hidden, bias=family.head_bias)


def _tower(whole: Facts, family: Family, hidden: int) -> tuple[list[Module], tuple[str, ...]]:
    if not family.tower:
        return [], ()
    published = vision.PUBLISHED[family.tower]
    stated = whole.inner("vision_config")
    own = stated.data if stated is not None else {}
    filled = {**published, **{key: value for key, value in own.items() if value is not None}}
    missing = tuple(f"vision_config.{key}" for key in published if own.get(key) is None)
    modules = TOWERS[family.tower](Facts(filled, whole.where), whole, hidden)
    return modules, missing


def vocab_rows(architecture: Architecture, tensor: int) -> int:
    """Rows of the padded vocabulary on a rank."""
    return Embedding("", architecture.vocab, architecture.hidden).local(tensor)
