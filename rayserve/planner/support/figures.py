"""Is every figure of a config.json a possible number, and do they agree with each other?

Judges the whole file before anything is made of it (`weights.facts` then reads what one family needs),
whatever the family: wrong types, impossible sizes, lists of the wrong
length. The bounds are a few times beyond the largest models known, so that a file with 10^9 layers
is refused rather than planned for hours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rayserve.documents import brief
from rayserve.engine.models import UNCHANGED
from rayserve.errors import SpecError, Where
from rayserve.planner.support.names import check_names
from rayserve.spec import nearest

MOST_LAYERS = 1000
_WIDTH = 2**22
_HEADS = 2**14
# Least and greatest value of each figure, where it is set.
BOUNDS: dict[str, tuple[int, int]] = {
    "num_hidden_layers": (1, MOST_LAYERS), "num_layers": (1, MOST_LAYERS),
    "n_layer": (1, MOST_LAYERS), "n_layers": (1, MOST_LAYERS),
    "hidden_size": (1, _WIDTH), "n_embd": (1, _WIDTH), "d_model": (1, _WIDTH),
    "num_attention_heads": (1, _HEADS), "n_head": (1, _HEADS), "n_heads": (1, _HEADS),
    "num_key_value_heads": (1, _HEADS), "multi_query_group_num": (1, _HEADS),
    "head_dim": (1, 2**14), "global_head_dim": (1, 2**14), "v_head_dim": (0, 2**14),
    "qk_nope_head_dim": (0, 2**14), "qk_rope_head_dim": (0, 2**14),
    "kv_lora_rank": (0, 2**16), "q_lora_rank": (0, 2**16),
    "intermediate_size": (0, _WIDTH), "ffn_hidden_size": (0, _WIDTH),
    "moe_intermediate_size": (0, _WIDTH), "shared_expert_intermediate_size": (0, _WIDTH),
    "vocab_size": (1, 2**24), "padded_vocab_size": (1, 2**24),
    "max_position_embeddings": (1, 2**31),
    "n_routed_experts": (0, 2**16), "num_local_experts": (0, 2**16), "num_experts": (0, 2**16),
    "num_experts_per_tok": (0, 2**16), "n_shared_experts": (0, 2**10),
    "first_k_dense_replace": (0, MOST_LAYERS), "num_nextn_predict_layers": (0, MOST_LAYERS),
    "sliding_window": (-1, 2**31), "attention_chunk_size": (0, 2**31),
    "full_attention_interval": (1, MOST_LAYERS), "interleave_moe_layer_step": (0, MOST_LAYERS),
    "linear_num_key_heads": (1, _HEADS), "linear_num_value_heads": (1, _HEADS),
    "linear_key_head_dim": (1, 2**14), "linear_value_head_dim": (1, 2**14),
    "linear_conv_kernel_dim": (1, 2**10), "index_topk": (0, 2**31), "index_head_dim": (0, 2**14),
    "mamba_num_heads": (0, _HEADS), "mamba_head_dim": (0, 2**14), "ssm_state_size": (0, 2**16),
    "depth": (0, MOST_LAYERS), "num_heads": (0, _HEADS),
}  # fmt: skip
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
HIDDEN = ("hidden_size", "n_embd", "d_model")
VOCAB = ("vocab_size", "padded_vocab_size")
TEXT_PARTS = ("text_config", "llm_config", "language_config")
OTHER_PARTS = ("vision_config", "audio_config")
DTYPES = ("auto", "bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "half", "float")
AUTO_ROUND = ("auto-round", "auto_round", "inc")
"""Methods in which a group size of 0 stands for a scale a tensor."""
TEXT_FIGURES = (("layers", LAYERS), ("width", HIDDEN), ("vocabulary", VOCAB))
ONE_VALUE = frozenset(name for _, names in TEXT_FIGURES for name in names)
"""Figures of the whole text model: never a list of one value a layer."""


def check_figures(config: Mapping[str, Any], where: Where) -> None:
    """Every figure of the model and of its towers, and its quantization.

    Raises:
        SpecError: the first that is missing, of a wrong type or size, or at odds with another.
    """
    parts = list(text_parts(config))
    for prefix, part in parts:
        _check_bounds(part, prefix, where)
        _check_types(part, prefix, where)
        _check_relations(part, prefix, where)
        _check_quantization(part, prefix, where)
    for name in OTHER_PARTS:
        tower = config.get(name)
        if isinstance(tower, Mapping):
            _check_bounds(tower, f"{name}.", where, lists=False)
        elif tower is not None:
            raise _error(f"`{name}` as an object", brief(tower), where, name)
    for what, names in TEXT_FIGURES:
        if not any(name in part for _, part in parts for name in names):
            raise _error(f"`{names[0]}`, the model's {what}", "nothing", where, names[0])


def text_parts(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The objects that describe the text model, each with the prefix of its keys."""
    yield "", config
    thinker = config.get("thinker_config")
    outer = [("", config)]
    if isinstance(thinker, Mapping):
        yield "thinker_config.", thinker
        outer.append(("thinker_config.", thinker))
    for prefix, part in outer:
        for name in TEXT_PARTS:
            inner = part.get(name)
            if isinstance(inner, Mapping):
                yield f"{prefix}{name}.", inner


def _error(needed: str, found: str, where: Where, key: str, *, do: str = UNCHANGED) -> SpecError:
    return SpecError(needed, found=found[:200], do=do, where=Where(where.path, where.line, key))


def _first(part: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """The first of `names` that is a plain number, or 0."""
    return next((part[name] for name in names if type(part.get(name)) is int), 0)


def _check_bounds(
    part: Mapping[str, Any], prefix: str, where: Where, *, lists: bool = True
) -> None:
    layers = _first(part, LAYERS)
    for name, (least, most) in BOUNDS.items():
        value = part.get(name)
        if value is None:
            continue
        if not isinstance(value, list) or (lists and name in ONE_VALUE):
            _check_number(value, least if lists else 0, most, prefix + name, where)
            continue
        if len(value) > MOST_LAYERS:
            needed = f"`{prefix}{name}` of at most {MOST_LAYERS} values, one a layer"
            raise _error(needed, f"{len(value)}", where, prefix + name)
        for item in value:
            if item is not None:
                _check_number(item, min(least, 0), most, prefix + name, where)
        if lists and layers and len(value) != layers:
            needed = f"`{prefix}{name}` with one value for each of {layers} layers"
            raise _error(needed, f"{len(value)} values", where, prefix + name)


def _check_number(value: object, least: int, most: int, key: str, where: Where) -> None:
    if type(value) is not int:
        do = UNCHANGED
        if isinstance(value, float) and not math.isfinite(value):
            raise _error(f"`{key}` as a finite number", brief(value), where, key)
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            do = f"write {int(value)}"
        found = str(value).lower() if isinstance(value, bool) else brief(value)
        raise _error(f"`{key}` as a whole number", found, where, key, do=do)
    if value < least:
        raise _error(f"`{key}` of at least {least}", brief(value), where, key)
    if value > most:
        raise _error(f"`{key}` of at most {most}, beyond any known model", brief(value), where, key)


def _check_types(part: Mapping[str, Any], prefix: str, where: Where) -> None:
    for name in ("dtype", "torch_dtype"):
        value = part.get(name)
        known = isinstance(value, str) and value.removeprefix("torch.") in DTYPES
        if value is not None and not known:
            close = nearest(value, DTYPES) if isinstance(value, str) else ""
            do = f"write {close}" if close else UNCHANGED
            needed = f"`{prefix}{name}` as a type such as bfloat16"
            raise _error(needed, brief(value), where, prefix + name, do=do)
    value = part.get("tie_word_embeddings")
    if value is not None and not isinstance(value, bool):
        needed = f"`{prefix}tie_word_embeddings` as true or false"
        raise _error(needed, brief(value), where, f"{prefix}tie_word_embeddings")
    for name in ("rope_scaling", "rope_parameters"):
        value = part.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise _error(f"`{prefix}{name}` as an object", brief(value), where, prefix + name)
        for key in ("factor", "rope_theta"):
            _check_positive(value or {}, key, f"{prefix}{name}.", where)
    _check_positive(part, "rope_theta", prefix, where)


def _check_positive(part: Mapping[str, Any], name: str, prefix: str, where: Where) -> None:
    value = part.get(name)
    if value is None:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        key = prefix + name
        raise _error(f"`{key}` as a finite number above 0", brief(value), where, key)


def _check_relations(part: Mapping[str, Any], prefix: str, where: Where) -> None:
    layers = _first(part, LAYERS)
    _check_layer_types(part, prefix, layers, where)
    heads, kv_heads = (_first(part, (n,)) for n in ("num_attention_heads", "num_key_value_heads"))
    hidden = _first(part, HIDDEN)
    key = f"{prefix}num_attention_heads"
    tells_dim = part.get("head_dim") or part.get("kv_lora_rank")
    if heads and hidden % heads and not tells_dim:
        needed = f"heads that divide the width {hidden}, where no `head_dim` is given"
        raise _error(needed, f"{heads} heads", where, key)
    if heads and kv_heads and heads % kv_heads:
        needed = f"heads in equal groups for {kv_heads} KV heads"
        raise _error(needed, f"{heads} heads", where, key)
    experts = _first(part, ("n_routed_experts", "num_local_experts", "num_experts"))
    chosen = _first(part, ("num_experts_per_tok",))
    if experts and chosen > experts:
        needed = f"`num_experts_per_tok` of at most {experts}, the number of experts"
        raise _error(needed, str(chosen), where, f"{prefix}num_experts_per_tok")
    dense = _first(part, ("first_k_dense_replace",))
    if layers and dense > layers:
        needed = f"`first_k_dense_replace` of at most {layers}, the number of layers"
        raise _error(needed, str(dense), where, f"{prefix}first_k_dense_replace")


def _check_layer_types(part: Mapping[str, Any], prefix: str, layers: int, where: Where) -> None:
    kinds = part.get("layer_types")
    if kinds is None:
        return
    key = f"{prefix}layer_types"
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise _error(f"`{key}` as a list of names", brief(kinds), where, key)
    drafts = _first(part, ("num_nextn_predict_layers",))
    if layers and len(kinds) not in range(layers, layers + drafts + 1):
        raise _error(f"`{key}` of {layers} layers", f"{len(kinds)} entries", where, key)


# ── quantization ──────────────────────────────────────────────────────────────────────────────────
def _check_quantization(part: Mapping[str, Any], prefix: str, where: Where) -> None:
    for name in ("quantization_config", "compression_config"):
        raw = part.get(name)
        if raw is None:
            continue
        key = prefix + name
        if not isinstance(raw, Mapping):
            raise _error(f"`{key}` as an object", brief(raw), where, key)
        method = raw.get("quant_method")
        if method is not None and not isinstance(method, str):
            needed = f"`{key}.quant_method` as text"
            raise _error(needed, brief(method), where, f"{key}.quant_method")
        _check_widths(raw, f"{key}.", where)
        groups = raw.get("config_groups")
        if groups is not None and not isinstance(groups, Mapping):
            needed = f"`{key}.config_groups` as an object"
            raise _error(needed, brief(groups), where, f"{key}.config_groups")
        for label, group in (groups or {}).items():
            shown = label[:40] if label.isprintable() else "?"
            _check_group(group, f"{key}.config_groups.{shown}", where)
        check_names(raw, f"{key}.", where, layers=_first(part, LAYERS))


def _check_group(group: object, key: str, where: Where) -> None:
    if not isinstance(group, Mapping):
        raise _error(f"`{key}` as an object", brief(group), where, key)
    for side in ("weights", "input_activations"):
        part = group.get(side)
        if part is None:
            continue
        if not isinstance(part, Mapping):
            raise _error(f"`{key}.{side}` as an object", brief(part), where, f"{key}.{side}")
        _check_widths(part, f"{key}.{side}.", where)


def _check_widths(raw: Mapping[str, Any], prefix: str, where: Where) -> None:
    for name in ("bits", "w_bit", "num_bits"):
        if raw.get(name) is not None:
            _check_number(raw[name], 1, 16, prefix + name, where)
    for name in ("group_size", "q_group_size"):
        if raw.get(name) is not None:
            _check_number(raw[name], -1, 2**16, prefix + name, where)
            if raw[name] == 0 and raw.get("quant_method") not in AUTO_ROUND:
                needed = f"`{prefix}{name}` above 0, or -1 for a scale a channel"
                raise _error(needed, "0", where, prefix + name)
    for name in ("weight_block_size", "block_structure"):
        block = raw.get(name)
        if block is None or (isinstance(block, str) and re.fullmatch(r"\d{1,5}x\d{1,5}", block)):
            continue
        pair = isinstance(block, list) and len(block) == 2
        if not pair or not all(type(size) is int and 0 < size <= 2**16 for size in block):
            needed = f"`{prefix}{name}` as rows and columns of a block, such as [128, 128]"
            raise _error(needed, brief(block), where, prefix + name)
