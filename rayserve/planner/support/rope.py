"""Does vLLM know the scaling of positions that a config.json states, and has it all its figures?

Rows follow get_rope (model_executor/layers/rotary_embedding/__init__.py) and what Transformers asks of
each type as it reads config.json (modeling_rope_utils.py). Some models of vLLM put a type of their own in
place of the one that is stated before they call get_rope.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from rayserve.engine import VLLM_VERSION
from rayserve.engine.models import UNCHANGED
from rayserve.errors import SpecError, Where
from rayserve.spec import nearest

_FACTOR = ("factor",)
ROPE_TYPES: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "bailing_mrope": ("mrope_section",),
    "proportional": (),
    "llama3": (*_FACTOR, "low_freq_factor", "high_freq_factor"),
    "mllama4": (),
    "linear": _FACTOR,
    "ntk": _FACTOR,
    "dynamic": _FACTOR,
    "yarn": _FACTOR,
    "deepseek_yarn": _FACTOR,
    "deepseek_llama_scaling": _FACTOR,
    "longrope": ("short_factor", "long_factor"),
    "openpangu": ("mrope_section",),
    "su": ("short_factor", "long_factor"),
    "mrope": ("mrope_section",),
    "telechat3-yarn": _FACTOR,
    "xdrope": (),
}
"""Types, from `su` on those that are renamed as a config is read, and the keys that each cannot do
without."""
UNSCALED = ("default", "mrope")
"""Types that read as `default`."""
INSTEAD_OF_FACTOR = "alpha"
"""Of type dynamic."""
DEEPSEEK = frozenset({
    "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM",
    "DeepseekV4ForCausalLM", "DeepseekV41ForCausalLM", "GlmMoeDsaForCausalLM",
    "Glm4MoeLiteForCausalLM", "LongcatFlashForCausalLM", "MistralLarge3ForCausalLM",
    "AXK1ForCausalLM", "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2",
})  # fmt: skip
"""Architectures, and types of language models within others, that take any type but `default` for
deepseek_yarn or deepseek_llama_scaling (deepseek_v2.py:542 and 1115, AXK1.py:324, and
vllm/models/deepseek_v32/attention.py:154, deepseek_v4/common/rope.py:31)."""
PANGU = frozenset({
    "PanguEmbeddedForCausalLM", "PanguProMoEV2ForCausalLM", "PanguUltraMoEForCausalLM",
    "OpenPanguVLForConditionalGeneration",
})  # fmt: skip
"""Architectures that take any type for openpangu where `mrope_interleaved` is set, and leave it unread
with a latent or a sink (openpangu.py:329, 509 and 751)."""


def check_rope_types(config: Mapping[str, Any], where: Where | None) -> None:
    """Asks it of each kind of layer, where layers have their own.

    Raises:
        SpecError: vLLM would end as it loads the model.
    """
    inner = config.get("text_config")
    text = {**config, **inner} if isinstance(inner, Mapping) else config
    names = {str(one.get("model_type")) for one in (config, text)}
    listed = [one.get("architectures") for one in (config, text)]
    names |= {str(name) for found in listed if isinstance(found, list) for name in found}
    for rope in _stated(text):
        kind, old = rope.get("rope_type"), rope.get("type")
        _check_conflict(kind, old, where)
        name = str(kind or old or "default")
        needed = _needed(names, text, rope, name)
        if needed is None:
            close = nearest(name, ROPE_TYPES)
            raise SpecError(
                f"a rope_type in config.json that vLLM {VLLM_VERSION} knows: {', '.join(ROPE_TYPES)}",
                found=name,
                do=f"write {close}, if the checkpoint was trained so" if close else UNCHANGED,
                where=where,
            )
        lacking = [key for key in needed if rope.get(key) is None]
        if lacking:
            raise SpecError(
                f"{' and '.join(f'`{key}`' for key in lacking)} beside rope_type {name} in config.json",
                found=", ".join(map(str, rope)),
                do=UNCHANGED,
                where=where,
            )


def _needed(
    names: AbstractSet[str], text: Mapping[str, Any], rope: Mapping[str, Any], name: str
) -> tuple[str, ...] | None:
    """The keys that a type cannot do without in a model of such names; None: vLLM does not know it."""
    known = ROPE_TYPES.get(name)
    if names & DEEPSEEK and text.get("qk_rope_head_dim", 1) and name not in UNSCALED:
        return tuple(dict.fromkeys((*(known or ()), *_FACTOR)))
    if name == "dynamic" and rope.get(INSTEAD_OF_FACTOR) is not None:
        return ()
    if names & PANGU:
        if text.get("kv_lora_rank") or text.get("param_sink_number"):
            return known or ()
        if rope.get("mrope_interleaved"):
            return tuple(dict.fromkeys((*(known or ()), *ROPE_TYPES["openpangu"])))
    return known


def _check_conflict(kind: object, old: object, where: Where | None) -> None:
    renamed = {("longrope", "su"), ("default", "mrope")}
    if kind is None or old is None or kind == old or (kind, old) in renamed:
        return
    raise SpecError(
        "one type of scaling in config.json, as `rope_type` or as `type`, its older name",
        found=f"rope_type {kind} and type {old}",
        do=UNCHANGED,
        where=where,
    )


def _stated(text: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The scaling of all layers, or that of each kind of them."""
    for stated in (text.get("rope_parameters"), text.get("rope_scaling")):
        if not isinstance(stated, Mapping) or not stated:
            continue
        kinds = [value for value in stated.values() if isinstance(value, Mapping)]
        yield from kinds or [stated]
