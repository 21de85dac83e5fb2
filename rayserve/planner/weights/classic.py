"""How do the older decoders differ from Llama: GPT-2 and its heirs, Cohere, OLMo, ChatGLM, EXAONE?

Each function follows the model file of the same name in vllm/model_executor/models (0.32.0); what
vLLM runs through Transformers by now follows the model there. Figures arrive under their usual names
(`names.canonical`).
"""

from __future__ import annotations

from dataclasses import replace

from rayserve.planner.weights.blocks import (
    Build,
    decoder,
    head_size,
    kv_head_count,
    layer_count,
    layer_name,
    normed_over_heads,
    windows,
)
from rayserve.planner.weights.dense import through_transformers
from rayserve.planner.weights.facts import Facts, UnknownModelError
from rayserve.planner.weights.modules import Layer, Module, Tensor
from rayserve.planner.weights.rotary import read_rotary

NO_ROTATION = (None, None)


def wide(facts: Facts) -> int:
    """Width of the MLP; four times the model's where the config is silent."""
    return facts.optional("intermediate_size") or 4 * facts.count("hidden_size")


def gpt2(facts: Facts) -> Build:
    """GPT-2: LayerNorms and biases everywhere, no gate, learned positions."""
    return decoder(
        facts,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        norm_bias=True,
        gated=False,
        rotaries=NO_ROTATION,
        width=wide(facts),
    )


def gpt_bigcode(facts: Facts) -> Build:
    """StarCoder and SantaCoder: GPT-2 with one KV head for all."""
    one = facts.flag("multi_query", default=True)
    return gpt2(Facts({**facts.data, "num_key_value_heads": 1}, facts.where) if one else facts)


def positions(facts: Facts, *, beyond: int = 0) -> list[Module]:
    """The table of learned positions beside the embedding."""
    rows = facts.count("max_position_embeddings") + beyond
    return [Tensor("model.embed_positions.weight", rows * facts.count("hidden_size"))]


def opt(facts: Facts) -> Build:
    """OPT: GPT-2 with biases that a config may switch off."""
    if facts.optional("word_embed_proj_dim") not in {0, facts.count("hidden_size")}:
        raise UnknownModelError(
            "an embedding as wide as the model",
            found=f"`word_embed_proj_dim: {facts.optional('word_embed_proj_dim')}`",
            do="give the checkpoint's folder: the headers of its files hold the exact sizes",
            where=facts.where,
        )
    bias = facts.flag("enable_bias", default=True)
    return decoder(
        facts,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        norm_bias=True,
        gated=False,
        rotaries=NO_ROTATION,
    )


def opt_positions(facts: Facts) -> list[Module]:
    """OPT's positions begin at 2."""
    return positions(facts, beyond=2)


def gpt_j(facts: Facts) -> Build:
    """GPT-J: attention and MLP beside each other behind one LayerNorm."""
    return decoder(facts, mlp_bias=True, norms=1, norm_bias=True, gated=False, width=wide(facts))


def gpt_neox(facts: Facts) -> Build:
    """GPT-NeoX and Pythia: a quarter of each head rotates."""
    share = facts.number("rotary_pct", 0.25, most=1)
    table = through_transformers(read_rotary(facts, head_size(facts), partial=share))
    bias = facts.flag("attention_bias", default=True)
    return decoder(
        facts,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        norm_bias=True,
        gated=False,
        rotaries=(table, table),
    )


def bloom(facts: Facts) -> Build:
    """BLOOM: GPT-2 whose distances bias attention (ALiBi)."""
    return gpt2(facts)


def bloom_norm(facts: Facts) -> list[Module]:
    """The LayerNorm behind BLOOM's embedding."""
    size = facts.count("hidden_size")
    return [Tensor("model.embed_norm.weight", size), Tensor("model.embed_norm.bias", size)]


def falcon(facts: Facts) -> Build:
    """Falcon: one KV head (7B), or some with two norms before attention and MLP (40B, 180B)."""
    new = facts.flag("new_decoder_architecture", default=False)
    heads = facts.count("num_attention_heads")
    alone = 1 if facts.flag("multi_query", default=True) else heads
    kv_heads = facts.count("num_kv_heads", default=heads) if new else alone
    parallel = facts.flag("parallel_attn", default=True)
    norms = facts.optional("num_ln_in_parallel_attn") or (2 if new or not parallel else 1)
    bias = facts.flag("bias", default=False)
    table = None if facts.flag("alibi", default=False) else read_rotary(facts, head_size(facts))
    return decoder(
        Facts({**facts.data, "num_key_value_heads": kv_heads}, facts.where),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        norms=norms,
        norm_bias=True,
        gated=False,
        rotaries=(table, table),
        width=facts.optional("intermediate_size") or 4 * facts.count("hidden_size"),
    )


def starcoder2(facts: Facts) -> Build:
    """StarCoder 2: LayerNorms, biases, no gate, windows where the config names one."""
    bias = facts.flag("use_bias", default=True)
    table = through_transformers(read_rotary(facts, head_size(facts)))
    return decoder(
        facts,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        norm_bias=True,
        gated=False,
        rotaries=(table, table),
    )


def stablelm(facts: Facts) -> Build:
    """StableLM: Llama with LayerNorms; a quarter of each head rotates."""
    table = read_rotary(facts, head_size(facts), partial=0.25)
    bias = facts.flag("use_qkv_bias", default=False)
    return decoder(facts, qkv_bias=bias, norm_bias=True, rotaries=(table, table))


def orion(facts: Facts) -> Build:
    """Orion: Llama with LayerNorms."""
    return decoder(facts, norm_bias=True)


def chatglm(facts: Facts) -> Build:
    """ChatGLM 2 and 3, GLM-4-9B of THUDM: a fused gate, half of each head rotates."""
    bias = facts.flag("add_bias_linear", default=False)
    grouped = facts.flag("multi_query_attention", default=False)
    heads = facts.count("num_attention_heads")
    kv_heads = kv_head_count(facts) if grouped else heads
    table = read_rotary(facts, head_size(facts), partial=0.5)
    return decoder(
        Facts({**facts.data, "num_key_value_heads": kv_heads}, facts.where),
        qkv_bias=bias or facts.flag("add_qkv_bias", default=False),
        o_bias=bias,
        mlp_bias=bias,
        rotaries=(table, table),
    )


def cohere(facts: Facts) -> Build:
    """Command R and A, Aya: one norm a layer; Cohere 2 slides in three of four layers."""
    local = windows(facts, pattern=4) if facts.has("sliding_window") else None
    sliding = None if local is None else tuple(size + 1 if size else 0 for size in local)
    build = decoder(facts, norms=1, sliding=sliding)
    return normed_over_heads(build, facts) if facts.flag("use_qk_norm", default=False) else build


def olmo2(facts: Facts) -> Build:
    """OLMo 2 and 3: norms over all heads of queries and keys; OLMo 3 slides in three of four."""
    bias = facts.flag("attention_bias", default=False)
    table = through_transformers(read_rotary(facts, head_size(facts)))
    return normed_over_heads(
        decoder(
            facts,
            qkv_bias=bias,
            o_bias=bias,
            sliding=windows(facts, pattern=4),
            rotaries=(table, table),
        ),
        facts,
    )


def exaone4(facts: Facts) -> Build:
    """EXAONE 4: norms of queries and keys; the 32B slides in three of four layers."""
    pattern = facts.data.get("sliding_window_pattern")
    named = isinstance(pattern, str) and not facts.words("layer_types")
    if named:  # such as LLLG, of which G sees everything
        layers = layer_count(facts)
        letters = str(pattern)
        window = facts.optional("sliding_window")
        local = tuple(
            window if letters[index % len(letters)] == "L" and index != layers - 1 else 0
            for index in range(layers)
        )
    else:
        local = windows(facts, pattern=4)
    return decoder(facts, qk_norm=True, sliding=local)


def smollm3(facts: Facts) -> Build:
    """SmolLM 3: Llama, with a rotation that some layers leave out."""
    bias = facts.flag("attention_bias", default=False)
    table = through_transformers(read_rotary(facts, head_size(facts)))
    return decoder(
        facts,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=facts.flag("mlp_bias", default=False),
        sliding=windows(facts, enabled=False),
        rotaries=(table, table),
    )


def hunyuan(facts: Facts) -> Build:
    """Hunyuan dense: Llama with norms of queries and keys."""
    table = through_transformers(read_rotary(facts, head_size(facts)))
    bias = facts.flag("attention_bias", default=False)
    return decoder(facts, qkv_bias=bias, o_bias=bias, qk_norm=True, rotaries=(table, table))


def apertus(facts: Facts) -> Build:
    """Apertus: no gate, norms of queries and keys, an activation with two parameters of its own."""
    bias = facts.flag("attention_bias", default=False)
    build = decoder(facts, qkv_bias=bias, o_bias=bias, qk_norm=True, gated=False)

    def bent(index: int) -> Layer:
        layer = build(index)
        name = f"{layer_name(index)}.mlp.act_fn"
        bends = (Tensor(f"{name}.alpha_p", 1), Tensor(f"{name}.alpha_n", 1))
        return replace(layer, modules=layer.modules + bends)

    return bent


def baichuan(facts: Facts) -> Build:
    """Baichuan 1 and 2: Llama without grouped heads; the 13B has ALiBi in place of a rotation."""
    turns = facts.count("hidden_size") == 4096  # how vLLM told 7B from 13B apart
    table = read_rotary(facts, head_size(facts)) if turns else None
    return decoder(facts, rotaries=(table, table))


def qwen1(facts: Facts) -> Build:
    """Qwen of the first generation: the config counts gate and up together."""
    half = facts.count("intermediate_size") // 2
    return decoder(facts, qkv_bias=True, width=half)
