"""How do models lay out layers of Mamba-2 beside attention: Granite 4, Falcon-H1, Bamba?

Each function follows the model file of the same name in vllm/model_executor/models (0.32.0; Bamba's
of 0.22, the last one).
"""

from __future__ import annotations

from rayserve.planner.weights.blocks import (
    Build,
    expert_modules,
    grouped_attention,
    head_size,
    kv_head_count,
    layer_count,
    layer_name,
)
from rayserve.planner.weights.facts import Facts
from rayserve.planner.weights.hybrid import mamba_modules
from rayserve.planner.weights.modules import (
    FULL,
    MAMBA,
    Attention,
    Layer,
    Mlp,
    Module,
    State,
    mlp_modules,
    norm,
)
from rayserve.planner.weights.rotary import read_rotary


def mamba2_state(facts: Facts) -> State:
    """What a Mamba-2 layer keeps, in the spelling of Granite, Falcon-H1 and Bamba."""
    heads, width = facts.count("mamba_n_heads"), facts.count("mamba_d_state")
    inner = facts.optional("mamba_d_ssm")
    inner = inner or facts.count("mamba_expand", default=2) * facts.count("hidden_size")
    groups = facts.count("mamba_n_groups", default=1)
    stated = facts.optional("mamba_d_head")
    return State(
        heads=heads,
        head_size=stated or inner // heads,
        state_size=width,
        key_heads=groups,
        conv_kernel=facts.count("mamba_d_conv", default=4),
        conv_channels=inner + 2 * groups * width,
    )


def _mixer(facts: Facts, path: str, state: State) -> list[Module]:
    modules = mamba_modules(
        path,
        facts.count("hidden_size"),
        state,
        bias=facts.flag("mamba_proj_bias", default=False),
        conv_bias=facts.flag("mamba_conv_bias", default=True),
    )
    if facts.flag("mamba_rms_norm", default=True):
        return modules
    return modules[:-1]  # its last is the norm within the mixer


def _attention(facts: Facts, path: str, *, rotates: bool, bias: bool) -> list[Module]:
    size = head_size(facts)
    return grouped_attention(
        path,
        facts.count("hidden_size"),
        heads=facts.count("num_attention_heads"),
        kv_heads=kv_head_count(facts),
        size=size,
        qkv_bias=bias,
        o_bias=bias,
        rotary=read_rotary(facts, size) if rotates else None,
    )


def _full(facts: Facts, state: State | None = None) -> Attention:
    size = head_size(facts)
    heads = facts.count("num_attention_heads")
    return Attention(FULL, heads, kv_head_count(facts), size, size, state=state)


def granite_hybrid(facts: Facts) -> Build:
    """Granite 4: Mamba-2 or attention, then experts and a shared MLP, or that alone."""
    hidden, layers = facts.count("hidden_size"), layer_count(facts)
    kinds = facts.words("layer_types") or facts.words("layers_block_type")
    if len(kinds) < layers:
        raise facts.wrong("layer_types", f"a list of {layers} kinds", kinds)
    recurrent = "mamba" in kinds
    state = mamba2_state(facts) if recurrent else None
    rotates = facts.text("position_embedding_type", "nope") == "rope"
    bias = facts.flag("attention_bias", default=False)
    shared = facts.optional("shared_intermediate_size")
    experts = facts.optional("num_local_experts")
    mlp = Mlp(width=shared)
    if experts:
        mlp = Mlp(
            experts=experts,
            experts_per_token=facts.count("num_experts_per_tok"),
            expert_width=facts.count("intermediate_size"),
            shared_width=shared,
        )

    def build(index: int) -> Layer:
        name = layer_name(index)
        if kinds[index] == "mamba" and state is not None:
            modules = _mixer(facts, f"{name}.mixer", state)
            mixing = Attention(MAMBA, state=state)
        else:
            modules = _attention(facts, f"{name}.self_attn", rotates=rotates, bias=bias)
            mixing = _full(facts)
        if experts:
            path = f"{name}.block_sparse_moe"
            modules += expert_modules(path, hidden, mlp, shared="shared_mlp")
        elif shared:
            modules += mlp_modules(f"{name}.shared_mlp", hidden, shared)
        modules += norm(f"{name}.input_layernorm", hidden)
        modules += norm(f"{name}.post_attention_layernorm", hidden)
        return Layer(mixing, mlp, tuple(modules))

    return build


def falcon_h1(facts: Facts) -> Build:
    """Falcon-H1: attention and Mamba-2 beside each other in every layer."""
    hidden, width = facts.count("hidden_size"), facts.count("intermediate_size")
    state = mamba2_state(facts)
    mixing, bias = _full(facts, state), facts.flag("mlp_bias", default=False)

    def build(index: int) -> Layer:
        name = layer_name(index)
        modules = _attention(facts, f"{name}.self_attn", rotates=True, bias=False)
        modules += _falcon_mixer(facts, f"{name}.mamba", state)
        modules += mlp_modules(f"{name}.feed_forward", hidden, width, bias=bias)
        modules += norm(f"{name}.input_layernorm", hidden)
        modules += norm(f"{name}.pre_ff_layernorm", hidden)
        return Layer(mixing, Mlp(width=width), tuple(modules))

    return build


def _falcon_mixer(facts: Facts, path: str, state: State) -> list[Module]:
    known = {"mamba_rms_norm": False, **facts.data}
    return _mixer(Facts(known, facts.where), path, state)


def bamba(facts: Facts) -> Build:
    """Bamba: Mamba-2, or attention where `attn_layer_indices` says so, then an MLP."""
    hidden, width = facts.count("hidden_size"), facts.count("intermediate_size")
    state, places = mamba2_state(facts), facts.counts("attn_layer_indices")
    bias = facts.flag("mlp_bias", default=False)

    def build(index: int) -> Layer:
        name = layer_name(index)
        if index in places:
            modules = _attention(facts, f"{name}.self_attn", rotates=True, bias=False)
            mixing = _full(facts)
        else:
            modules = _mixer(facts, f"{name}.mamba", state)
            mixing = Attention(MAMBA, state=state)
        modules += mlp_modules(f"{name}.feed_forward", hidden, width, bias=bias)
        modules += norm(f"{name}.input_layernorm", hidden)
        modules += norm(f"{name}.pre_ff_layernorm", hidden)
        return Layer(mixing, Mlp(width=width), tuple(modules))

    return build
