"""What did a logged start load, in the terms of a config.json and the engine's flags?

A case is one start of vLLM with the figures it printed; a record holds the sizes of one config.json,
flattened, null where it is not known. This module joins the two, and prints predicted against logged
weights:

    python -m benchmarks.planner_cases CASES.json MODEL_CONFIGS.json
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.planner_recipes import (
    ARCHITECTURES,
    PUBLISHED,
    blocks,
    named_format,
    packed_format,
    recipe,
)
from rayserve.errors import SpecError, Where
from rayserve.planner.weights.architecture import Architecture, read_architecture
from rayserve.planner.weights.formats import Target
from rayserve.planner.weights.tensors import Place, stage_weights
from rayserve.units import GIB

Record = Mapping[str, Any]
PLAIN = [
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "moe_intermediate_size",
    "num_experts_per_tok",
    "n_shared_experts",
    "shared_expert_intermediate_size",
    "first_k_dense_replace",
    "interleave_moe_layer_step",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_topk",
    "index_head_dim",
    "sliding_window",
    "attention_chunk_size",
    "full_attention_interval",
    "linear_num_value_heads",
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "num_nextn_predict_layers",
    "tie_word_embeddings",
    "max_position_embeddings",
    "global_head_dim",
    "num_global_key_value_heads",
    "attention_k_eq_v",
    "torch_dtype",
]
"""Keys that a record spells as config.json does."""
FBGEMM_KEPT = ["q_proj", "k_proj", "v_proj", "o_proj"]
CAPABILITIES = (
    (r"mi3\d\d", 0.0),
    (r"5090|rtx pro 6000", 12.0),
    (r"b[23]00|blackwell", 10.0),
    (r"h100|h200|gh200|h20", 9.0),
    (r"4090|l40|l4\b|ada", 8.9),
    (r"3090|a6000|a10\b|a40", 8.6),
    (r"a100|a800|a30", 8.0),
    (r"v100", 7.0),
    (r"t4\b", 7.5),
)
NOT_OFFLOADED = re.compile(r"\b(no|not|without|kv)\b|offload\w*\W+(off|none|0)\b", re.IGNORECASE)
"""In the clause of a note that speaks of offloading: it tells of the cache, or that none was done."""
UNSTATED_VERSION = (0, 19)
UNSTATED_CAPABILITY = 9.0


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a plan of the case starts from."""

    config: Mapping[str, Any]
    dtype: str
    quantization: str
    place: Place


def find_record(case: Mapping[str, Any], records: Iterable[Record]) -> Record | None:
    """The record that the case names, by its own name or by one of its aliases."""
    wanted = case.get("model_config_ref") or case.get("config_key") or case.get("model")
    known = list(records)
    found = next((record for record in known if record["model"] == wanted), None)
    if found is not None or not wanted:
        return found
    name = str(wanted).lower()
    return next((record for record in known if name in _aliases(record)), None)


def _aliases(record: Record) -> set[str]:
    return {str(name).lower() for name in (record["model"], *(record.get("aliases") or ()))}


def case_inputs(case: Mapping[str, Any], record: Record) -> Inputs:
    """Config, flags and place of a logged start."""
    name = str(case.get("model") or record["model"]).lower()
    config = _config(case, record, name)
    quantized, flag = _quantization(case, record, name, config)
    if quantized is not None:
        config["quantization_config"] = quantized
    tensor = int(case.get("tp") or 1)
    experts = tensor if re.search(r"\bEP\d*\b", str(case.get("notes"))) else 1
    place = Place(
        tensor=tensor,
        pipeline=int(case.get("pp") or 1),
        expert_ranks=experts,
        target=_target(case),
    )
    return Inputs(config, str(case.get("dtype") or "auto"), flag, place)


def _target(case: Mapping[str, Any]) -> Target:
    gpu = str(case.get("gpu") or "").lower()
    found = (value for pattern, value in CAPABILITIES if re.search(pattern, gpu))
    capability = next(found, UNSTATED_CAPABILITY)
    numbers = re.search(r"(\d+)\.(\d+)", str(case.get("vllm_version") or ""))
    version = (int(numbers[1]), int(numbers[2])) if numbers else UNSTATED_VERSION
    return Target(capability, rocm=capability == 0, version=version)


def _config(case: Mapping[str, Any], record: Record, name: str) -> dict[str, Any]:
    config = {key: record[key] for key in PLAIN if record.get(key) is not None}
    both = f"{name} {record['model']}".lower()
    for pattern, facts in PUBLISHED:
        if re.search(pattern, both if pattern.startswith("gemma") else name):
            config |= facts
    experts = record.get("n_routed_experts")
    if experts is not None:
        config |= {"n_routed_experts": experts, "num_experts": experts}
        config["num_local_experts"] = experts
    kinds = _kinds(record)
    if kinds:
        config["layer_types"] = kinds
    stated = list(record.get("architectures") or [])
    by_name = next((title for pattern, title in ARCHITECTURES if re.search(pattern, name)), "")
    if "granite-vision" in name or not stated:
        stated = [by_name] if by_name else []
    config["architectures"] = stated
    heads = re.search(r"(\d+)[ -]KV[ -]head", str(case.get("notes")))
    if heads and int(heads[1]) >= int(config.get("num_key_value_heads", 0)):
        config["num_key_value_heads"] = int(heads[1])
    return config


def _kinds(record: Record) -> list[str]:
    """`layer_types` from its counts and the run lengths of its beginning."""
    counts = record.get("layer_types")
    if not isinstance(counts, Mapping):
        return []
    runs = record.get("layer_types_rle_first8") or []
    pattern = [kind for kind, times in runs[:2] for _ in range(times)]
    if not pattern:
        return []
    layers = int(record["num_hidden_layers"])
    return (pattern * (layers // len(pattern) + 1))[:layers]


def _quantization(
    case: Mapping[str, Any], record: Record, name: str, config: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, str]:
    """`quantization_config` of the checkpoint and the engine's flag."""
    own = record.get("quantization_config")
    method = str(own.get("quant_method")) if own else ""
    stated = str(case.get("quantization") or named_format(name)).lower()
    if not stated and not _native(case, record, name, method):
        return None, ""
    if own and "modelopt" in stated and str(own.get("quant_algo")) in {"NVFP4", "MIXED_PRECISION"}:
        stated = f"{stated} nvfp4"
    published = recipe(name, stated, config)
    if published is not None:
        return published, ""
    if "fbgemm" in stated:
        return {"quant_method": "fbgemm_fp8", "modules_to_not_convert": _fbgemm(config)}, ""
    if "compressed-tensors" in stated:
        return _compressed(f"{stated} {name}"), ""
    packed = packed_format(stated)
    if packed is not None:
        return packed, ""
    if own and method in {"fp8", "mxfp4"}:
        return dict(own), ""
    if stated == "fp8" and "fp8" not in name:
        return None, "fp8"
    return {"quant_method": stated, **blocks(name, stated)}, ""


def _native(case: Mapping[str, Any], record: Record, name: str, method: str) -> bool:
    """Whether the model itself, not a checkpoint made from it, was published in a format of 8 or 4
    bits. A record may hold the sizes of a checkpoint in FP8 under the name of the plain model.
    """
    if method not in {"fp8", "mxfp4"}:
        return False
    made = "-fp8" in str(record.get("source")).lower() and "fp8" not in name
    return case.get("model") == record["model"] or not (made or "bf16" in name)


def _fbgemm(config: Mapping[str, Any]) -> list[str]:
    """Meta's FP8 checkpoints keep attention and the first and last layer as they were."""
    layers = int(config["num_hidden_layers"])
    kept = ["lm_head"]
    for index in range(layers):
        kept += [f"model.layers.{index}.self_attn.{part}" for part in FBGEMM_KEPT]
    return [*kept, "model.layers.0.mlp", f"model.layers.{layers - 1}.mlp"]


def _compressed(described: str) -> dict[str, Any]:
    """The recipes of the published checkpoints: FP8-dynamic, W8A8, W4A16 and NVFP4."""
    ignore = ["lm_head", "re:vision_tower.*", "re:vision_model.*", "re:multi_modal_projector.*"]
    inputs: dict[str, Any] | None = {"num_bits": 8, "dynamic": True}
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "channel"}
    if "w4a16" in described:
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
        inputs = None
    elif "w8a8" in described:
        weights["type"] = "int"
    elif "nvfp4" in described:
        weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 16}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": ignore,
    }


def architecture_of(inputs: Inputs, case_id: str) -> Architecture:
    """The case's architecture."""
    where = Where(case_id)
    return read_architecture(
        inputs.config, where, dtype=inputs.dtype, quantization=inputs.quantization
    )


def out_of_scope(case: Mapping[str, Any]) -> str:
    """Why a case's logged weights are not those of a plain start; empty where they are."""
    notes = str(case.get("notes") or "")
    clauses = [one for one in re.split(r"[;,]|\.\s", notes) if "offload" in one.lower()]
    if any(not NOT_OFFLOADED.search(one) for one in clauses):
        return "part of the weights is offloaded"
    if re.search(r"DFlash|EAGLE|draft model", notes):
        return "a draft model of unknown size is loaded too"
    if "tiered" in notes or "patched" in str(case.get("vllm_version")):
        return "a fork with its own layout"
    return ""


def predicted_gib(case: Mapping[str, Any], record: Record) -> tuple[float, ...]:
    """Predicted weights of each pipeline stage in GiB."""
    inputs = case_inputs(case, record)
    architecture = architecture_of(inputs, str(case["id"]))
    return tuple(size / GIB for size in stage_weights(architecture, inputs.place))


def main(arguments: list[str]) -> int:
    """Print the table and its summary; 1 when a bar is missed."""
    cases = json.loads(Path(arguments[0]).read_text("utf-8"))
    records = json.loads(Path(arguments[1]).read_text("utf-8"))
    errors: list[float] = []
    left_out = 0
    for case in cases:
        logged, record = case.get("weights_gib_per_gpu"), find_record(case, records)
        if not logged or record is None:
            continue
        reason = out_of_scope(case)
        try:
            stages = predicted_gib(case, record) if not reason else ()
        except SpecError as error:
            reason = f"{error.needed}; found {error.found}"
        if reason:
            left_out += 1
            print(f"{case['id'][:48]:48s} {logged:9.4f}  out of scope: {reason}")
            continue
        value = stages[0]  # the line that a log shows is taken to be rank 0's
        percent = 100 * (value - logged) / logged
        errors.append(abs(percent))
        others = " ".join(f"{stage:.4f}" for stage in stages) if len(stages) > 1 else ""
        print(f"{case['id'][:48]:48s} {logged:9.4f} {value:9.4f} {percent:+7.3f} %  {others}")
    errors.sort()
    mean = sum(errors) / len(errors)
    middle = errors[len(errors) // 2]
    print(
        f"{len(errors)} cases, {left_out} out of scope: mean {mean:.3f} %, "
        f"median {middle:.3f} %, worst {errors[-1]:.3f} %"
    )
    return 0 if mean <= 0.1 and errors[-1] <= 1 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
