"""Which tiny models stand for the kinds of KV cache that a real engine is started with?

Six architectures as their config.json has them, small enough for a CPU, each with lengths and cache
sizes that divide nothing evenly, so that every rounding counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rayserve.demo.model import CONFIG as DEMO

COMMON: Mapping[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the least that vLLM's CPU attention takes
    "vocab_size": 1000,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
EXPERTS: Mapping[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


@dataclass(frozen=True)
class TinyModel:
    """A model and the engine's limits."""

    name: str
    kind: str
    config: Mapping[str, Any]
    max_model_len: int
    max_num_batched_tokens: int
    kv_bytes: int
    made: bool = False
    """The demo's own model, with weights and tokenizer; of the others vLLM makes up the weights."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Further engine arguments."""

    @property
    def arguments(self) -> dict[str, Any]:
        """What the engine is started with."""
        load = {} if self.made else {"load_format": "dummy"}
        return {
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": self.kv_bytes,
            **load,
            **self.engine,
        }


MODELS = (
    TinyModel("demo", "MHA, the demo's model", DEMO, 4000, 512, 201_000_001, made=True),
    TinyModel(
        "gqa",
        "GQA",
        {**COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        3001,
        512,
        100_000_007,
    ),
    TinyModel(
        "mla",
        "MLA and experts",
        {
            **COMMON,
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "num_key_value_heads": 8,
            # latent of 512 + 64: the one size that vLLM's CPU kernel is compiled for
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "q_lora_rank": None,
            "head_dim": 64,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "scoring_func": "softmax",
        },
        5003,
        512,
        90_000_001,
        # On a CPU with AMX vLLM would take another backend, with other blocks.
        engine={"attention_backend": "CPU_MLA"},
    ),
    TinyModel(
        "hybrid",
        "sliding windows and full attention, tied",
        {
            **COMMON,
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "num_hidden_layers": 14,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 32,
            "rope_local_base_freq": 10000.0,
            "sliding_window": 700,
            "layer_types": [
                "full_attention" if index % 6 == 5 else "sliding_attention" for index in range(14)
            ],
            "tie_word_embeddings": True,
        },
        8000,
        300,
        150_000_001,
    ),
    TinyModel(
        "moe",
        "GQA and experts",
        {
            **COMMON,
            **EXPERTS,
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_key_value_heads": 4,
            "head_dim": 64,
        },
        2049,
        512,
        120_000_011,
    ),
    TinyModel(
        "tied",
        "GQA, tied embeddings, FP8 cache",
        {
            **COMMON,
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "head_dim": 64,
            "tie_word_embeddings": True,
        },
        4097,
        512,
        80_000_003,
        engine={"kv_cache_dtype": "fp8"},
    ),
    TinyModel(
        "recurrent",
        "gated delta net and full attention, experts",
        {
            **COMMON,
            **EXPERTS,
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "head_dim": 64,
            "partial_rotary_factor": 0.25,
            "full_attention_interval": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "shared_expert_intermediate_size": 128,
            "mamba_ssm_dtype": "float32",
        },
        6000,
        512,
        150_000_007,
        # Where the CPU multiplies bf16, vLLM keeps the states in 32 bits whatever config.json says.
        engine={"mamba_ssm_cache_dtype": "float32"},
    ),
)
