"""How do models lay out layers that differ in kind: linear attention, Mamba-2, two head sizes?"""

from __future__ import annotations

from dataclasses import replace

from rayserve.planner.weights.blocks import (
    FLOAT32,
    Build,
    expert_modules,
    grouped_attention,
    head_norms,
    head_size,
    kv_head_count,
    layer_count,
    layer_name,
    windows,
)
from rayserve.planner.weights.dense import qwen_experts, sparse_layers
from rayserve.planner.weights.facts import Facts
from rayserve.planner.weights.modules import (
    COLUMNS,
    FULL,
    LINEAR,
    MAMBA,
    NONE,
    ROWS,
    SLIDING,
    Absorbed,
    Attention,
    Layer,
    Linear,
    Mlp,
    Module,
    Rotary,
    State,
    Tensor,
    mlp_modules,
    norm,
)
from rayserve.planner.weights.rotary import read_rotary


def linear_layers(facts: Facts) -> tuple[bool, ...]:
    """Which layers attend linearly: `layer_types`, else all but every fourth."""
    layers = layer_count(facts)
    kinds = facts.words("layer_types")
    if kinds and len(kinds) < layers:
        raise facts.wrong("layer_types", f"a list of {layers} kinds", kinds)
    if kinds:
        return tuple(kind == "linear_attention" for kind in kinds[:layers])
    step = facts.optional("full_attention_interval") or 4
    return tuple((index + 1) % step != 0 for index in range(layers))


def delta_modules(name: str, hidden: int, state: State, *, flat: bool) -> list[Module]:
    """A gated delta net (vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py)."""
    keys, values = state.key_heads * state.state_size, state.heads * state.head_size
    wide = (keys, keys, values, values) if flat else (2 * (keys + values),)
    narrow = (state.heads, state.heads) if flat else (2 * state.heads,)
    parts = (("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a")) if flat else ((), ())
    return [
        Linear(
            f"{name}.conv1d",
            state.conv_kernel,
            (state.conv_channels,),
            COLUMNS,
            quantizable=False,
        ),
        Linear(f"{name}.in_proj_qkvz", hidden, wide, COLUMNS, parts=parts[0]),
        Linear(f"{name}.in_proj_ba", hidden, narrow, COLUMNS, parts=parts[1]),
        Tensor(f"{name}.dt_bias", state.heads, COLUMNS),
        Tensor(f"{name}.A_log", state.heads, COLUMNS, FLOAT32),
        Tensor(f"{name}.norm.weight", state.head_size),
        Linear(f"{name}.out_proj", values, (hidden,), ROWS),
    ]


def qwen3_next(facts: Facts, *, flat: bool = False, mrope: bool = False) -> Build:
    """Qwen3-Next, and with `flat` Qwen 3.5: delta nets, gated attention, experts or an MLP."""
    hidden, size = facts.count("hidden_size"), head_size(facts)
    heads, kv_heads = facts.count("num_attention_heads"), kv_head_count(facts)
    state = State(
        heads=facts.count("linear_num_value_heads"),
        head_size=facts.count("linear_value_head_dim"),
        state_size=facts.count("linear_key_head_dim"),
        key_heads=facts.count("linear_num_key_heads"),
        conv_kernel=facts.count("linear_conv_kernel_dim"),
        conv_channels=2 * facts.count("linear_num_key_heads") * facts.count("linear_key_head_dim")
        + facts.count("linear_num_value_heads") * facts.count("linear_value_head_dim"),
        element_bytes=_state_bytes(facts, "mamba_ssm_dtype"),
    )
    gate = facts.flag("attn_output_gate", default=True)
    table = read_rotary(facts, size, partial=0.25, mrope=mrope)
    linear = linear_layers(facts)
    experts = facts.optional("num_experts", "n_routed_experts")
    mlp = qwen_experts(facts) if experts else Mlp(width=facts.count("intermediate_size"))
    sparse = sparse_layers(facts) if experts else (False,) * layer_count(facts)
    width = 0 if all(sparse) else facts.count("intermediate_size")
    full = Attention(FULL, heads, kv_heads, size, size, qk_norm=True, output_gate=gate)

    def build(index: int) -> Layer:
        name = layer_name(index)
        modules: list[Module]
        if linear[index]:
            modules = delta_modules(f"{name}.linear_attn", hidden, state, flat=flat)
        else:
            path = f"{name}.self_attn"
            modules = grouped_attention(
                path,
                hidden,
                heads=heads,
                kv_heads=kv_heads,
                size=size,
                qkv_bias=facts.flag("qkv_bias", default=False),
                gate=gate,
                rotary=table,
            ) + head_norms(path, size)
        if sparse[index]:
            modules += expert_modules(
                f"{name}.mlp", hidden, mlp, shared="shared_expert", shared_gate=True
            )
        else:
            modules += mlp_modules(f"{name}.mlp", hidden, width)
        modules += norm(f"{name}.input_layernorm", hidden)
        modules += norm(f"{name}.post_attention_layernorm", hidden)
        mixing = Attention(LINEAR, state=state) if linear[index] else full
        return Layer(mixing, mlp if sparse[index] else Mlp(width=width), tuple(modules))

    return build


def qwen_draft(facts: Facts, build: Build) -> tuple[Layer, ...]:
    """The layers that guess tokens (qwen3_next_mtp.py, qwen3_5_mtp.py): a projection of embedding and
    hidden state, three norms, and decoder layers with full attention; one where the config is silent.
    """
    hidden = facts.count("hidden_size")
    count = facts.count("mtp_num_hidden_layers", "num_nextn_predict_layers", default=1, most=64)
    full = next((at for at, kind in enumerate(linear_layers(facts)) if not kind), -1)
    if full < 0:
        return ()
    around: list[Module] = [
        Linear("mtp.fc", 2 * hidden, (hidden,), COLUMNS, quantizable=False),
        *(Tensor(f"mtp.{title}.weight", hidden) for title in ("norm", "norm_hidden", "norm_embed")),
    ]
    drafts = []
    for at in range(count):
        layer = build(full)
        old, new = layer_name(full), f"mtp.layers.{at}"
        named = [_renamed(module, old, new) for module in layer.modules]
        own = (*around, *named) if at == 0 else tuple(named)
        drafts.append(replace(layer, modules=own))
    return tuple(drafts)


def _renamed(module: Module, old: str, new: str) -> Module:
    if isinstance(module, Rotary | Absorbed) or not module.name.startswith(old):
        return module
    return replace(module, name=new + module.name.removeprefix(old))


def qwen3_5(facts: Facts) -> Build:
    """Qwen 3.5 and 3.6."""
    return qwen3_next(facts, flat=True, mrope=True)


PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def nemotron_h(facts: Facts) -> Build:
    """Nemotron-H: each layer is one of Mamba-2, attention, MLP or experts, with one norm."""
    hidden, size = facts.count("hidden_size"), head_size(facts)
    heads, kv_heads = facts.count("num_attention_heads"), kv_head_count(facts)
    kinds = _pattern(facts)
    state = _mamba_state(facts)
    widths = facts.counts("intermediate_size") if _listed(facts) else ()
    bias, mlp_bias = facts.flag("use_bias", default=False), facts.flag("mlp_bias", default=False)
    mlp = _nemotron_experts(facts) if "moe" in kinds else Mlp()
    attention = Attention(FULL, heads, kv_heads, size, size)

    def build(index: int) -> Layer:
        path, kind = f"model.layers.{index}.mixer", kinds[index]
        tail = norm(f"model.layers.{index}.norm", hidden)
        if kind == "mamba":
            modules = mamba_modules(path, hidden, state, bias=bias, conv_bias=_conv_bias(facts))
            return Layer(Attention(MAMBA, state=state), Mlp(), tuple(modules + tail))
        if kind == "attention":
            with_bias = facts.flag("attention_bias", default=False)
            modules = grouped_attention(
                path,
                hidden,
                heads=heads,
                kv_heads=kv_heads,
                size=size,
                qkv_bias=with_bias,
                o_bias=with_bias,
            )
            return Layer(attention, Mlp(), tuple(modules + tail))
        if kind == "moe":
            modules = _nemotron_moe(path, facts, hidden, mlp)
            return Layer(Attention(NONE), mlp, tuple(modules + tail))
        at = kinds[:index].count("mlp") if len(widths) > 1 else 0
        width = widths[at] if widths else facts.count("intermediate_size")
        modules = mlp_modules(path, hidden, width, gated=False, bias=mlp_bias)
        return Layer(Attention(NONE), Mlp(width=width, gated=False), tuple(modules + tail))

    return build


def _listed(facts: Facts) -> bool:
    return isinstance(facts.data.get("intermediate_size"), list | tuple)


def _conv_bias(facts: Facts) -> bool:
    return facts.flag("use_conv_bias", default=True)


def _pattern(facts: Facts) -> tuple[str, ...]:
    layers = layer_count(facts)
    letters = facts.text("hybrid_override_pattern")
    kinds = facts.words("layers_block_type") or tuple(PATTERN.get(x, "") for x in letters)
    if len(kinds) < layers or not set(kinds) <= set(PATTERN.values()):
        raise facts.wrong("hybrid_override_pattern", f"{layers} letters of M, *, - and E", letters)
    return kinds[:layers]


def _mamba_state(facts: Facts) -> State:
    heads, size = facts.count("mamba_num_heads"), facts.count("mamba_head_dim")
    groups, width = facts.count("n_groups", "mamba_n_groups"), facts.count("ssm_state_size")
    return State(
        heads=heads,
        head_size=size,
        state_size=width,
        key_heads=groups,
        conv_kernel=facts.count("conv_kernel"),
        conv_channels=heads * size + 2 * groups * width,
        element_bytes=_state_bytes(facts, "mamba_ssm_cache_dtype") or FLOAT32,
    )


def _state_bytes(facts: Facts, key: str) -> int:
    """Bytes of an element of a recurrent state; 0: the activations' type."""
    return {"float32": 4, "float16": 2, "bfloat16": 2}.get(facts.text(key), 0)


def mamba_modules(
    name: str, hidden: int, state: State, *, bias: bool, conv_bias: bool
) -> list[Module]:
    """A Mamba-2 mixer (mamba_mixer2.py); a single group is repeated on every rank."""
    inner, groups = state.heads * state.head_size, state.key_heads * state.state_size
    alone = state.key_heads == 1
    return [
        Linear(
            f"{name}.conv1d",
            state.conv_kernel,
            (inner, groups, groups),
            COLUMNS,
            bias=conv_bias,
            quantizable=False,
            repeated=(1, 2) if alone else (),
        ),
        Linear(
            f"{name}.in_proj",
            hidden,
            (inner, inner, groups, groups, state.heads),
            COLUMNS,
            bias=bias,
            repeated=(2, 3) if alone else (),
        ),
        Tensor(f"{name}.A", state.heads, COLUMNS, FLOAT32),
        Tensor(f"{name}.D", state.heads, COLUMNS),
        Tensor(f"{name}.dt_bias", state.heads, COLUMNS),
        Linear(f"{name}.out_proj", inner, (hidden,), ROWS, bias=bias),
        Tensor(f"{name}.norm.weight", inner, COLUMNS),
    ]


def _nemotron_experts(facts: Facts) -> Mlp:
    shared = facts.optional("n_shared_experts")
    return Mlp(
        gated=False,
        experts=facts.count("n_routed_experts"),
        experts_per_token=facts.count("num_experts_per_tok"),
        expert_width=facts.count("moe_intermediate_size"),
        shared_width=shared and shared * facts.count("moe_shared_expert_intermediate_size"),
    )


def _nemotron_moe(path: str, facts: Facts, hidden: int, mlp: Mlp) -> list[Module]:
    latent = facts.optional("moe_latent_size")
    modules = expert_modules(
        path, hidden, mlp, correction=True, expert_hidden=latent, parts=("up_proj", "down_proj")
    )
    if latent:
        modules += [
            Linear(f"{path}.fc1_latent_proj", hidden, (latent,)),
            Linear(f"{path}.fc2_latent_proj", latent, (hidden,)),
        ]
    return modules


def gemma4(facts: Facts) -> Build:
    """Gemma 4: two head sizes, experts beside the MLP, caches that later layers share."""
    hidden, size = facts.count("hidden_size"), head_size(facts)
    layers = layer_count(facts)
    sliding = windows(facts, pattern=6)
    wide_size = facts.optional("global_head_dim") or size
    same = facts.flag("attention_k_eq_v", default=False)
    wide_heads = facts.optional("num_global_key_value_heads") if same else 0
    tables = (
        read_rotary(facts, wide_size, kind="full_attention", label="full"),
        read_rotary(facts, size, kind="sliding_attention", label="near"),
    )
    shared = facts.optional("num_kv_shared_layers", most=layers)
    experts = _gemma4_experts(facts)
    width, bias = facts.count("intermediate_size"), facts.flag("attention_bias", default=False)
    extra = facts.optional("hidden_size_per_layer_input")
    heads, kv_heads = facts.count("num_attention_heads"), kv_head_count(facts)

    def build(index: int) -> Layer:
        name, window = layer_name(index), sliding[index]
        path, own = f"{name}.self_attn", size if window else wide_size
        keys = kv_heads if window else wide_heads or kv_heads
        reads = _source(sliding, index, layers - shared) if shared else -1
        modules = grouped_attention(
            path,
            hidden,
            heads=heads,
            kv_heads=keys,
            size=own,
            qkv_bias=bias,
            o_bias=bias,
            rotary=tables[1 if window else 0],
        )
        if reads >= 0:
            modules[0] = Linear(f"{path}.q_proj", hidden, (heads * own,), COLUMNS, bias=bias)
        modules += head_norms(path, own)
        double = reads >= 0 and facts.flag("use_double_wide_mlp", default=False)
        mlp_width = width * (2 if double else 1)
        modules += mlp_modules(f"{name}.mlp", hidden, mlp_width)
        modules += _gemma4_rest(name, hidden, experts, extra)
        mixing = Attention(
            SLIDING if window else FULL,
            heads,
            keys,
            own,
            own,
            window=window,
            qk_norm=True,
            shares_cache_of=reads,
            keys_are_values=same and not window,
        )
        mlp = Mlp(mlp_width, True, experts.experts, experts.experts_per_token, experts.expert_width)
        return Layer(mixing, mlp, tuple(modules))

    return build


def _source(sliding: tuple[int, ...], index: int, first: int) -> int:
    """The last layer of the same kind before the shared ones, -1 for a layer with its own cache."""
    if index < first:
        return -1
    alike = [at for at in range(first) if bool(sliding[at]) == bool(sliding[index])]
    return alike[-1] if alike else -1


def _gemma4_experts(facts: Facts) -> Mlp:
    count = facts.optional("num_experts", "n_routed_experts")
    if not count:
        return Mlp()
    return Mlp(
        experts=count,
        experts_per_token=facts.count("top_k_experts", "num_experts_per_tok", default=8),
        expert_width=facts.count("moe_intermediate_size", "expert_intermediate_size"),
    )


def _gemma4_rest(name: str, hidden: int, experts: Mlp, extra: int) -> list[Module]:
    modules: list[Module] = [Tensor(f"{name}.layer_scalar", 1)]
    norms = 4
    if experts.experts:
        norms += 3
        modules += [
            Tensor(f"{name}.router.scale", hidden),
            *expert_modules(name, hidden, experts, gate="router.proj"),
        ]
    if extra:
        norms += 1
        modules += [
            Linear(f"{name}.per_layer_input_gate", hidden, (extra,)),
            Linear(f"{name}.per_layer_projection", extra, (hidden,)),
        ]
    return modules + [Tensor(f"{name}.norm{at}.weight", hidden) for at in range(norms)]
