"""Which quantization does a checkpoint of ModelOpt have that config.json does not tell?

ModelOpt 0.29 and before wrote it into a file beside config.json; mixed formats still stand there alone
where config.json has no list of layers. vLLM 0.32.0 reads it so (get_config of
transformers_utils/config.py, get_quant_config of model_loader/weight_utils.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rayserve.documents import brief
from rayserve.errors import SpecError, Where
from rayserve.planner.support.figures import check_figures
from rayserve.planner.support.reading import MAX_CONFIG_BYTES, check_size, parse_object

QUANT_CONFIG: Final = "hf_quant_config.json"
METHODS: Final = {
    "FP8": "modelopt",
    "FP8_PER_CHANNEL_PER_TOKEN": "modelopt",
    "FP8_PB_WO": "modelopt",
    "NVFP4": "modelopt_fp4",
}
"""vLLM's method for each algorithm of the file (_normalize_quantization_config)."""
MIXED: Final = "MIXED_PRECISION"


def wants_quant_config(config: Mapping[str, Any]) -> bool:
    """Whether vLLM looks for the file beside this config.json."""
    stated = config.get("quantization_config")
    return stated is None or _mixed(stated)


def with_quant_config(config: Mapping[str, Any], data: bytes, where: Where) -> Mapping[str, Any]:
    """The content of config.json with that of the file as its quantization; `where`: of the file.

    Raises:
        SpecError: it is no such file, or of an algorithm that vLLM does not take from it.
    """
    check_size(len(data), MAX_CONFIG_BYTES, where)
    found = parse_object(data, where)
    producer, inner = found.get("producer"), found.get("quantization")
    algorithm = inner.get("quant_algo") if isinstance(inner, Mapping) else None
    mixed = _mixed(config.get("quantization_config"))
    method = str(found.get("quant_method", ""))
    if isinstance(producer, Mapping) and producer.get("name") == "modelopt":
        known = METHODS | ({MIXED: "modelopt_mixed"} if mixed else {})
        if algorithm is not None and str(algorithm).upper() not in known:
            raise SpecError(
                f"`quant_algo` of {QUANT_CONFIG} as vLLM takes it: {', '.join(sorted(known))}",
                found=brief(algorithm),
                do="take a checkpoint whose config.json has quantization_config",
                where=where,
            )
        method = known.get(str(algorithm).upper(), method)
    merged = {**config, "quantization_config": {**found, "quant_method": method}}
    check_figures(merged, where)
    return merged


def _mixed(stated: object) -> bool:
    """Whether it is of mixed formats, without the list of layers that says which."""
    if not isinstance(stated, Mapping) or "quantized_layers" in stated:
        return False
    method = str(stated.get("quant_method", "")).lower()
    algorithm = str(stated.get("quant_algo", "")).upper()
    return method == "modelopt_mixed" or (method == "modelopt" and algorithm == MIXED)
