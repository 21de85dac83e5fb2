"""How do further families with experts differ: Phi-MoE, OLMoE, Granite, DBRX, ERNIE, Ling, GLM-4 Lite?

Each function follows the model file in vllm/model_executor/models (0.32.0).
"""

from __future__ import annotations

from dataclasses import replace

from rayserve.planner.weights.blocks import (
    FLOAT32,
    Build,
    decoder,
    head_size,
    kv_head_count,
    layer_count,
    layer_name,
)
from rayserve.planner.weights.dense import mixed, same
from rayserve.planner.weights.facts import Facts
from rayserve.planner.weights.latent import deepseek
from rayserve.planner.weights.modules import Layer, Mlp, Tensor
from rayserve.planner.weights.rotary import read_rotary


def phimoe(facts: Facts) -> Build:
    """Phi-3.5-MoE: Mixtral with LayerNorms and biases of attention."""
    feed = same(facts, "block_sparse_moe", _wide_experts(facts), parts=("w1", "w3", "w2"))
    return decoder(facts, qkv_bias=True, o_bias=True, norm_bias=True, feed=feed)


def _wide_experts(facts: Facts, shared: int = 0) -> Mlp:
    """Experts as wide as `intermediate_size` says."""
    return Mlp(
        experts=facts.count("num_local_experts", "num_experts"),
        experts_per_token=facts.count("num_experts_per_tok"),
        expert_width=facts.count("intermediate_size"),
        shared_width=shared,
    )


def olmoe(facts: Facts) -> Build:
    """OLMoE: every layer has experts; norms over all heads, whole on every rank."""
    size = head_size(facts)
    widths = (facts.count("num_attention_heads") * size, kv_head_count(facts) * size)
    build = decoder(facts, feed=same(facts, "mlp", _wide_experts(facts)))

    def normed(index: int) -> Layer:
        layer = build(index)
        name = f"{layer_name(index)}.self_attn"
        norms = tuple(
            Tensor(f"{name}.{title}_norm.weight", width)
            for title, width in zip("qk", widths, strict=True)
        )
        return replace(layer, modules=layer.modules + norms)

    return normed


def granite_moe(facts: Facts) -> Build:
    """Granite 3 with experts, and since 3.1 one that every token passes."""
    mlp = _wide_experts(facts, facts.optional("shared_intermediate_size"))
    feed = same(facts, "block_sparse_moe", mlp, shared="shared_mlp")
    return decoder(facts, feed=feed)


def dbrx(facts: Facts) -> Build:
    """DBRX: its figures stand in `ffn_config` and `attn_config`; LayerNorms without bias."""
    inner, attention = facts.inner("ffn_config"), facts.inner("attn_config")
    if inner is None or attention is None:
        raise facts.wrong("ffn_config", "an object, like attn_config", None)
    mlp = Mlp(
        experts=inner.count("moe_num_experts"),
        experts_per_token=inner.count("moe_top_k"),
        expert_width=inner.count("ffn_hidden_size"),
    )
    heads = attention.count("kv_n_heads")
    own = Facts({**facts.data, "num_key_value_heads": heads}, facts.where)
    return decoder(own, feed=same(facts, "ffn", mlp, gate="router", parts=("w1", "v1", "w2")))


def ernie_moe(facts: Facts) -> Build:
    """ERNIE 4.5 with experts: a router in 32 bits, dense layers before and after."""
    width = facts.count("moe_intermediate_size")
    mlp = Mlp(
        experts=facts.count("moe_num_experts"),
        experts_per_token=facts.count("moe_k"),
        expert_width=width,
        shared_width=width * facts.optional("moe_num_shared_experts"),
    )
    layers = layer_count(facts)
    first, every = facts.optional("moe_layer_start_index"), facts.optional("moe_layer_interval")
    last = facts.data.get("moe_layer_end_index")
    last = facts.optional("moe_layer_end_index") if isinstance(last, int) and last >= 0 else layers
    sparse = tuple(
        first <= index <= last and (index + 1) % (every or 1) == 0 for index in range(layers)
    )
    bias = facts.flag("use_bias", default=False)
    feed = mixed(facts, sparse, mlp, router_bytes=FLOAT32, correction=True)
    return decoder(facts, qkv_bias=bias, feed=feed)


def bailing(facts: Facts) -> Build:
    """Ling and Ring (Bailing) with experts, of the first and the second generation."""
    width, count = facts.count("moe_intermediate_size"), facts.optional("num_shared_experts")
    mlp = Mlp(
        experts=facts.count("num_experts"),
        experts_per_token=facts.count("num_experts_per_tok"),
        expert_width=width,
        shared_width=count * (facts.optional("moe_shared_expert_intermediate_size") or width),
    )
    dense = facts.optional("first_k_dense_replace")
    sparse = tuple(index >= dense for index in range(layer_count(facts)))
    bias = facts.flag("use_bias", default=False)
    table = read_rotary(facts, head_size(facts))
    return decoder(
        facts,
        qkv_bias=bias or facts.flag("use_qkv_bias", default=False),
        o_bias=bias,
        qk_norm=facts.flag("use_qk_norm", default=False),
        rotaries=(table, table),
        feed=mixed(
            facts,
            sparse,
            mlp,
            correction=facts.flag("moe_router_enable_expert_bias", default=False),
            router_bytes=FLOAT32 if facts.text("router_dtype") == "fp32" else 0,
        ),
    )


def glm4_lite(facts: Facts) -> Build:
    """GLM-4.7-Flash: DeepSeek's attention with GLM-4.5's router in 32 bits."""
    return deepseek(
        Facts({"topk_method": "noaux_tc", **facts.data}, facts.where), router_bytes=FLOAT32
    )
