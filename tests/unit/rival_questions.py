"""Questions put to other planners, and the models that they are about."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.planner_checkpoint import Checkpoint
from benchmarks.planner_formulas import Question

LLAMA = {
    "model": "meta-llama/Llama-3.1-8B-Instruct", "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_BYTES = 16_060_522_496  # safetensors' own total of meta-llama/Llama-3.1-8B-Instruct
# github.com/llm-d-incubation/llm-d-planner, accuracy/results/v0.19.0, one H100
STARTED = {
    "id": "started", "vllm_version": "0.19.0", "model": LLAMA["model"], "gpu": "H100-SXM5-80GB",
    "url": "https://github.com/llm-d-incubation/llm-d-planner/x.log", "gpu_mem_gb": 80,
    "gpu_total_gib": 79.19, "tp": 1, "pp": 1, "dtype": "bfloat16", "kv_cache_dtype": "auto",
    "gpu_memory_utilization": 0.95, "max_model_len": 8192, "block_size": 16,
    "max_num_batched_tokens": 8192, "max_num_seqs": 1024, "notes": "prefix caching off",
    "weights_gib_per_gpu": 14.99, "kv_cache_gib_per_gpu": 58.11, "kv_tokens": 476016,
    "max_concurrency": 58.11, "activation_gib": 1.89, "outcome": "ok", "error": None,
    "config_key": LLAMA["model"],
}  # fmt: skip
REFUSED = {
    **STARTED, "id": "refused", "gpu": "RTX 3090", "gpu_total_gib": 15.77, "gpu_mem_gb": 16,
    "weights_gib_per_gpu": None, "kv_cache_gib_per_gpu": None, "kv_tokens": None,
    "max_concurrency": None, "activation_gib": None, "outcome": "error",
    "error": "No available memory for the KV cache",
}  # fmt: skip


def question(**changes):
    """The question of the logged start of Llama-3.1-8B."""
    asked = Question(
        config=LLAMA,
        checkpoint=Checkpoint((("BF16", LLAMA_BYTES // 2),)),
        ranks=1,
        tensor=1,
        max_model_len=8192,
        utilization=0.95,
        total_gib=79.19,
        catalogue_gib=80,
    )
    return replace(asked, **changes)


def percent(found, logged):
    """Signed error as the published report prints it."""
    return round(100 * (found / logged - 1), 2)


def config(**changes):
    """Llama's config with other fields."""
    return {**LLAMA, **changes}
