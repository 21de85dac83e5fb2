"""Write what the config classes of Transformers hold where a config.json is silent.

    python scripts/config_defaults.py        # writes rayserve/data/config-defaults.json

All figures of language models that stand within a larger config; of those that are the whole config the
heads, the width of an expert, the window and whether the output is tied, since such files name all else. What a class computes from other figures where a file is silent is
left out, so that the planner computes it from the file's own. The contract test of tests/contract compares the committed file with the installed package.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PATH = Path(__file__).resolve().parents[1] / "rayserve" / "data" / "config-defaults.json"
KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "sliding_window",
    "tie_word_embeddings",
    "attention_bias",
    "moe_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
    "n_routed_experts",
    "n_shared_experts",
    "first_k_dense_replace",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "num_local_experts",
    "interleave_moe_layer_step",
    "attention_chunk_size",
    "intermediate_size_mlp",
    "global_head_dim",
    "num_global_key_value_heads",
    "num_kv_shared_layers",
    "hidden_size_per_layer_input",
    "vocab_size_per_layer_input",
    "linear_num_value_heads",
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "shared_expert_intermediate_size",
)
INNER = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "mistral3": "mistral",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""`model_type` of the language model within each composite config."""
FURTHER = ("deepseek_v3", "granite", "qwen2", "qwen3", "qwen3_moe")
"""Types that a part may name itself."""

WHOLE = (
    "bamba", "cohere2", "cwm", "deepseek_v2", "deepseek_v3", "deepseek_v32", "ernie4_5", "ernie4_5_moe", "exaone4", "falcon_h1", "gemma", "gemma2",
    "gemma3_text", "gemma4_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "llama4_text", "minimax_m2",
    "ministral3", "mistral", "mixtral", "nemotron_h", "olmo3", "phimoe", "qwen2", "qwen2_moe",
    "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3",
    "stablelm", "starcoder2",
)  # fmt: skip
"""Types laid out whose class has a figure of `OWN` of its own, beyond what its family has anyway."""
HEADS = ("num_key_value_heads", "head_dim")
OWN = (*HEADS, "moe_intermediate_size", "sliding_window", "tie_word_embeddings")


def _own(kind: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """The class's defaults, without those that follow from the width or the number of heads.

    Heads of latent attention are no heads of a KV cache.
    """
    from transformers import CONFIG_MAPPING

    make = CONFIG_MAPPING[kind]
    values = make().to_dict()
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    other = make(num_attention_heads=2 * heads, hidden_size=4 * hidden).to_dict()
    return {
        key: values[key]
        for key in keys
        if values.get(key) is not None
        and (key not in HEADS or (values[key] == other.get(key) and "kv_lora_rank" not in values))
    }


def defaults() -> dict[str, Any]:
    """The content of the file."""
    found = {kind: _own(kind, KEYS) for kind in sorted({*INNER.values(), *FURTHER})}
    return {
        "inner": INNER,
        "defaults": found,
        "whole": {kind: _own(kind, OWN) for kind in sorted(WHOLE)},
    }


def text() -> str:
    """The file as it is committed."""
    return json.dumps(defaults(), indent=1) + "\n"


def main() -> int:
    """Write it."""
    PATH.write_text(text(), "utf-8")
    print(PATH)
    return 0


if __name__ == "__main__":
    sys.exit(main())
