"""Which number formats does a checkpoint hold? Read from its quantization configuration.

A checkpoint may hold several: compressed-tensors lists groups of layers, each with its own. What a
matrix of such a format takes is `weights.storage`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SIXTEEN = "16"
"""Activations in the compute type."""


@dataclass(frozen=True)
class Scheme:
    """How one set of linear layers is quantized."""

    method: str = ""
    """vLLM's name of the method; empty: not quantized."""
    weights: str = ""
    """`fp8`, `fp8_block`, `int4` and other widths, `mxfp4`, `mxfp8`, `nvfp4`; empty: not known."""
    activations: str = SIXTEEN
    """`fp8`, `int8`, `mxfp4` ...; `16`: the compute type."""
    group: int = -1
    """Weights of one row that share a scale; -1: a scale a channel or a tensor."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale, of weights in blocks."""
    activation_order: bool = False
    """Groups are taken in the order of their activations, so a rank's rows are no whole groups."""
    declares_kv_scales: bool = False
    """The checkpoint says how its KV cache is quantized."""

    @property
    def format(self) -> str:
        """Key of the format in `data/precisions.yml`; empty: not known."""
        return f"{self.weights}/{self.activations}" if self.weights else ""


# What `quantization` makes of a checkpoint in 16 bits while it loads
# (vllm/config/quantization.py, _ONLINE_SHORTHANDS).
ONLINE = {
    "fp8": Scheme("fp8", "fp8", "fp8"),
    "fp8_per_tensor": Scheme("fp8_per_tensor", "fp8", "fp8"),
    "fp8_per_channel": Scheme("fp8_per_channel", "fp8", "fp8"),
    "fp8_per_block": Scheme("fp8_per_block", "fp8_block", "fp8", block=(128, 128)),
    "int8_per_channel_weight_only": Scheme("int8_per_channel_weight_only", "int8"),
    "nvfp4_per_token": Scheme("nvfp4_per_token", "nvfp4", "nvfp4", group=16),
    "mxfp8": Scheme("mxfp8", "mxfp8", "mxfp8", group=32),
    "mxfp4": Scheme("mxfp4", "mxfp4", group=32),
    "experts_int8": Scheme("experts_int8", "int8"),
}


_SAME = (
    frozenset({"awq", "awq_marlin", "auto_awq", "marlin", "moe_wna16"}),
    frozenset({"gptq", "gptq_marlin", "auto_gptq", "marlin", "moe_wna16"}),
    frozenset({"compressed-tensors", "compressed_tensors"}),
)
_ALWAYS_ITS_OWN = ("modelopt", "auto-round", "auto_round", "inc", "mxfp4", "gpt_oss_mxfp4", "mxfp8")


def contradicted(method: str, asked: str) -> bool:
    """Whether vLLM stops because `quantization` names another method than the checkpoint.

    `method` is `quant_method` of config.json, `asked` the argument, empty for none. Some methods take
    the checkpoint over whatever is asked for (`_verify_quantization` of vllm/config/model.py and the
    `override_quantization_method` of each method).
    """
    method, asked = method.lower(), asked.lower()
    if not method or not asked or asked in {method, "humming"}:
        return False
    if method.startswith(_ALWAYS_ITS_OWN):
        return False
    return not any(method in same and asked in same for same in _SAME)


def schemes_of(config: Mapping[str, Any], asked: str = "") -> tuple[Scheme, ...]:
    """The schemes of a model. Never raises: what is not understood has a method and no format.

    `config` is the content of config.json, or of its text part; `asked` is `precision.quantization`
    of the spec, empty for `auto`. An unquantized model has no scheme.
    """
    raw = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(raw, Mapping):
        return (ONLINE.get(asked, Scheme(asked)),) if asked else ()
    method = str(raw.get("quant_method") or "compressed-tensors").lower()
    if method == "compressed-tensors":
        found = tuple(dict.fromkeys(_compressed(raw)))
    else:
        found = (_single(method, raw),)
    return found or (Scheme(method),)


def _single(method: str, raw: Mapping[str, Any]) -> Scheme:
    if method in ("fp8", "deepseek_v4_fp8"):
        block = _block(raw.get("weight_block_size"))
        return Scheme(method, "fp8_block" if block else "fp8", "fp8", block=block)
    if method == "fbgemm_fp8":
        return Scheme(method, "fp8", "fp8")
    if "awq" in method:
        group = _whole(raw, "group_size", "q_group_size")
        return Scheme(method, f"int{_whole(raw, 'bits', 'w_bit', otherwise=4)}", group=group)
    if "gptq" in method or method == "moe_wna16":
        group = _whole(raw, "group_size")
        ordered = raw.get("desc_act") is True and group != -1
        bits = _whole(raw, "bits", otherwise=4)
        return Scheme(method, f"int{bits}", group=group, activation_order=ordered)
    if method in ("mxfp4", "gpt_oss_mxfp4"):
        return Scheme(method, "mxfp4", group=32)
    if method in ("experts_int8", "mxfp8"):
        return ONLINE[method]
    if method.startswith("modelopt"):
        return _modelopt(raw)
    if method == "quark":
        return _quark(raw)
    return Scheme(method)


def _modelopt(raw: Mapping[str, Any]) -> Scheme:
    inner = raw.get("quantization")
    inner = inner if isinstance(inner, Mapping) else raw
    algorithm = str(inner.get("quant_algo") or raw.get("quant_algo") or "").upper()
    declares = bool(inner.get("kv_cache_quant_algo") or raw.get("kv_cache_scheme"))
    if "MXFP8" in algorithm:
        return Scheme("modelopt_mxfp8", "mxfp8", "mxfp8", group=32, declares_kv_scales=declares)
    if "FP4" in algorithm:
        activations = SIXTEEN if "A16" in algorithm else "nvfp4"
        return Scheme("modelopt_fp4", "nvfp4", activations, 16, declares_kv_scales=declares)
    if algorithm == "FP8":
        return Scheme("modelopt", "fp8", "fp8", declares_kv_scales=declares)
    return Scheme("modelopt_mixed" if algorithm == "MIXED_PRECISION" else "modelopt")


def _quark(raw: Mapping[str, Any]) -> Scheme:
    whole = raw.get("global_quant_config")
    whole = whole if isinstance(whole, Mapping) else {}
    weight, inputs = (_quark_type(whole.get(key)) for key in ("weight", "input_tensors"))
    group = 32 if weight == "mxfp4" else -1
    return Scheme("quark", weight, inputs or SIXTEEN, group)


def _quark_type(part: object) -> str:
    if isinstance(part, Sequence) and not isinstance(part, str) and part:
        part = part[0]
    name = str(part.get("dtype", "")) if isinstance(part, Mapping) else ""
    return {"fp8_e4m3": "fp8", "int8": "int8", "int4": "int4", "fp4": "mxfp4"}.get(name, "")


def _compressed(raw: Mapping[str, Any]) -> Iterator[Scheme]:
    groups = raw.get("config_groups")
    declares = raw.get("kv_cache_scheme") is not None
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            yield _compressed_group(weights, group.get("input_activations"), declares=declares)


def _compressed_group(weights: Mapping[str, Any], inputs: object, *, declares: bool) -> Scheme:
    kind = _compressed_type(weights)
    size = _whole(weights, "group_size")
    block = _block(weights.get("block_structure")) if weights.get("strategy") == "block" else None
    return Scheme(
        "compressed-tensors",
        "fp8_block" if block and kind == "fp8" else kind,
        _compressed_type(inputs) if isinstance(inputs, Mapping) else SIXTEEN,
        size,
        block,
        activation_order=weights.get("actorder") in ("group", "dynamic"),
        declares_kv_scales=declares,
    )


def _compressed_type(part: Mapping[str, Any]) -> str:
    bits, kind = part.get("num_bits"), part.get("type", "int")
    size, strategy = part.get("group_size"), part.get("strategy")
    if kind != "float":
        return f"int{bits}" if isinstance(bits, int) else ""
    if bits == 4:
        return "nvfp4" if strategy == "tensor_group" and size == 16 else "mxfp4"
    if bits == 8 and strategy == "group" and size == 32 and "uint8" in str(part.get("scale_dtype")):
        return "mxfp8"
    return "fp8" if bits == 8 else ""


def _whole(data: Mapping[str, Any], *names: str, otherwise: int = -1) -> int:
    """The first of `names` that is a whole number."""
    values = (data.get(name) for name in names)
    found = (item for item in values if isinstance(item, int) and not isinstance(item, bool))
    return next(found, otherwise)


def _block(value: object) -> tuple[int, int] | None:
    if isinstance(value, str):  # as compressed-tensors wrote it first: 128x128
        value = [int(part) for part in value.split("x") if part.isdecimal()]
    if isinstance(value, Sequence) and len(value) == 2:
        rows, columns = value
        if isinstance(rows, int) and isinstance(columns, int) and min(rows, columns) > 0:
            return rows, columns
    return None
