"""What would hf-mem, llm-d-planner and gpustack answer for one logged start?

Each formula was read in the tool's source and is written anew here, with its place there. Nothing is
corrected: what a tool does not take as an input it does not get, and what it does not answer stays
None, with the reason. Where a tool's answer needs a reading to be compared at all (per GPU, as a
verdict), the reading that is kindest to it is taken and named.

All three read a checkpoint's sizes from a hub; here they are given them by `planner_checkpoint`.
`planner_hf_mem` runs hf-mem itself on the same inputs and compares.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.planner_checkpoint import Checkpoint
from rayserve.units import GIB


@dataclass(frozen=True)
class Question:
    """What is known before a start; every tool may read it."""

    config: Mapping[str, Any]
    """config.json, the text model's fields at the top."""
    checkpoint: Checkpoint
    ranks: int
    """Tensor times pipeline."""
    tensor: int
    max_model_len: int
    kv_cache_dtype: str = "auto"
    utilization: float | None = None
    """None: not given; each tool has its own default."""
    total_gib: float = 0.0
    """Of one GPU as the driver reports it; 0: the GPU is not recorded."""
    catalogue_gib: int = 0
    """Of one GPU as it is sold."""


@dataclass(frozen=True)
class Answer:
    """A tool's figures for one GPU; None where it has none."""

    weights_gib: float | None = None
    request_gib: float | None = None
    """KV cache of one request of max_model_len."""
    kv_gib: float | None = None
    """KV cache that is left on the GPU."""
    concurrency: float | None = None
    """Requests of max_model_len at once."""
    activation_gib: float | None = None
    fits: bool | None = None
    measure: bool = False
    """It says that only a measurement tells whether it fits."""
    silent: str = ""
    """Why a figure is missing that the tool gives in other cases."""


class NoAnswerError(ValueError):
    """The tool itself would raise here."""


# ── hf-mem 0.5.6 (the package; before it 0.5.5 capped the sliding layers of hybrids) ─────────────

HF_MEM_KV_TYPES = {
    "bfloat16": 2, "fp8": 1, "fp8_ds_mla": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1
}  # fmt: skip
"""hf_mem/safetensors/kv_cache.py:7 and 44-57; bytes of an element."""
HF_MEM_FULL = {"attention", "full_attention", "global_attention"}
"""kv_cache.py:24: `layer_types` that keep the whole context; the others slide."""


def hf_mem(question: Question) -> Answer:
    """Bytes of all tensors, and the cache of one request (hf_mem/run.py:567-578).

    It knows no ranks and gives no verdict. Read as: everything is cut evenly, and it fits when
    `total_memory` (weights and one request) is not above what the GPUs have.
    """
    weights = question.checkpoint.size_bytes
    try:
        request = _hf_mem_request_bytes(question)
    except NoAnswerError as error:
        return Answer(weights_gib=weights / question.ranks / GIB, silent=str(error))
    total = question.total_gib * GIB * question.ranks
    return Answer(
        weights_gib=weights / question.ranks / GIB,
        request_gib=request / question.ranks / GIB,
        fits=weights + request <= total if total else None,
    )


def _hf_mem_request_bytes(question: Question) -> int:
    """compute_safetensors_kv_cache_size, kv_cache.py:142-180: two vectors a head, layer and token.

    A window counts only where every layer slides; beside full layers it is taken to keep everything.
    """
    config, length = question.config, question.max_model_len
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads", heads))
    head_dim = int(config.get("head_dim", int(config["hidden_size"]) // heads))
    layers, kinds = int(config["num_hidden_layers"]), config.get("layer_types")
    if "sliding_window_pattern" in config:
        full = layers // int(config["sliding_window_pattern"])
    else:
        full = layers if kinds is None else sum(kind in HF_MEM_FULL for kind in kinds)
    window = int(config.get("sliding_window") or length)
    tokens = layers * length if full else layers * min(window, length)
    return 2 * tokens * kv_heads * head_dim * _hf_mem_element_bytes(question)


def _hf_mem_element_bytes(question: Question) -> int:
    """resolve_kv_cache_dtype, kv_cache.py:32-139."""
    if question.kv_cache_dtype != "auto":
        if question.kv_cache_dtype not in HF_MEM_KV_TYPES:
            raise NoAnswerError(f"takes no --kv-cache-dtype {question.kv_cache_dtype}")
        return HF_MEM_KV_TYPES[question.kv_cache_dtype]
    quantization = question.config.get("quantization_config") or {}
    method = quantization.get("quant_method")
    if method in {"fp8", "modelopt"}:
        # 63-110: an FP8 checkpoint is taken to have an FP8 cache
        stored = dict(question.checkpoint.elements)
        if quantization.get("fmt") or quantization.get("format") or "F8_E4M3" in stored:
            return 1
        raise NoAnswerError(f"finds no FP8 tensor in a checkpoint of quant_method {method}")
    if method not in {None, "compressed-tensors"}:
        raise NoAnswerError(f"does not take quant_method {method}")
    return 4 if _named_dtype(question.config) == "float32" else 2


def _named_dtype(config: Mapping[str, Any]) -> str:
    """`torch_dtype`; the case files' holes are taken to be bfloat16, as nearly all checkpoints are."""
    return str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix(
        "torch."
    )


# ── llm-d-planner (github.com/llm-d-incubation/llm-d-planner, src/planner/capacity_planner.py
#    at e50305a, last changed by fccf028 in April 2026) ───────────────────────────────────────────

LLMD_ACTIVATION_GIB = {
    "LlamaForCausalLM": 4.8,
    "Qwen2ForCausalLM": 5.6,
    "Qwen3ForCausalLM": 5.6,
    "PixtralForConditionalGeneration": 2.5,
    "Mistral3ForConditionalGeneration": 2.5,
}
"""Lines 47-53."""
LLMD_DENSE_GIB, LLMD_EXPERTS_GIB, LLMD_VISION_GIB = 5.5, 8.0, 2.5
"""Lines 33-37."""
LLMD_VISION = {
    "PixtralForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
}
"""Lines 57-62."""
LLMD_NON_TORCH_GIB = (0.15, 0.6)
"""Lines 39-40: one rank, several."""
LLMD_MLA = ("DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM")
"""Lines 657-660."""
LLMD_EXPERT_KEYS = ("n_routed_experts", "n_shared_experts", "num_experts", "num_experts_per_tok")
"""Lines 1028-1033."""
LLMD_BYTES = {
    "f32": 4.0, "f16": 2.0, "bf16": 2.0, "f8_e4m3": 1.0, "i64": 8.0, "i32": 4.0, "i8": 1.0,
    "u8": 1.0, "fp4": 0.5, "int4": 0.5, "mxfp4": 4.25 / 8,
}  # fmt: skip
"""Lines 446-474, those that occur here."""
LLMD_UTILIZATION = 0.9
"""Line 859."""


def llm_d_planner(question: Question) -> Answer:
    """What `accuracy/scripts/predict_capacity.py` of its campaign takes from the planner.

    KV cache = total x utilization x GPUs - weights - activation - non-torch, of all GPUs together
    (lines 893-915), so activation is shared out over the ranks. The GPU has its catalogue's GiB.
    It fits when at least one request does (lines 743-792), which is stricter than its
    check_model_fits_gpu.
    """
    config = question.config
    activation = _llmd_activation_gib(config)
    try:
        weights = _llmd_weights_bytes(question) / GIB
        request = _llmd_token_bytes(config) * question.max_model_len / GIB
    except NoAnswerError as error:
        return Answer(activation_gib=activation, silent=str(error))
    ranks = question.ranks
    found = Answer(
        weights_gib=weights / ranks, request_gib=request / ranks, activation_gib=activation
    )
    if not question.catalogue_gib or not request:
        return found
    utilization = question.utilization or LLMD_UTILIZATION
    non_torch = LLMD_NON_TORCH_GIB[question.tensor > 1] * ranks
    left = question.catalogue_gib * utilization * ranks - weights - activation - non_torch
    left = max(0.0, left)
    return Answer(
        weights_gib=found.weights_gib,
        request_gib=found.request_gib,
        kv_gib=left / ranks,
        concurrency=left / request,
        activation_gib=activation,
        fits=math.floor(left / request) >= 1,
    )


def _llmd_activation_gib(config: Mapping[str, Any]) -> float:
    """estimate_vllm_activation_memory, lines 380-436: a constant by architecture."""
    names = config.get("architectures") or [""]
    if names[0] in LLMD_ACTIVATION_GIB:
        return LLMD_ACTIVATION_GIB[names[0]]
    if any(config.get(key) is not None for key in LLMD_EXPERT_KEYS):
        return LLMD_EXPERTS_GIB
    return LLMD_VISION_GIB if LLMD_VISION & set(names) else LLMD_DENSE_GIB


def _llmd_weights_bytes(question: Question) -> float:
    """model_memory_req, lines 553-597: types of two bytes and more as stored, others by the method."""
    quantization = question.config.get("quantization_config") or {}
    method = str(quantization.get("quant_method") or "")
    stored = question.checkpoint.elements
    if not method or method == "mxfp4":
        return sum(count * _llmd_bytes(storage) for storage, count in stored)
    packed = _llmd_method_bytes(method, quantization)
    small = any(_llmd_bytes(storage) < 2 for storage, _ in stored)
    if small and not packed:
        raise NoAnswerError(f"counts 0 bytes a weight for quant_method {method}")
    return sum(
        count * (size if (size := _llmd_bytes(storage)) >= 2 else packed)
        for storage, count in stored
    )


def _llmd_method_bytes(method: str, quantization: Mapping[str, Any]) -> float:
    """get_quant_bytes, lines 520-550: by the method's name, else by its bits; int(4 / 8) is 0."""
    try:
        return _llmd_bytes(method)
    except NoAnswerError:
        groups = quantization.get("config_groups") or {}
        first = (groups.get("group_0") or {}).get("weights") or {}
        bits = quantization.get("bits") or first.get("num_bits") or 0
        return float(int(bits) // 8)


def _llmd_bytes(name: str) -> float:
    """precision_to_byte, lines 439-486: by the table, else by the first number in the name."""
    key = name.strip().lower()
    if key in LLMD_BYTES:
        return LLMD_BYTES[key]
    bits = re.search(r"\d+", key)
    if bits is None or int(bits[0]) % 8:
        raise NoAnswerError(f"knows no size of type {name}")
    return float(int(bits[0]) // 8)


def _llmd_token_bytes(config: Mapping[str, Any]) -> float:
    """KVCacheDetail, lines 109-210: MLA by two architectures' names, every layer whole."""
    layers, element = int(config["num_hidden_layers"]), _llmd_bytes(_named_dtype(config))
    name = (config.get("architectures") or [""])[0]
    if any(known in name for known in LLMD_MLA):
        return layers * (int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])) * element
    if config.get("num_key_value_heads") is None:
        raise NoAnswerError("needs num_key_value_heads")
    head_dim = config.get("head_dim")
    if head_dim is None:
        head_dim = int(config["hidden_size"]) // int(config["num_attention_heads"])
    return layers * 2 * int(head_dim) * int(config["num_key_value_heads"]) * element


# ── gpustack v2.2.3 (github.com/gpustack/gpustack) ──────────────────────────────────────────────

GPUSTACK_FACTOR = 1.2
"""gpustack/policies/utils.py:401 and 451."""
GPUSTACK_OVERHEAD_BYTES = 2 * GIB
"""utils.py:459, language models."""
GPUSTACK_UTILIZATION = 0.9
"""gpustack/policies/candidate_selectors/vllm_resource_fit_selector.py:167."""


def gpustack(question: Question) -> Answer:
    """VRAM = files x 1.2 + 2 GiB must fit total x utilization of all GPUs (selector: 437, 563-580).

    There is no figure of the KV cache in it. The weights are the sizes of the files (utils/hub.py:393),
    read as cut evenly.
    """
    weights = question.checkpoint.size_bytes
    claim = int(weights * GPUSTACK_FACTOR) + GPUSTACK_OVERHEAD_BYTES
    share = int(question.total_gib * GIB * (question.utilization or GPUSTACK_UTILIZATION))
    return Answer(
        weights_gib=weights / question.ranks / GIB,
        fits=share * question.ranks >= claim if share else None,
    )
