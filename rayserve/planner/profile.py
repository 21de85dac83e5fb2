"""What must be known of a model to place it? Its shapes, read from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rayserve.engine.models import UNCHANGED
from rayserve.errors import SpecError, Where
from rayserve.planner.weights.modules import VOCAB_PADDING
from rayserve.planner.weights.names import canonical, text_part
from rayserve.units import round_up

TYPE_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "float8_e4m3fn": 8}
MROPE = "mrope"
SECTIONS = ("mrope_section", "xdrope_section")
"""Keys of positions of three dimensions; the second is the older name (transformers_utils/config.py:664)."""
PER_KIND = "positions of several kinds of layers"
METHOD_BITS = {"fp8": 8, "fbgemm_fp8": 8, "awq": 4, "gptq": 4, "mxfp4": 4, "nvfp4": 4}


@dataclass(frozen=True)
class ModelProfile:
    """Shapes and formats of one checkpoint."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of a dense layer's MLP; 0 where every layer is a mixture of experts."""
    vocab: int
    max_position: int
    tied_embeddings: bool
    dtype_bits: int
    weight_bits: float
    """Bits of a weight of a linear layer, scales included."""
    quantization: str
    """Method of the checkpoint; empty: none."""
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    dense_layers: int = 0
    """Layers without experts, where the others have them."""
    latent_dim: int = 0
    """Elements of a token in an MLA cache; 0: keys and values are kept."""
    hybrid: bool = False
    """Some layers keep less than the whole context, so the KV estimate is an upper bound."""
    multimodal: bool = False
    """It takes images, sound or video beside text."""
    nested: bool = False
    """config.json keeps the language model in a part of its own."""
    layer_kinds: tuple[str, ...] = ()
    """`layer_types` of config.json."""
    rope_theta: float = 0
    rope_scaling: str = ""
    """What config.json says of rotary positions beyond their base: the kind of scaling, `mrope`, or that
    kinds of layers differ; empty: nothing."""
    draft: ModelProfile | None = None
    """The model that guesses for this one, where its config.json is known."""

    @property
    def padded_vocab(self) -> int:
        """Vocabulary as vLLM lays it out."""
        return round_up(self.vocab, VOCAB_PADDING)


def read_profile(config: Mapping[str, Any], where: Where) -> ModelProfile:
    """The profile of a config.json's content; `where` is for messages.

    Raises:
        SpecError: a figure is missing or is not a positive whole number.
    """
    config = canonical(config)
    inner = text_part(config)
    towers = (config.get(name) for name in ("vision_config", "audio_config"))
    multimodal = inner is not None or any(isinstance(tower, Mapping) for tower in towers)
    text: Mapping[str, Any] = {**config, **inner} if inner is not None else config
    read = _Reader(text, where)
    hidden = read.count("hidden_size")
    heads = read.count("num_attention_heads")
    experts = read.optional("n_routed_experts", "num_local_experts", "num_experts")
    layers = read.count("num_hidden_layers")
    latent = read.optional("kv_lora_rank")
    intermediate = read.optional("intermediate_size")
    expert_width = read.optional("moe_intermediate_size") or (intermediate if experts else 0)
    dense_layers = read.optional("first_k_dense_replace") if experts else 0
    method, bits = _quantization(text, where)
    dtype_bits = TYPE_BITS.get(str(text.get("dtype") or text.get("torch_dtype")), 16)
    return ModelProfile(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=read.optional("num_key_value_heads") or heads,
        head_dim=read.optional("head_dim") or max(1, hidden // heads),
        intermediate=intermediate if not experts or dense_layers else 0,
        vocab=read.count("vocab_size"),
        max_position=read.count("max_position_embeddings"),
        tied_embeddings=bool(text.get("tie_word_embeddings", False)),
        dtype_bits=dtype_bits,
        weight_bits=bits or dtype_bits,
        quantization=method,
        experts=experts,
        experts_per_token=read.optional("num_experts_per_tok") if experts else 0,
        expert_intermediate=expert_width,
        shared_intermediate=_shared(read, expert_width) if experts else 0,
        dense_layers=dense_layers,
        latent_dim=latent + read.optional("qk_rope_head_dim") if latent else 0,
        hybrid=_hybrid(text),
        multimodal=multimodal,
        nested=inner is not None,
        layer_kinds=_kinds(text),
        rope_theta=_rope_theta(text),
        rope_scaling=_rope_scaling(text),
    )


class _Reader:
    def __init__(self, data: Mapping[str, Any], where: Where) -> None:
        self.data = data
        self.where = where

    def count(self, name: str) -> int:
        value = self.optional(name)
        if not value:
            raise SpecError(
                f"`{name}` in the model's config.json",
                found="nothing",
                do=UNCHANGED,
                where=self.where,
            )
        return value

    def optional(self, *names: str) -> int:
        """The first of `names` that is set, or 0."""
        for name in names:
            value = self.data.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise SpecError(
                    f"`{name}` in config.json to be a whole number",
                    found=repr(value)[:80],
                    do=UNCHANGED,
                    where=self.where,
                )
            return value
        return 0


def _shared(read: _Reader, expert_width: int) -> int:
    return (
        read.optional("shared_expert_intermediate_size")
        or read.optional("n_shared_experts") * expert_width
    )


def _hybrid(text: Mapping[str, Any]) -> bool:
    kinds = text.get("layer_types")
    window = text.get("sliding_window") and text.get("use_sliding_window", True)
    mixed = isinstance(kinds, list) and any(kind != "full_attention" for kind in kinds)
    return bool(window) or mixed


def _kinds(text: Mapping[str, Any]) -> tuple[str, ...]:
    kinds = text.get("layer_types")
    return tuple(map(str, kinds)) if isinstance(kinds, list) else ()


def _rope_theta(text: Mapping[str, Any]) -> float:
    parameters = text.get("rope_parameters")
    nested = parameters.get("rope_theta") if isinstance(parameters, Mapping) else None
    value = nested or text.get("rope_theta") or 0
    return float(value) if isinstance(value, int | float) else 0.0


def _rope_scaling(text: Mapping[str, Any]) -> str:
    stated = [text.get(name) for name in ("rope_parameters", "rope_scaling")]
    if any(text.get(name) for name in SECTIONS):
        return MROPE
    for rope in (item for item in stated if isinstance(item, Mapping)):
        if any(isinstance(value, Mapping) for value in rope.values()):
            return PER_KIND
        kind = str(rope.get("rope_type") or rope.get("type") or "default")
        if any(rope.get(name) for name in SECTIONS):
            return MROPE
        if kind != "default":
            factor = rope.get("factor")
            return kind + (f" (factor {factor:g})" if isinstance(factor, int | float) else "")
    return ""


def _quantization(text: Mapping[str, Any], where: Where) -> tuple[str, float]:
    """Method and bits of a weight, scales included; ("", 0) for an unquantized checkpoint."""
    raw = text.get("quantization_config") or text.get("compression_config")
    if raw is None:
        return "", 0
    if not isinstance(raw, Mapping):
        raise SpecError(
            "`quantization_config` in config.json to be a mapping",
            found=type(raw).__name__,
            do=UNCHANGED,
            where=where,
        )
    method = str(raw.get("quant_method", ""))
    bits, group = (
        raw.get("bits") or raw.get("w_bit"),
        raw.get("group_size") or raw.get("q_group_size"),
    )
    groups = raw.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    if isinstance(weights, Mapping):
        bits, group = weights.get("num_bits"), weights.get("group_size")
    if not isinstance(bits, int):
        bits = METHOD_BITS.get(method, 0)
        if not bits:
            return method, 0
    return method, scaled_bits(bits, group if isinstance(group, int) and group > 0 else 0)


def scaled_bits(bits: int, group: int) -> float:
    """Bits of a weight with its share of a 16-bit scale; `group` 0: a scale a channel, ~nothing."""
    return bits + (16 / group if group else 0)
