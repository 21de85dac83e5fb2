"""Which modules does a decoder layer hold, block by block, in the order vLLM builds them?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rayserve.planner.support.figures import MOST_LAYERS
from rayserve.planner.weights.facts import Facts
from rayserve.planner.weights.modules import (
    COLUMNS,
    FULL,
    ROWS,
    SLIDING,
    Attention,
    Experts,
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

Build = Callable[[int], Layer]
Feed = Callable[[int], tuple[Mlp, list[Module]]]
FLOAT32 = 4
LOCAL_KINDS = {"sliding_attention": SLIDING, "chunked_attention": "chunked"}


def layer_count(facts: Facts) -> int:
    """How many decoder layers the model has."""
    return facts.count("num_hidden_layers", most=MOST_LAYERS)


def draft_count(facts: Facts) -> int:
    """How many layers beyond the decoder's own guess tokens; vLLM counts their indices on from those."""
    return facts.optional("num_nextn_predict_layers", most=64)


def layer_name(index: int) -> str:
    """vLLM's name of a decoder layer."""
    return f"model.layers.{index}"


def kv_head_count(facts: Facts) -> int:
    """KV heads; as many as query heads where the config names none."""
    return facts.optional("num_key_value_heads") or facts.count("num_attention_heads")


def head_size(facts: Facts) -> int:
    """Elements of a head."""
    stated = facts.optional("head_dim")
    return stated or facts.count("hidden_size") // facts.count("num_attention_heads") or 1


def windows(facts: Facts, *, pattern: int = 0, enabled: bool = True) -> tuple[int, ...]:
    """Tokens of each layer's sliding window; 0: the whole context.

    `layer_types` decides where it is given; else every `pattern`-th layer sees everything, and with
    no pattern every layer slides. `enabled` is the family's default of `use_sliding_window`.
    """
    layers = layer_count(facts)
    window = facts.optional("sliding_window")
    kinds = facts.words("layer_types")
    if kinds and len(kinds) < layers:
        raise facts.wrong("layer_types", f"a list of {layers} kinds", kinds)
    if not window or not facts.flag("use_sliding_window", default=enabled):
        return (0,) * layers
    if kinds:
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:layers])
    pattern = facts.optional("sliding_window_pattern", "_sliding_window_pattern") or pattern
    return tuple(window if not pattern or (i + 1) % pattern else 0 for i in range(layers))


def grouped_attention(
    name: str,
    hidden: int,
    *,
    heads: int,
    kv_heads: int,
    size: int,
    qkv_bias: bool = False,
    o_bias: bool = False,
    gate: bool = False,
    rotary: Rotary | None = None,
    names: tuple[str, str] = ("qkv_proj", "o_proj"),
) -> list[Module]:
    """Fused queries, keys and values, and the output; a gate doubles the queries."""
    queries = heads * size
    modules: list[Module] = [
        Linear(
            f"{name}.{names[0]}",
            hidden,
            (queries * (2 if gate else 1), kv_heads * size, kv_heads * size),
            COLUMNS,
            parts=("q_proj", "k_proj", "v_proj"),
            bias=qkv_bias,
            kv_heads=kv_heads,
        ),
        Linear(f"{name}.{names[1]}", queries, (hidden,), ROWS, bias=o_bias),
    ]
    if rotary is not None:
        modules.append(rotary)
    return modules + cache_scales(f"{name}.attn")


def head_norms(name: str, size: int) -> list[Module]:
    """Norms of queries and keys, one weight for all heads."""
    return [Tensor(f"{name}.q_norm.weight", size), Tensor(f"{name}.k_norm.weight", size)]


def decoder(
    facts: Facts,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    norms: int = 2,
    norm_bias: bool = False,
    gated: bool = True,
    sliding: tuple[int, ...] | None = None,
    rotaries: tuple[Rotary | None, Rotary | None] | None = None,
    feed: Feed | None = None,
    sinks: bool = False,
    attention_name: str = "self_attn",
    width: int = 0,
) -> Build:
    """The usual decoder: grouped-query attention and an MLP or, through `feed`, experts.

    `rotaries` are those of layers that see everything and of sliding ones; `width` is the MLP's, 0
    for what the config says.
    """
    hidden, size = facts.count("hidden_size"), head_size(facts)
    heads, kv_heads = facts.count("num_attention_heads"), kv_head_count(facts)
    if not feed:
        width = width or facts.count("intermediate_size")
    local = sliding if sliding is not None else windows(facts)
    table = read_rotary(facts, size)
    tables = rotaries or (table, table)

    def build(index: int) -> Layer:
        # a layer beyond the model's own guesses tokens, and attends like the last
        name, window = layer_name(index), local[min(index, len(local) - 1)]
        attention = f"{name}.{attention_name}"
        modules = grouped_attention(
            attention,
            hidden,
            heads=heads,
            kv_heads=kv_heads,
            size=size,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            rotary=tables[1 if window else 0],
        )
        if sinks:
            modules.insert(0, Tensor(f"{attention}.sinks", heads, COLUMNS))
        if qk_norm:
            modules += head_norms(attention, size)
        mlp = Mlp(width=width, gated=gated)
        if feed is None:
            modules += mlp_modules(f"{name}.mlp", hidden, width, gated=gated, bias=mlp_bias)
        else:
            mlp, more = feed(index)
            modules += more
        for at in range(norms):
            modules += norm(f"{name}.norm{at}", hidden, bias=norm_bias)
        mixing = Attention(
            SLIDING if window else FULL,
            heads,
            kv_heads,
            size,
            size,
            window=window,
            qk_norm=qk_norm,
            sinks=sinks,
        )
        return Layer(mixing, mlp, tuple(modules))

    return build


def expert_modules(
    name: str,
    hidden: int,
    mlp: Mlp,
    *,
    experts: str = "experts",
    shared: str = "shared_experts",
    gate: str = "gate",
    router_bytes: int = 0,
    router_bias: bool = False,
    correction: bool = False,
    shared_gate: bool = False,
    bias: bool = False,
    expert_hidden: int = 0,
    parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
) -> list[Module]:
    """A router, the routed experts and those that every token passes."""
    modules: list[Module] = [
        Linear(
            f"{name}.{gate}",
            hidden,
            (mlp.experts,),
            bias=router_bias,
            quantizable=False,
            element_bytes=router_bytes,
        )
    ]
    if correction:
        modules.append(
            Tensor(f"{name}.gate.e_score_correction_bias", mlp.experts, element_bytes=FLOAT32)
        )
    if mlp.shared_width:
        if shared_gate:
            modules.append(Linear(f"{name}.shared_expert_gate", hidden, (1,), quantizable=False))
        modules += mlp_modules(f"{name}.{shared}", hidden, mlp.shared_width, gated=mlp.gated)
    modules.append(
        Experts(
            f"{name}.{experts}",
            mlp.experts,
            expert_hidden or hidden,
            mlp.expert_width,
            gated=mlp.gated,
            bias=bias,
            parts=parts,
        )
    )
    return modules


def normed_over_heads(build: Build, facts: Facts) -> Build:
    """With norms over all heads of queries and of keys, cut by heads."""
    size = head_size(facts)
    widths = (facts.count("num_attention_heads") * size, kv_head_count(facts) * size)

    def normed(index: int) -> Layer:
        layer = build(index)
        name = f"{layer_name(index)}.self_attn"
        tensors = (
            Tensor(f"{name}.q_norm.weight", widths[0], COLUMNS),
            Tensor(f"{name}.k_norm.weight", widths[1], COLUMNS),
        )
        return replace(layer, modules=layer.modules + tensors)

    return normed
