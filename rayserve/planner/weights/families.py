"""Which architectures does the planner lay out exactly, and how does each family's start?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rayserve.planner.weights import (
    classic,
    dense,
    encoders,
    hybrid,
    latent,
    recurrent,
    sparse,
    vision,
)
from rayserve.planner.weights.blocks import Build, layer_count
from rayserve.planner.weights.facts import Facts, UnknownModelError
from rayserve.planner.weights.modules import COLUMNS, Embedding, Layer, Linear, Module, Tensor


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture's layers are built, and its class defaults."""

    build: Callable[[Facts], Build]
    tied: bool = False
    """`tie_word_embeddings` where the config is silent."""
    tower: str = ""
    norm_bias: bool = False
    head_bias: bool = False
    draft: Callable[[Facts, Build], tuple[Layer, ...]] | None = None
    around: Callable[[Facts], list[Module]] | None = None
    """Further tables beside the embedding."""
    until: tuple[int, int] = (0, 0)
    """The last vLLM that serves it; (0, 0): the pinned one does."""


def _per_layer_embedding(facts: Facts) -> list[Module]:
    """Gemma 4's second embedding, of which each layer takes a slice."""
    size = facts.optional("hidden_size_per_layer_input")
    if not size:
        return []
    wide = size * layer_count(facts)
    vocab = facts.count("vocab_size_per_layer_input", "vocab_size")
    hidden = facts.count("hidden_size")
    return [
        Embedding("model.embed_tokens_per_layer", vocab, wide),
        Linear("model.per_layer_model_projection", hidden, (wide,), COLUMNS),
        Tensor("model.per_layer_projection_norm.weight", size),
    ]


def _language(facts: Facts) -> Build:
    """The language model within a model that takes several, as its part of the config names it."""
    names = facts.words("architectures")
    kind = TEXT_MODELS.get(facts.text("model_type"), "")
    plain = (name for name in (*names, kind) if name in FAMILIES and not FAMILIES[name].tower)
    name = next(plain, "")
    if not name:
        raise UnknownModelError(
            "a language model that the planner knows",
            found=f"`{', '.join(names) or facts.text('model_type') or 'none'}`"[:120],
            do="give the checkpoint's folder: the headers of its files hold the exact sizes",
            where=facts.where,
        )
    return FAMILIES[name].build(facts)


TEXT_MODELS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "granite": "GraniteForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
"""Families of language models by `model_type`, where a part of a config has no `architectures`."""


_DEEPSEEK = Family(latent.deepseek, draft=latent.deepseek_draft)
FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(dense.llama),
    "MistralForCausalLM": Family(dense.llama),
    "Ministral3ForCausalLM": Family(dense.llama),
    "InternLM3ForCausalLM": Family(dense.llama),
    "AquilaForCausalLM": Family(dense.llama, until=(0, 24)),
    "TeleChat3ForCausalLM": Family(dense.llama),
    "IQuestCoderForCausalLM": Family(dense.llama),
    "CwmForCausalLM": Family(dense.llama),
    "InternLM2ForCausalLM": Family(dense.phi3),
    "Ernie4_5ForCausalLM": Family(dense.ernie, tied=True),
    "SmolLM3ForCausalLM": Family(classic.smollm3, tied=True),
    "HunYuanDenseV1ForCausalLM": Family(classic.hunyuan),
    "ApertusForCausalLM": Family(classic.apertus),
    "OrionForCausalLM": Family(classic.orion, norm_bias=True),
    "MiMoForCausalLM": Family(dense.qwen2),
    "GPT2LMHeadModel": Family(classic.gpt2, tied=True, norm_bias=True, around=classic.positions),
    "GPTBigCodeForCausalLM": Family(
        classic.gpt_bigcode, tied=True, norm_bias=True, around=classic.positions
    ),
    "OPTForCausalLM": Family(classic.opt, tied=True, norm_bias=True, around=classic.opt_positions),
    "GPTJForCausalLM": Family(classic.gpt_j, norm_bias=True, head_bias=True),
    "GPTNeoXForCausalLM": Family(classic.gpt_neox, norm_bias=True),
    "BloomForCausalLM": Family(classic.bloom, tied=True, norm_bias=True, around=classic.bloom_norm),
    "FalconForCausalLM": Family(classic.falcon, tied=True, norm_bias=True),
    "Starcoder2ForCausalLM": Family(classic.starcoder2, tied=True, norm_bias=True),
    "StableLmForCausalLM": Family(classic.stablelm, norm_bias=True),
    "ChatGLMModel": Family(classic.chatglm),
    "ChatGLMForConditionalGeneration": Family(classic.chatglm),
    "BaiChuanForCausalLM": Family(classic.baichuan, until=(0, 23)),
    "BaichuanForCausalLM": Family(classic.baichuan, until=(0, 23)),
    "QWenLMHeadModel": Family(classic.qwen1, until=(0, 23)),
    "CohereForCausalLM": Family(classic.cohere, tied=True),
    "Cohere2ForCausalLM": Family(classic.cohere, tied=True),
    "Olmo2ForCausalLM": Family(classic.olmo2),
    "Olmo3ForCausalLM": Family(classic.olmo2),
    "ExaoneForCausalLM": Family(dense.llama),
    "Exaone4ForCausalLM": Family(classic.exaone4),
    "GraniteForCausalLM": Family(dense.granite),
    "Phi3ForCausalLM": Family(dense.phi3),
    "PhiForCausalLM": Family(dense.phi, norm_bias=True, head_bias=True),
    "SeedOssForCausalLM": Family(dense.seed_oss),
    "Qwen2ForCausalLM": Family(dense.qwen2),
    "Qwen3ForCausalLM": Family(dense.qwen3),
    "GlmForCausalLM": Family(dense.glm),
    "Glm4ForCausalLM": Family(dense.glm4),
    "NemotronForCausalLM": Family(dense.nemotron, norm_bias=True),
    "GemmaForCausalLM": Family(dense.gemma, tied=True),
    "Gemma2ForCausalLM": Family(dense.gemma2, tied=True),
    "Gemma3ForCausalLM": Family(dense.gemma3, tied=True),
    "Gemma3ForConditionalGeneration": Family(dense.gemma3, tied=True, tower="gemma3"),
    "Gemma4ForCausalLM": Family(hybrid.gemma4, tied=True, around=_per_layer_embedding),
    "Gemma4ForConditionalGeneration": Family(
        hybrid.gemma4, tied=True, tower="gemma4", around=_per_layer_embedding
    ),
    "MixtralForCausalLM": Family(dense.mixtral),
    "Qwen2MoeForCausalLM": Family(dense.qwen2_moe),
    "Qwen3MoeForCausalLM": Family(dense.qwen3_moe),
    "Glm4MoeForCausalLM": Family(dense.glm4_moe, draft=latent.deepseek_draft),
    "GptOssForCausalLM": Family(dense.gpt_oss),
    "PhiMoEForCausalLM": Family(sparse.phimoe, norm_bias=True, head_bias=True),
    "OlmoeForCausalLM": Family(sparse.olmoe),
    "GraniteMoeForCausalLM": Family(sparse.granite_moe),
    "GraniteMoeSharedForCausalLM": Family(sparse.granite_moe),
    "DbrxForCausalLM": Family(sparse.dbrx),
    "Ernie4_5_MoeForCausalLM": Family(sparse.ernie_moe, tied=True),
    "BailingMoeForCausalLM": Family(sparse.bailing),
    "BailingMoeV2ForCausalLM": Family(sparse.bailing),
    "MiniMaxM2ForCausalLM": Family(dense.minimax_m2),
    "Llama4ForCausalLM": Family(dense.llama4),
    "Llama4ForConditionalGeneration": Family(dense.llama4, tower="llama4"),
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "DeepseekV32ForCausalLM": _DEEPSEEK,
    "GlmMoeDsaForCausalLM": _DEEPSEEK,
    "Glm4MoeLiteForCausalLM": Family(sparse.glm4_lite, draft=latent.deepseek_draft),
    "KimiVLForConditionalGeneration": Family(latent.deepseek, tower="kimi_vl"),
    "KimiK25ForConditionalGeneration": Family(latent.deepseek, tower="kimi_k25"),
    "Qwen3NextForCausalLM": Family(hybrid.qwen3_next, draft=hybrid.qwen_draft),
    "Qwen3_5ForCausalLM": Family(hybrid.qwen3_5, draft=hybrid.qwen_draft),
    "Qwen3_5MoeForCausalLM": Family(hybrid.qwen3_5, draft=hybrid.qwen_draft),
    "Qwen3_5ForConditionalGeneration": Family(
        hybrid.qwen3_5, tower="qwen3_5", draft=hybrid.qwen_draft
    ),
    "Qwen3_5MoeForConditionalGeneration": Family(
        hybrid.qwen3_5, tower="qwen3_5", draft=hybrid.qwen_draft
    ),
    "NemotronHForCausalLM": Family(hybrid.nemotron_h),
    "GraniteMoeHybridForCausalLM": Family(recurrent.granite_hybrid),
    "FalconH1ForCausalLM": Family(recurrent.falcon_h1),
    "BambaForCausalLM": Family(recurrent.bamba, until=(0, 23)),
    "LlavaNextForConditionalGeneration": Family(dense.granite, tower="granite_vision"),
    "LlavaForConditionalGeneration": Family(_language, tower="llava"),
    "InternVLChatModel": Family(_language, tower="internvl"),
    "Mistral3ForConditionalGeneration": Family(dense.llama, tower="mistral3"),
    "Qwen2VLForConditionalGeneration": Family(dense.qwen2_vl, tower="qwen2_vl"),
    "Qwen2_5_VLForConditionalGeneration": Family(dense.qwen2_vl, tower="qwen2_5_vl"),
    "Qwen3VLForConditionalGeneration": Family(dense.qwen3_vl, tower="qwen3_vl"),
    "Qwen3VLMoeForConditionalGeneration": Family(dense.qwen3_vl_moe, tower="qwen3_vl"),
}
"""Architectures that the planner lays out exactly, as `architectures` of a config.json names them."""
TOWERS: Mapping[str, vision.Tower] = {
    "gemma3": vision.gemma3,
    "gemma4": vision.gemma4,
    "granite_vision": vision.llava_next,
    "internvl": encoders.internvl,
    "kimi_k25": vision.kimi_vl,
    "kimi_vl": vision.kimi_vl,
    "llama4": vision.llama4,
    "llava": encoders.llava,
    "mistral3": vision.mistral3,
    "qwen2_vl": vision.qwen_vl,
    "qwen2_5_vl": vision.qwen_vl,
    "qwen3_vl": vision.qwen_vl,
    "qwen3_5": vision.qwen_vl,
}
