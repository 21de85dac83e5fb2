"""Of which pieces is a model built, and what of each does one rank of a tensor group hold?

Pieces are named as vLLM names its modules ("model.layers.0.self_attn.qkv_proj"), with the names of
the matrices in the checkpoint that a fused one is made of, because lists of modules that stay
unquantized speak of those. Sizes are in elements, before any cut.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayserve.units import round_up

WHOLE, COLUMNS, ROWS = "whole", "columns", "rows"
"""Every rank holds all of it; a share of the outputs; a share of the inputs."""
FULL, SLIDING, CHUNKED, MLA, LINEAR, MAMBA, NONE = (
    "full",
    "sliding",
    "chunked",
    "mla",
    "linear",
    "mamba",
    "none",
)
VOCAB_PADDING = 64
"""DEFAULT_VOCAB_PADDING_SIZE of vllm/model_executor/layers/vocab_parallel_embedding.py."""


def share(size: int, ranks: int) -> int:
    """One rank's part; rounded up where it does not divide (vLLM then refuses to start)."""
    return -(-size // ranks)


def local_kv_heads(kv_heads: int, tensor: int) -> int:
    """KV heads on a rank: at least one, so they are replicated beyond one rank a head."""
    return max(1, kv_heads // tensor)


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix of outputs x inputs, possibly several fused along the outputs."""

    name: str
    inputs: int
    outputs: tuple[int, ...]
    cut: str = WHOLE
    parts: tuple[str, ...] = ()
    """Last component of the name of each fused matrix in the checkpoint."""
    bias: bool = False
    kv_heads: int = 0
    """Heads of the second and third output, which are replicated rather than cut below one."""
    quantizable: bool = True
    element_bytes: int = 0
    """Of an unquantized weight; 0: the activations' type."""
    repeated: tuple[int, ...] = ()
    """Outputs, by their place, that every rank of a column cut holds whole."""

    def local(self, tensor: int) -> tuple[int, tuple[int, ...]]:
        """Inputs and outputs of the share of one of `tensor` ranks."""
        if self.cut == ROWS:
            return share(self.inputs, tensor), self.outputs
        if self.cut == WHOLE:
            return self.inputs, self.outputs
        if self.kv_heads:
            heads = local_kv_heads(self.kv_heads, tensor)
            kept = (size // self.kv_heads * heads for size in self.outputs[1:])
            return self.inputs, (share(self.outputs[0], tensor), *kept)
        return self.inputs, tuple(
            size if at in self.repeated else share(size, tensor)
            for at, size in enumerate(self.outputs)
        )


@dataclass(frozen=True, slots=True)
class Tensor:
    """A parameter or buffer that no quantization touches: a norm, a position table, sinks."""

    name: str
    elements: int
    cut: str = WHOLE
    element_bytes: int = 0
    """0: the activations' type."""

    def local(self, tensor: int) -> int:
        """Elements on one of `tensor` ranks."""
        return self.elements if self.cut == WHOLE else share(self.elements, tensor)


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of a layer: two stacked matrices, gate and up fused."""

    name: str
    count: int
    hidden: int
    width: int
    gated: bool = True
    bias: bool = False
    parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")

    def local(self, tensor: int, expert_ranks: int) -> tuple[int, int]:
        """Experts and their width on a rank: whole experts with expert parallelism, else slices."""
        if expert_ranks > 1:
            return share(self.count, expert_ranks), self.width
        return self.count, share(self.width, tensor)


@dataclass(frozen=True, slots=True)
class Rotary:
    """The table of cosines and sines; layers with equal ones share it (`_ROPE_DICT`)."""

    positions: int
    size: int
    label: str = ""
    """Tells tables of the same shape but other frequencies apart."""
    element_bytes: int = 0
    in_transformers: tuple[int, int] = (0, 0)
    """From this vLLM version the family runs through Transformers, which keeps no such table."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows of the vocabulary; the output head too."""

    name: str
    vocab: int
    hidden: int
    bias: bool = False

    def local(self, tensor: int) -> int:
        """Rows on one of `tensor` ranks: the padded vocabulary is cut evenly."""
        return share(round_up(self.vocab, VOCAB_PADDING), tensor)


@dataclass(frozen=True, slots=True)
class Absorbed:
    """What MLA derives from its projections after loading.

    `split_kv_b_proj` of vllm/model_executor/layers/attention/mla_attention.py: an unquantized weight
    is only viewed, a quantized one is expanded into the activations' type.
    """

    name: str
    source: Linear
    """`kv_b_proj`."""
    queries: Linear
    output: Linear
    heads: int
    latent: int
    rope: int


Module = Linear | Tensor | Experts | Rotary | Embedding | Absorbed


@dataclass(frozen=True, slots=True)
class State:
    """What a linear-attention or Mamba-2 layer keeps of a sequence."""

    heads: int
    head_size: int
    state_size: int
    """Gated delta net: size of a key head; Mamba-2: `ssm_state_size`."""
    key_heads: int
    """Gated delta net: heads of queries and keys; Mamba-2: groups."""
    conv_kernel: int
    conv_channels: int
    """Channels of the convolution before the cut over ranks."""
    element_bytes: int = 0
    """Of the recurrent state; 0: the activations' type."""


@dataclass(frozen=True, slots=True)
class Attention:
    """How a layer mixes tokens, and so what it keeps of them."""

    kind: str
    heads: int = 0
    kv_heads: int = 0
    key_size: int = 0
    value_size: int = 0
    window: int = 0
    """Tokens of a sliding window or of a chunk; 0: the whole context."""
    latent_size: int = 0
    rope_size: int = 0
    index_size: int = 0
    """Elements of a token's key in a sparse indexer's cache."""
    index_topk: int = 0
    """Tokens that sparse attention sees; 0: all. A layer without an indexer takes another's choice."""
    shares_cache_of: int = -1
    """Layer whose cache this one reads; -1: its own."""
    keys_are_values: bool = False
    qk_norm: bool = False
    output_gate: bool = False
    sinks: bool = False
    state: State | None = None


@dataclass(frozen=True, slots=True)
class Mlp:
    """How a layer transforms each token."""

    width: int = 0
    """Of a dense MLP; 0 where there are only experts."""
    gated: bool = True
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    shared_width: int = 0


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer."""

    attention: Attention
    mlp: Mlp
    modules: tuple[Module, ...]


def cache_scales(name: str) -> list[Module]:
    """Scales of keys, values, queries and probabilities, which every attention layer holds.

    `set_default_quant_scales` of vllm/model_executor/layers/attention/attention.py.
    """
    return [
        Tensor(f"{name}._{title}_scale", 1, element_bytes=4) for title in ("k", "v", "q", "prob")
    ]


def norm(name: str, size: int, *, bias: bool = False) -> list[Module]:
    """An RMSNorm, or with `bias` a LayerNorm."""
    tensors: list[Module] = [Tensor(f"{name}.weight", size)]
    if bias:
        tensors.append(Tensor(f"{name}.bias", size))
    return tensors


def mlp_modules(
    name: str,
    hidden: int,
    width: int,
    *,
    gated: bool = True,
    bias: bool = False,
    names: tuple[str, str] = ("up_proj", "down_proj"),
) -> list[Module]:
    """A dense MLP: gate and up fused and cut by outputs, down cut by inputs."""
    up = Linear(f"{name}.{names[0]}", hidden, (width,), COLUMNS, bias=bias)
    if gated:
        up = Linear(
            f"{name}.gate_up_proj",
            hidden,
            (width, width),
            COLUMNS,
            parts=("gate_proj", "up_proj"),
            bias=bias,
        )
    return [up, Linear(f"{name}.{names[1]}", width, (hidden,), ROWS, bias=bias)]
