"""Configurations of published models, with the number of parameters that their makers tell."""

from __future__ import annotations

from rayserve.errors import Where
from rayserve.planner.weights.architecture import read_architecture
from rayserve.planner.weights.modules import Embedding, Linear, Tensor
from rayserve.planner.weights.tensors import layer_parameters

FILE = Where("config.json")


def config(architecture, hidden, layers, heads, width, vocab, kv_heads=None, **more):
    """A config.json in the usual spelling."""
    found = {
        "architectures": [architecture],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": width,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }
    if kv_heads:
        found["num_key_value_heads"] = kv_heads
    return found | more


def older(architecture, hidden, layers, heads, vocab, **more):
    """A config.json in the spelling of GPT-2."""
    return {
        "architectures": [architecture],
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "vocab_size": vocab,
    } | more


def parameters(content) -> int:
    """Parameters of a model before any cut: without positions of rotation and scales of the cache."""
    model = read_architecture(content, FILE)
    total = sum(layer_parameters(layer) for layer in model.layers)
    total -= sum(
        1
        for layer in model.layers
        for module in layer.modules
        if isinstance(module, Tensor) and module.name.endswith("_scale")
    )
    for module in (*model.embedding, *model.tail, *model.tower):
        if isinstance(module, Embedding):
            total += module.vocab * (module.hidden + module.bias)
        elif isinstance(module, Linear):
            total += sum(module.outputs) * (module.inputs + module.bias)
        elif isinstance(module, Tensor):
            total += module.elements
    return total


FALCON = {"multi_query": True, "parallel_attn": True, "bias": False}
GLM = {
    "num_layers": 28,
    "ffn_hidden_size": 13696,
    "kv_channels": 128,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "add_qkv_bias": True,
    "seq_length": 8192,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "architectures": ["ChatGLMModel"],
}
DBRX = {
    "architectures": ["DbrxForCausalLM"],
    "d_model": 6144,
    "n_layers": 40,
    "n_heads": 48,
    "max_seq_len": 32768,
    "vocab_size": 100352,
    "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4, "ffn_hidden_size": 10752},
    "attn_config": {"kv_n_heads": 8},
}
ERNIE = {
    "moe_num_experts": 64,
    "moe_k": 6,
    "moe_intermediate_size": 1536,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
}
LING = {
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "num_shared_experts": 2,
    "head_dim": 128,
}
FALCON_H1 = config(
    "FalconH1ForCausalLM",
    1024,
    36,
    8,
    2048,
    32784,
    2,
    head_dim=64,
    mamba_n_heads=24,
    mamba_d_head=64,
    mamba_d_ssm=1536,
    mamba_d_state=128,
    mamba_n_groups=1,
    mamba_rms_norm=False,
    tie_word_embeddings=False,
)
GRANITE_H = config(
    "GraniteMoeHybridForCausalLM",
    4096,
    40,
    32,
    768,
    100352,
    8,
    layer_types=[*["mamba"] * 5, "attention", *["mamba"] * 4] * 4,
    num_local_experts=72,
    num_experts_per_tok=10,
    shared_intermediate_size=1536,
    mamba_n_heads=128,
    mamba_d_head=64,
    mamba_d_state=128,
    mamba_expand=2,
    mamba_n_groups=1,
    tie_word_embeddings=True,
)
INTERNVL = {
    "architectures": ["InternVLChatModel"],
    "downsample_ratio": 0.5,
    "select_layer": -1,
    "llm_config": config("Qwen2ForCausalLM", 3584, 28, 28, 18944, 151674, 4),
    "vision_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 448,
        "patch_size": 14,
        "qkv_bias": True,
    },
}
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "vision_config": {},
}
LLAVA = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "vision_feature_layer": -2,
    "text_config": {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096},
}
PUBLISHED = {
    "gpt2": (older("GPT2LMHeadModel", 768, 12, 12, 50257, n_positions=1024), 124_439_808),
    "opt-125m": (
        config(
            "OPTForCausalLM", 768, 12, 12, None, 50272, ffn_dim=3072, max_position_embeddings=2048
        ),
        125_239_296,
    ),
    "gpt-j-6b": (
        older("GPTJForCausalLM", 4096, 28, 16, 50400, rotary_dim=64, n_positions=2048),
        6_050_882_784,
    ),
    "pythia-6.9b": (config("GPTNeoXForCausalLM", 4096, 32, 32, 16384, 50432), 6_857_302_016),
    "bloom": (older("BloomForCausalLM", 14336, 70, 112, 250880), 176_247_271_424),
    "starcoder": (
        older("GPTBigCodeForCausalLM", 6144, 40, 48, 49152, n_inner=24576, n_positions=8192),
        15_517_456_384,
    ),
    "starcoder2-15b": (
        config("Starcoder2ForCausalLM", 6144, 40, 48, 24576, 49152, 4, tie_word_embeddings=False),
        15_957_889_024,
    ),
    "falcon-7b": (
        config("FalconForCausalLM", 4544, 32, 71, None, 65024, **FALCON),
        6_921_720_704,
    ),
    "falcon-40b": (
        config(
            "FalconForCausalLM",
            8192,
            60,
            128,
            None,
            65024,
            num_kv_heads=8,
            new_decoder_architecture=True,
        ),
        41_303_293_952,
    ),
    "stablelm-3b-4e1t": (config("StableLmForCausalLM", 2560, 32, 32, 6912, 50304), 2_795_443_200),
    "chatglm3-6b": (GLM | {"padded_vocab_size": 65024, "vocab_size": 65024}, 6_243_584_000),
    "baichuan2-13b": (config("BaichuanForCausalLM", 5120, 40, 40, 13696, 125696), 13_896_668_160),
    "qwen-72b": (config("QWenLMHeadModel", 8192, 80, 64, 49152, 152064), 72_287_920_128),
    "command-r-plus": (
        config("CohereForCausalLM", 12288, 64, 96, 33792, 256000, 8, use_qk_norm=True),
        103_810_674_688,
    ),
    "command-a": (config("Cohere2ForCausalLM", 12288, 64, 96, 36864, 256000, 8), 111_057_580_032),
    "olmo-2-32b": (config("Olmo2ForCausalLM", 5120, 64, 40, 27648, 100352, 8), 32_234_279_936),
    "olmoe-1b-7b": (
        config(
            "OlmoeForCausalLM",
            2048,
            16,
            16,
            1024,
            50304,
            16,
            num_experts=64,
            num_experts_per_tok=8,
        ),
        6_919_161_856,
    ),
    "internlm2-20b": (
        config("InternLM2ForCausalLM", 6144, 48, 48, 16384, 92544, 8),
        19_861_149_696,
    ),
    "exaone-3.0-7.8b": (config("ExaoneForCausalLM", 4096, 32, 32, 14336, 102400, 8), 7_818_448_896),
    "exaone-4.0-1.2b": (
        config(
            "Exaone4ForCausalLM",
            2048,
            30,
            32,
            4096,
            102400,
            8,
            head_dim=64,
            tie_word_embeddings=True,
        ),
        1_279_391_488,
    ),
    "phi-3.5-moe": (
        config(
            "PhiMoEForCausalLM",
            4096,
            32,
            32,
            6400,
            32064,
            8,
            num_local_experts=16,
            num_experts_per_tok=2,
        ),
        41_873_153_344,
    ),
    "dbrx": (DBRX, 131_596_523_520),
    "ernie-4.5-0.3b": (
        config("Ernie4_5ForCausalLM", 1024, 18, 16, 3072, 103424, 2, head_dim=128),
        360_748_032,
    ),
    "ernie-4.5-21b-a3b": (
        config("Ernie4_5_MoeForCausalLM", 2560, 28, 20, 12288, 103424, 4, **ERNIE),
        21_825_437_888,
    ),
    "ling-lite": (
        config("BailingMoeForCausalLM", 2048, 28, 16, 5632, 126464, 4, **LING),
        16_801_974_272,
    ),
    "smollm3-3b": (config("SmolLM3ForCausalLM", 2048, 36, 16, 11008, 128256, 4), 3_075_098_624),
    "apertus-8b": (config("ApertusForCausalLM", 4096, 32, 32, 21504, 131072, 8), 8_053_338_176),
    "falcon-h1-0.5b": (FALCON_H1, 521_411_104),
    "internvl3-8b": (INTERNVL, 7_944_373_760),
    "gemma-3-4b": (GEMMA3_4B, 4_300_079_472),
}
