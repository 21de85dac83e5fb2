"""How do models with latent attention (DeepSeek V2/V3/R1, Kimi-K2, GLM-5) lay out a layer?

vllm/model_executor/models/deepseek_v2.py (0.32.0): the latent and, where there is one, the queries'
down-projection are whole on every rank; what works on heads is cut by heads.
"""

from __future__ import annotations

from dataclasses import replace

from rayserve.planner.weights.blocks import (
    FLOAT32,
    Build,
    draft_count,
    expert_modules,
    layer_count,
    layer_name,
)
from rayserve.planner.weights.facts import Facts
from rayserve.planner.weights.modules import (
    COLUMNS,
    MLA,
    ROWS,
    Absorbed,
    Attention,
    Layer,
    Linear,
    Mlp,
    Module,
    Rotary,
    Tensor,
    cache_scales,
    mlp_modules,
    norm,
)
from rayserve.planner.weights.rotary import read_rotary

INDEX_BLOCK = 128
"""Elements of an indexer key that share one 4-byte scale (`quant_block_size`)."""


def deepseek(facts: Facts, *, router_bytes: int = 0) -> Build:
    """DeepSeek V2, V3, R1, V3.2, Kimi-K2, GLM-5: latent attention, dense layers first, then experts.

    `router_bytes`: of an element of the router; 0 for the activations' type.
    """
    hidden = facts.count("hidden_size")
    table = read_rotary(facts, facts.count("qk_rope_head_dim"))
    mixing = attention_facts(facts)
    dense = facts.optional("first_k_dense_replace")
    every = facts.optional("moe_layer_freq") or 1
    mlp = experts_of(facts)
    correction = facts.text("topk_method", _method(facts)) == "noaux_tc"
    layer_total = layer_count(facts)
    indexed = _indexed(facts, layer_total)
    with_drafts = range(layer_total + draft_count(facts))
    sparse = [mlp.experts and i >= dense and i % every == 0 for i in with_drafts]
    width = 0 if all(sparse) else facts.count("intermediate_size")

    def build(index: int) -> Layer:
        name = layer_name(index)
        # a layer beyond the model's own is an MTP layer, which always has an indexer
        own = mixing if index >= layer_total or indexed[index] else replace(mixing, index_size=0)
        modules = latent_modules(f"{name}.self_attn", facts, hidden, own, table)
        feed = mlp if sparse[index] else Mlp(width=width)
        if feed.experts:
            modules += expert_modules(
                f"{name}.mlp", hidden, feed, correction=correction, router_bytes=router_bytes
            )
        else:
            modules += mlp_modules(f"{name}.mlp", hidden, width)
        modules += norm(f"{name}.input_layernorm", hidden)
        modules += norm(f"{name}.post_attention_layernorm", hidden)
        return Layer(own, feed, tuple(modules))

    return build


def _indexed(facts: Facts, layers: int) -> list[bool]:
    """Which layers choose tokens of their own; the others take the choice of the one before
    (DeepseekV2MLAAttention of vllm/model_executor/models/deepseek_v2.py).
    """
    pattern = facts.text("index_topk_pattern")
    if pattern:
        return [pattern[i : i + 1] != "S" for i in range(layers)]
    every = facts.count("index_topk_freq", default=1)
    offset = facts.count("index_skip_topk_offset", default=2)
    return [max(i - offset + 1, 0) % every == 0 for i in range(layers)]


def _method(facts: Facts) -> str:
    # V3 and its heirs correct the router's scores; the config class of V2 says greedy
    return "noaux_tc" if facts.optional("q_lora_rank") and facts.has("n_group") else ""


def experts_of(facts: Facts) -> Mlp:
    """The experts of a layer that has them."""
    experts = facts.optional("n_routed_experts")
    if not experts:
        return Mlp(width=facts.count("intermediate_size"))
    width = facts.count("moe_intermediate_size")
    return Mlp(
        experts=experts,
        experts_per_token=facts.count("num_experts_per_tok"),
        expert_width=width,
        shared_width=width * facts.optional("n_shared_experts"),
    )


def attention_facts(facts: Facts) -> Attention:
    """What latent attention keeps of a token."""
    indexed = facts.optional("index_topk")
    index = facts.count("index_head_dim") if indexed else 0
    rope = facts.count("qk_rope_head_dim")
    return Attention(
        MLA,
        heads=facts.count("num_attention_heads"),
        kv_heads=1,
        key_size=facts.count("qk_nope_head_dim") + rope,
        value_size=facts.count("v_head_dim"),
        latent_size=facts.count("kv_lora_rank"),
        rope_size=rope,
        index_size=index + index // INDEX_BLOCK * 4,
        index_topk=indexed,
    )


def latent_modules(
    name: str, facts: Facts, hidden: int, mixing: Attention, table: Rotary | None
) -> list[Module]:
    """Projections, norms and rotation of one layer's latent attention."""
    latent, heads, rope = mixing.latent_size, mixing.heads, mixing.rope_size
    rank = facts.optional("q_lora_rank")
    title = "q_b_proj" if rank else "q_proj"
    down = Linear(f"{name}.kv_a_proj_with_mqa", hidden, (latent + rope,))
    query = Linear(f"{name}.{title}", rank or hidden, (heads * mixing.key_size,), COLUMNS)
    modules: list[Module] = [down, query]
    if rank:
        parts = ("q_a_proj", "kv_a_proj_with_mqa")
        modules = [
            Linear(f"{name}.fused_qkv_a_proj", hidden, (rank, latent + rope), parts=parts),
            Tensor(f"{name}.q_a_layernorm.weight", rank),
            query,
        ]
    outputs = heads * (mixing.key_size - rope + mixing.value_size)
    up = Linear(f"{name}.kv_b_proj", latent, (outputs,), COLUMNS)
    out = Linear(f"{name}.o_proj", heads * mixing.value_size, (hidden,), ROWS)
    modules += [Tensor(f"{name}.kv_a_layernorm.weight", latent), up, out]
    if table is not None:
        modules.append(table)
    if mixing.index_size and rank:
        modules += _indexer(f"{name}.indexer", facts, hidden, rank)
    modules += cache_scales(f"{name}.mla_attn")
    modules.append(Absorbed(f"{name}.mla_attn", up, query, out, heads, latent, rope))
    return modules


def _indexer(name: str, facts: Facts, hidden: int, queries: int) -> list[Module]:
    size = facts.count("index_head_dim")
    heads = facts.count("index_n_heads", default=64)
    return [
        Linear(f"{name}.wq_b", queries, (size * heads,)),
        Linear(f"{name}.wk_weights_proj", hidden, (size, heads), quantizable=False),
        Tensor(f"{name}.k_norm.weight", size, element_bytes=FLOAT32),
        Tensor(f"{name}.k_norm.bias", size, element_bytes=FLOAT32),
    ]


def deepseek_draft(facts: Facts, build: Build) -> tuple[Layer, ...]:
    """The layers that guess tokens: two norms, a projection of both inputs, a decoder layer.

    deepseek_mtp.py and glm4_moe_mtp.py. The decoder layer is named after the index that follows the
    model's last one, by which lists of unquantized matrices know it; the embedding and the head are
    the model's own.
    """
    hidden, first = facts.count("hidden_size"), layer_count(facts)
    drafts = []
    for index in range(first, first + draft_count(facts)):
        name, layer = layer_name(index), build(index)
        modules: list[Module] = [
            *norm(f"{name}.enorm", hidden),
            *norm(f"{name}.hnorm", hidden),
            Linear(f"{name}.eh_proj", 2 * hidden, (hidden,), quantizable=False),
            *norm(f"{name}.shared_head.norm", hidden),
            *layer.modules,
        ]
        drafts.append(Layer(layer.attention, layer.mlp, tuple(modules)))
    return tuple(drafts)
