"""How does each family of dense decoders, and of plain experts on such a decoder, differ from Llama?

Each function follows the model file of the same name in vllm/model_executor/models (0.32.0), and the
defaults of the family's config class in transformers where a key is missing.
"""

from __future__ import annotations

from dataclasses import replace

from rayserve.planner.weights.blocks import (
    FLOAT32,
    Build,
    Feed,
    decoder,
    draft_count,
    expert_modules,
    head_size,
    layer_count,
    layer_name,
    normed_over_heads,
    windows,
)
from rayserve.planner.weights.facts import Facts
from rayserve.planner.weights.modules import (
    CHUNKED,
    FULL,
    Layer,
    Mlp,
    Module,
    Rotary,
    mlp_modules,
)
from rayserve.planner.weights.rotary import read_rotary

MIXTRAL_PARTS = ("w1", "w3", "w2")
THROUGH_TRANSFORMERS = (0, 32)
"""The installed version runs these families through Transformers; older ones had files of their own."""


def llama(facts: Facts) -> Build:
    """Llama, Mistral, InternLM 3, Yi."""
    bias = facts.flag("attention_bias", default=False) or facts.flag("bias", default=False)
    return decoder(
        facts,
        qkv_bias=facts.flag("qkv_bias", default=bias),
        o_bias=bias,
        mlp_bias=facts.flag("mlp_bias", default=False),
    )


def ernie(facts: Facts) -> Build:
    """ERNIE 4.5 without experts: Llama, whose biases the config calls by another name."""
    bias = facts.flag("use_bias", default=False)
    return decoder(facts, qkv_bias=bias, mlp_bias=bias)


def granite(facts: Facts) -> Build:
    """Granite 3: Llama with scalars of its own."""
    bias = facts.flag("attention_bias", default=False)
    return decoder(
        facts, qkv_bias=bias, o_bias=bias, mlp_bias=facts.flag("mlp_bias", default=False)
    )


def phi3(facts: Facts) -> Build:
    """Phi-3 and Phi-4, InternLM 2: Llama whose checkpoint is already fused."""
    return decoder(facts)


def phi(facts: Facts) -> Build:
    """Phi-1.5 and Phi-2: one LayerNorm a layer, biases everywhere, no gate."""
    table = through_transformers(read_rotary(facts, head_size(facts), partial=0.5))
    return decoder(
        facts,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        norms=1,
        norm_bias=True,
        gated=False,
        rotaries=(table, table),
    )


def seed_oss(facts: Facts) -> Build:
    """Seed-OSS: biases of queries, keys and values."""
    table = through_transformers(read_rotary(facts, head_size(facts)))
    return decoder(
        facts,
        qkv_bias=facts.flag("attention_bias", default=True),
        o_bias=facts.flag("attention_out_bias", default=False),
        rotaries=(table, table),
    )


def through_transformers(table: Rotary | None) -> Rotary | None:
    """The table, which only versions before the installed one keep."""
    return None if table is None else replace(table, in_transformers=THROUGH_TRANSFORMERS)


def qwen2(facts: Facts) -> Build:
    """Qwen 2 and 2.5."""
    return decoder(facts, qkv_bias=True, sliding=_qwen_windows(facts))


def qwen3(facts: Facts) -> Build:
    """Qwen 3."""
    bias = facts.flag("attention_bias", default=False)
    return decoder(facts, qkv_bias=bias, qk_norm=True, sliding=_qwen_windows(facts))


def _qwen_windows(facts: Facts) -> tuple[int, ...]:
    """The first `max_window_layers` see everything, where windows are switched on at all."""
    if facts.words("layer_types"):
        return windows(facts, enabled=False)
    first = facts.optional("max_window_layers")
    sizes = windows(facts, enabled=False)
    return tuple(size if index >= first else 0 for index, size in enumerate(sizes))


def glm4(facts: Facts) -> Build:
    """GLM-4-0414: four norms a layer."""
    table = read_rotary(facts, head_size(facts), partial=0.5)
    bias = facts.flag("attention_bias", default=False)
    return decoder(facts, qkv_bias=bias, norms=4, rotaries=(table, table))


def glm(facts: Facts) -> Build:
    """GLM-4-9B of the first release."""
    table = read_rotary(facts, head_size(facts), partial=0.5)
    bias = facts.flag("attention_bias", default=True)
    return decoder(facts, qkv_bias=bias, rotaries=(table, table))


def nemotron(facts: Facts) -> Build:
    """Nemotron-4 and Minitron: LayerNorms with bias, no gate."""
    table = read_rotary(facts, head_size(facts), partial=0.5)
    bias = facts.flag("attention_bias", default=False)
    return decoder(
        facts,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=facts.flag("mlp_bias", default=False),
        norm_bias=True,
        gated=False,
        rotaries=(table, table),
    )


def gemma(facts: Facts) -> Build:
    """Gemma 1."""
    return decoder(facts)


def gemma2(facts: Facts) -> Build:
    """Gemma 2: four norms, every second layer slides."""
    bias = facts.flag("attention_bias", default=False)
    sliding = windows(facts, pattern=2)
    return decoder(facts, qkv_bias=bias, o_bias=bias, norms=4, sliding=sliding)


def gemma3(facts: Facts) -> Build:
    """Gemma 3: norms of queries and keys, five of six layers slide, each kind has its own rotation."""
    size = head_size(facts)
    bias = facts.flag("attention_bias", default=False)
    wide = read_rotary(facts, size, kind="full_attention", label="full")
    near = read_rotary(facts, size, kind="sliding_attention", scaled=_by_kind(facts), label="near")
    return decoder(
        facts,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        norms=4,
        sliding=windows(facts, pattern=6),
        rotaries=(wide, near),
    )


def _by_kind(facts: Facts) -> bool:
    stated = facts.inner("rope_parameters")
    return stated is not None and stated.has("sliding_attention")


def mixtral(facts: Facts) -> Build:
    """Mixtral: every MLP is a set of experts."""
    mlp = Mlp(
        experts=facts.count("num_local_experts"),
        experts_per_token=facts.count("num_experts_per_tok"),
        expert_width=facts.count("intermediate_size"),
    )
    return decoder(facts, feed=same(facts, "block_sparse_moe", mlp, parts=MIXTRAL_PARTS))


def same(facts: Facts, name: str, mlp: Mlp, **options: object) -> Feed:
    """The same experts in every layer; `options` are those of `expert_modules`."""
    hidden = facts.count("hidden_size")

    def feed(index: int) -> tuple[Mlp, list[Module]]:
        path = f"{layer_name(index)}.{name}"
        return mlp, expert_modules(path, hidden, mlp, **options)  # type: ignore[arg-type]

    return feed


def sparse_layers(facts: Facts) -> tuple[bool, ...]:
    """Which layers have experts, by `mlp_only_layers` and `decoder_sparse_step`."""
    dense = set(facts.counts("mlp_only_layers"))
    step = facts.optional("decoder_sparse_step") or 1
    return tuple(
        index not in dense and (index + 1) % step == 0 for index in range(layer_count(facts))
    )


def mixed(facts: Facts, sparse: tuple[bool, ...], mlp: Mlp, **options: object) -> Feed:
    """Experts in the layers marked `sparse`, a dense MLP in the others."""
    hidden = facts.count("hidden_size")
    width = 0 if all(sparse) else facts.count("intermediate_size")
    experts = same(facts, "mlp", mlp, **options)

    def feed(index: int) -> tuple[Mlp, list[Module]]:
        if sparse[index]:
            return experts(index)
        return Mlp(width=width), mlp_modules(f"{layer_name(index)}.mlp", hidden, width)

    return feed


def qwen_experts(facts: Facts) -> Mlp:
    """The experts of a Qwen model."""
    return Mlp(
        experts=facts.count("num_experts", "n_routed_experts"),
        experts_per_token=facts.count("num_experts_per_tok"),
        expert_width=facts.count("moe_intermediate_size"),
        shared_width=facts.optional("shared_expert_intermediate_size"),
    )


def qwen2_moe(facts: Facts) -> Build:
    """Qwen 1.5 and 2 with experts, and one expert that every token passes through a gate."""
    feed = mixed(
        facts,
        sparse_layers(facts),
        qwen_experts(facts),
        shared="shared_expert",
        shared_gate=True,
    )
    return decoder(facts, qkv_bias=True, sliding=_qwen_windows(facts), feed=feed)


def qwen3_moe(facts: Facts, *, mrope: bool = False) -> Build:
    """Qwen 3 with experts."""
    feed = mixed(
        facts,
        sparse_layers(facts),
        qwen_experts(facts),
        shared="shared_expert",
        shared_gate=True,
    )
    bias = facts.flag("attention_bias", default=False)
    table = read_rotary(facts, head_size(facts), mrope=mrope)
    return decoder(
        facts,
        qkv_bias=bias,
        qk_norm=True,
        sliding=_qwen_windows(facts),
        rotaries=(table, table),
        feed=feed,
    )


def qwen2_vl(facts: Facts) -> Build:
    """The language model of Qwen 2-VL and 2.5-VL: rotation in three dimensions."""
    table = read_rotary(facts, head_size(facts), mrope=True)
    sliding = _qwen_windows(facts)
    return decoder(facts, qkv_bias=True, sliding=sliding, rotaries=(table, table))


def qwen3_vl(facts: Facts) -> Build:
    """The language model of Qwen 3-VL."""
    table = read_rotary(facts, head_size(facts), mrope=True)
    bias = facts.flag("attention_bias", default=False)
    return decoder(facts, qkv_bias=bias, qk_norm=True, rotaries=(table, table))


def qwen3_vl_moe(facts: Facts) -> Build:
    """The language model of Qwen 3-VL with experts."""
    return qwen3_moe(facts, mrope=True)


def glm4_moe(facts: Facts) -> Build:
    """GLM-4.5 and 4.6: dense layers first, a router in 32 bits."""
    width = facts.count("moe_intermediate_size")
    mlp = Mlp(
        experts=facts.count("n_routed_experts"),
        experts_per_token=facts.count("num_experts_per_tok"),
        expert_width=width,
        shared_width=width * facts.optional("n_shared_experts"),
    )
    dense = facts.optional("first_k_dense_replace")
    sparse = tuple(index >= dense for index in range(layer_count(facts) + draft_count(facts)))
    table = read_rotary(facts, head_size(facts), partial=0.5)
    return decoder(
        facts,
        qkv_bias=facts.flag("attention_bias", default=False),
        qk_norm=facts.flag("use_qk_norm", default=False),
        rotaries=(table, table),
        feed=mixed(facts, sparse, mlp, router_bytes=FLOAT32, correction=True),
    )


def gpt_oss(facts: Facts) -> Build:
    """gpt-oss: sinks, biases everywhere, every second layer slides, rotation in 32 bits."""
    mlp = Mlp(
        experts=facts.count("num_local_experts", "num_experts", "n_routed_experts"),
        experts_per_token=facts.count("num_experts_per_tok", "experts_per_token"),
        expert_width=facts.count("intermediate_size"),
    )
    table = read_rotary(facts, head_size(facts), element_bytes=FLOAT32)
    window = facts.count("sliding_window", default=128)
    return decoder(
        facts,
        qkv_bias=True,
        o_bias=True,
        sinks=True,
        attention_name="attn",
        sliding=tuple(window if index % 2 == 0 else 0 for index in range(layer_count(facts))),
        rotaries=(table, table),
        feed=same(facts, "mlp", mlp, gate="router", router_bias=True, bias=True),
    )


def minimax_m2(facts: Facts) -> Build:
    """MiniMax-M2: norms over all heads of queries and keys, a router in 32 bits."""
    mlp = Mlp(
        experts=facts.count("num_local_experts", "n_routed_experts"),
        experts_per_token=facts.count("num_experts_per_tok"),
        expert_width=facts.count("intermediate_size"),
    )
    build = decoder(
        facts,
        feed=same(
            facts,
            "block_sparse_moe",
            mlp,
            router_bytes=FLOAT32,
            correction=facts.flag("use_routing_bias", default=False),
            parts=MIXTRAL_PARTS,
        ),
    )
    return normed_over_heads(build, facts)


def llama4(facts: Facts) -> Build:
    """Llama 4: chunked attention where positions rotate, one shared expert beside the routed ones."""
    hidden, width = facts.count("hidden_size"), facts.count("intermediate_size")
    mlp = Mlp(
        experts=facts.count("num_local_experts", "n_routed_experts"),
        experts_per_token=facts.count("num_experts_per_tok"),
        expert_width=width,
        shared_width=width,
    )
    step = facts.optional("interleave_moe_layer_step") or 1
    layers = layer_count(facts)
    rotates = facts.counts("no_rope_layers") or tuple((i + 1) % 4 for i in range(layers))
    if len(rotates) < layers:
        raise facts.wrong("no_rope_layers", f"a list of {layers} flags", rotates)
    chunk = facts.optional("attention_chunk_size")
    dense = 0 if step == 1 else facts.count("intermediate_size_mlp", default=16384)
    table = read_rotary(facts, head_size(facts))

    def feed(index: int) -> tuple[Mlp, list[Module]]:
        name = f"{layer_name(index)}.feed_forward"
        if (index + 1) % step == 0:
            return mlp, expert_modules(name, hidden, mlp, gate="router", shared="shared_expert")
        return Mlp(width=dense), mlp_modules(name, hidden, dense)

    local = tuple(chunk if flag else 0 for flag in rotates[:layers])
    build = decoder(facts, sliding=local, rotaries=(None if chunk else table, table), feed=feed)

    def chunked(index: int) -> Layer:
        layer = build(index)
        kind = CHUNKED if layer.attention.window else FULL
        return replace(layer, attention=replace(layer.attention, kind=kind))

    return chunked
