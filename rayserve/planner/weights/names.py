"""What does a config.json mean where its author spells a figure differently, or leaves it out?

Model classes of Transformers give older names to the usual figures (`attribute_map`), and files that
hold one config within another leave out what equals the inner class's default. vLLM sees the figure
in both cases, so the planner has to.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping
from typing import Any, cast

TEXT_PARTS = ("text_config", "llm_config", "language_config")
"""Keys under which a config of several parts keeps its language model."""
SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("multi_query_group_num",),
    "head_dim": ("kv_channels",),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len", "seq_length"),
}
"""The usual name of a figure, and what GPT-2, OPT, Bloom, DBRX, ChatGLM and EXAONE call it."""


@functools.cache
def class_defaults() -> Mapping[str, Mapping[str, Any]]:
    """What the config classes of Transformers hold where a file is silent, by `model_type`.

    `scripts/config_defaults.py` writes the file from the installed package.
    """
    text = importlib.resources.files("rayserve.data").joinpath("config-defaults.json").read_text()
    return cast("Mapping[str, Mapping[str, Any]]", json.loads(text)["defaults"])


@functools.cache
def inner_types() -> Mapping[str, str]:
    """`model_type` of the language model within a config, by that of the whole."""
    text = importlib.resources.files("rayserve.data").joinpath("config-defaults.json").read_text()
    return cast("Mapping[str, str]", json.loads(text)["inner"])


@functools.cache
def whole_defaults() -> Mapping[str, Mapping[str, Any]]:
    """Heads, width of an expert, window and tied output where a config that is all of the model is
    silent, by `model_type`.
    """
    text = importlib.resources.files("rayserve.data").joinpath("config-defaults.json").read_text()
    return cast("Mapping[str, Mapping[str, Any]]", json.loads(text)["whole"])


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The part of a config that describes the language model; None where it is the whole."""
    parts = (config.get(name) for name in TEXT_PARTS)
    return next((part for part in parts if isinstance(part, Mapping)), None)


def canonical(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the usual names, its language model's part without gaps.

    Only gaps are filled: what the file says, null included, stays as it is.
    """
    whole = _renamed(config)
    part = text_part(config)
    if part is None:
        return {**whole_defaults().get(str(whole.get("model_type")), {}), **whole}
    name = next(name for name in TEXT_PARTS if isinstance(config.get(name), Mapping))
    kind = part.get("model_type") or inner_types().get(str(config.get("model_type")), "")
    # A figure of the whole that the part lacks is read from there, as before.
    defaults = class_defaults().get(str(kind), {})
    gaps = {key: value for key, value in defaults.items() if key not in whole}
    return {**whole, name: {**gaps, **_renamed(part)}}


def _renamed(config: Mapping[str, Any]) -> dict[str, Any]:
    names = {
        usual: next((other for other in others if config.get(other) is not None), "")
        for usual, others in SPELLINGS.items()
        if config.get(usual) is None
    }
    return {**config, **{usual: config[name] for usual, name in names.items() if name}}
