"""Does vLLM know the scaling of positions that a config.json states, and has it all its figures?

Rows follow get_rope (model_executor/layers/rotary_embedding/__init__.py) and what Transformers asks of
each type as it reads config.json (modeling_rope_utils.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
INSTEAD_OF_FACTOR = "alpha"
"""Of type dynamic."""


def check_rope_types(config: Mapping[str, Any], where: Where | None) -> None:
    """Asks it of each kind of layer, where layers have their own.

    Raises:
        SpecError: vLLM would end as it loads the model.
    """
    for rope in _stated(config):
        kind, old = rope.get("rope_type"), rope.get("type")
        _check_conflict(kind, old, where)
        name = str(kind or old or "default")
        if name not in ROPE_TYPES:
            close = nearest(name, ROPE_TYPES)
            raise SpecError(
                f"a rope_type in config.json that vLLM {VLLM_VERSION} knows: {', '.join(ROPE_TYPES)}",
                found=name,
                do=f"write {close}, if the checkpoint was trained so" if close else UNCHANGED,
                where=where,
            )
        lacking = [key for key in ROPE_TYPES[name] if rope.get(key) is None]
        if name == "dynamic" and rope.get(INSTEAD_OF_FACTOR) is not None:
            lacking = []
        if lacking:
            raise SpecError(
                f"{' and '.join(f'`{key}`' for key in lacking)} beside rope_type {name} in config.json",
                found=", ".join(map(str, rope)),
                do=UNCHANGED,
                where=where,
            )


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


def _stated(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The scaling of all layers, or that of each kind of them."""
    inner = config.get("text_config")
    text = {**config, **inner} if isinstance(inner, Mapping) else config
    for stated in (text.get("rope_parameters"), text.get("rope_scaling")):
        if not isinstance(stated, Mapping) or not stated:
            continue
        kinds = [value for value in stated.values() if isinstance(value, Mapping)]
        yield from kinds or [stated]
