"""What does one forward pass of a model read, multiply and send on one rank?

From the modules of an `Architecture`, so that every family that the planner lays out has latencies
too. Bytes are those of the tensors after loading, repacked as vLLM repacks them; the counts of small
kernels and operators are rules, stated below with what they rest on.

Left out: the input embedding (a token reads one row), norms and biases (kilobytes), the vision tower
(a prompt of text meets none of it), draft models and layers, LoRA adapters.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from rayserve.planner.catalogue import Gpu
from rayserve.planner.kv.caches import layer_caches
from rayserve.planner.speed.latency import Attention, Traffic
from rayserve.planner.speed.rooflines import WeightFormat, Weights
from rayserve.planner.weights import modules
from rayserve.planner.weights.architecture import Architecture
from rayserve.planner.weights.formats import (
    AFTER_HOPPER,
    RELEASE,
    Step,
    Target,
    expert_after,
    expert_steps,
    linear_after,
    linear_steps,
)
from rayserve.planner.weights.modules import (
    Absorbed,
    Embedding,
    Experts,
    Layer,
    Linear,
    Tensor,
    share,
)
from rayserve.planner.weights.storage import FP8, INT8, NVFP4, PACKED, Storage

MIXER_SMALL, MIXER_OPERATORS = 3, 5
"""Of a layer's attention, without norms: rotary, the cache write, the merge of attention's parts; the
host issues two matrix products and attention, and no merge of its own. Counted in the model files; for
recurrent mixers (convolution, gates, state) an assumption."""
DENSE_SMALL, DENSE_OPERATORS = 1, 3
"""Of a dense MLP: the activation; two matrix products besides."""
EXPERT_SMALL, EXPERT_OPERATORS = 6, 9
"""Of experts: the activation, and routing, top-k, sorting and the weighted sum besides."""
BLOCK_VECTORS = 5
"""Hidden vectors that the norm and the residual of an attention or an MLP read and write a token."""
NORM_VECTORS = 2
"""Hidden vectors that each further norm reads and writes."""
WIDTH_VECTORS = 6
"""MLP widths that the activation reads and writes a token, the products' own outputs among them."""
NORM = re.compile(r"norm\w*\.weight$")
INDEX_QUERIES = ".indexer.wq_b"
"""The matrix that makes the queries of sparse attention's indexer, one of each of its heads."""
RECURRENT_PRODUCTS = 2
"""Products of a state and a token: one updates the state, one reads it. Chunked kernels multiply more
for a prompt; against the layer's weights either is a few percent."""


def traffic(
    architecture: Architecture,
    gpu: Gpu,
    *,
    tensor: int = 1,
    expert_ranks: int = 1,
    kv_cache_dtype: str = "auto",
) -> Traffic:
    """What a pass moves on one of `tensor` ranks of this GPU, over all pipeline stages together.

    `expert_ranks`: ranks that share out whole experts; 1 without expert parallelism.

    Raises:
        SpecError: the packing of this KV cache is not known for such a layer.
    """
    rank = _Rank(architecture, gpu, tensor, expert_ranks)
    layers = architecture.layers
    return Traffic(
        weights=_grouped(_weights(rank)),
        attention=_attention(architecture, tensor, kv_cache_dtype),
        hidden=architecture.hidden,
        all_reduces=1 + sum(map(_reduces, layers)) if tensor > 1 else 0,
        small_kernels=sum(_counts(layer, architecture.hidden)[0] for layer in layers),
        operators=sum(_counts(layer, architecture.hidden)[1] for layer in layers),
        activation_bytes_per_token=architecture.element_bytes
        * sum(_activation(layer, architecture.hidden, tensor) for layer in layers),
        element_bytes=architecture.element_bytes,
    )


def fp4_compute(architecture: Architecture, gpu: Gpu) -> bool:
    """Some weights are multiplied in 4 bits, for which no rate is known here: fp8's stands in."""
    formats = architecture.quantization
    storages = (storage for _, storage in formats.groups) if formats is not None else ()
    return any(storage is not None and _in_fp4(storage, gpu) for storage in storages)


@dataclass(frozen=True)
class _Rank:
    """One rank, and the model that it holds a part of."""

    architecture: Architecture
    gpu: Gpu
    tensor: int
    expert_ranks: int

    @property
    def target(self) -> Target:
        return Target(self.gpu.compute_capability, rocm=not self.gpu.nvidia)


# ── weights ─────────────────────────────────────────────────────────────────────────────────────


def _weights(rank: _Rank) -> Iterator[Weights]:
    """Each matrix of the rank by itself."""
    architecture = rank.architecture
    for layer in architecture.layers:
        # MLA's up-projection is multiplied into queries and outputs, in the activations' type.
        absorbed = {one.source.name for one in layer.modules if isinstance(one, Absorbed)}
        for module in layer.modules:
            if isinstance(module, Linear):
                yield _matrix(rank, module, plain=module.name in absorbed)
            elif isinstance(module, Experts):
                yield _experts(rank, module, layer)
    for module in architecture.embedding:
        if isinstance(module, Linear):
            yield _matrix(rank, module)
    head = architecture.embedding[:1] if architecture.tied else architecture.tail
    for module in head:
        if isinstance(module, Embedding):
            size = module.local(rank.tensor) * module.hidden
            bytes_ = size * architecture.element_bytes
            yield Weights("head", WeightFormat.BF16, bytes_, size, sampled_only=True)
        elif isinstance(module, Linear):
            yield replace(_matrix(rank, module), name="head", sampled_only=True)


def _matrix(rank: _Rank, linear: Linear, *, plain: bool = False) -> Weights:
    """One rank's share of a matrix; `plain`: whatever its format in the checkpoint."""
    formats, element = rank.architecture.quantization, rank.architecture.element_bytes
    storage = None
    if formats is not None and linear.quantizable and not plain:
        storage = formats.storage(linear.name, linear.parts)
    inputs, outputs = linear.local(rank.tensor)
    shape = (linear, storage, rank.tensor, element, rank.target)
    size = _kept(linear_steps(*shape), linear_after(*shape))
    return Weights("matrices", _format(storage, rank.gpu), size, inputs * sum(outputs))


def _experts(rank: _Rank, experts: Experts, layer: Layer) -> Weights:
    formats, element = rank.architecture.quantization, rank.architecture.element_bytes
    storage = None
    if formats is not None:
        storage = formats.storage(experts.name, experts.parts, expert=True)
    held = experts.local(rank.tensor, rank.expert_ranks)
    shape = (experts, storage, held, element, rank.target)
    count, width = held
    return Weights(
        "experts",
        _format(storage, rank.gpu),
        _kept(expert_steps(*shape), expert_after(*shape)),
        count * width * experts.hidden * (3 if experts.gated else 2),
        experts=layer.mlp.experts,
        experts_per_token=layer.mlp.experts_per_token,
    )


def _kept(*steps: Iterable[Step]) -> int:
    """Bytes of the tensors that are there after these steps."""
    sizes: dict[str, int] = {}
    for name, size in itertools.chain(*steps):
        if size == RELEASE:
            del sizes[name]
        else:
            sizes[name] = size
    return sum(sizes.values())


def _format(storage: Storage | None, gpu: Gpu) -> WeightFormat:
    """How a matrix stored so is multiplied; what the chip lacks, `rooflines` widens."""
    if storage is None:
        return WeightFormat.BF16
    if storage.kind == FP8 or _in_fp4(storage, gpu):
        return WeightFormat.FP8
    if storage.kind == INT8:
        return WeightFormat.W8A8
    eight = storage.kind == PACKED and storage.bits > 4
    return WeightFormat.W8A16 if eight else WeightFormat.W4A16


def _in_fp4(storage: Storage, gpu: Gpu) -> bool:
    blackwell = gpu.nvidia and gpu.compute_capability >= AFTER_HOPPER
    return storage.kind == NVFP4 and storage.static_input and blackwell


def _grouped(weights: Iterable[Weights]) -> tuple[Weights, ...]:
    """Matrices that are read and multiplied alike, as one: their times add up."""
    sums: dict[Weights, tuple[float, float]] = {}
    for one in weights:
        alike = replace(one, size_bytes=0, parameters=0)
        size, parameters = sums.get(alike, (0.0, 0.0))
        sums[alike] = (size + one.size_bytes, parameters + one.parameters)
    return tuple(
        replace(alike, size_bytes=size, parameters=parameters)
        for alike, (size, parameters) in sums.items()
    )


# ── attention ───────────────────────────────────────────────────────────────────────────────────


def _attention(
    architecture: Architecture, tensor: int, kv_cache_dtype: str
) -> tuple[Attention, ...]:
    """The kinds of attention of the model, each with its number of layers."""
    kinds: Counter[Attention] = Counter()
    seen: dict[modules.Attention, list[Attention]] = {}
    for layer in architecture.layers:
        if layer.attention not in seen:
            seen[layer.attention] = _mixing(architecture, layer, tensor, kv_cache_dtype)
        kinds.update(seen[layer.attention])
    return tuple(replace(kind, layers=count) for kind, count in kinds.items())


def _mixing(
    architecture: Architecture, layer: Layer, tensor: int, kv_cache_dtype: str
) -> list[Attention]:
    """One layer's attention on a rank: what it keeps is what a step reads."""
    own = layer.attention
    if own.kind == modules.NONE:
        return []
    alone = replace(architecture, layers=(layer,), draft=())
    (caches,) = layer_caches(alone, tensor=tensor, pipeline=1, kv_cache_dtype=kv_cache_dtype)
    if own.state is not None:
        return [
            Attention(
                layers=1,
                query_heads=share(own.state.heads, tensor),
                key_dim=RECURRENT_PRODUCTS * own.state.state_size * own.state.head_size,
                value_dim=0,
                kv_bytes_per_token=0,
                window=1,
                state_bytes=sum(caches[0].state_bytes),
            )
        ]
    kind = Attention(
        layers=1,
        query_heads=share(own.heads, tensor),
        key_dim=own.key_size,
        value_dim=own.value_size,
        kv_bytes_per_token=caches[0].token_bytes,
        window=own.window,
        chunked=own.kind == modules.CHUNKED,
    )
    if own.kind != modules.MLA:
        return [kind]
    # While tokens are decoded, queries meet the latent vectors themselves.
    absorbed = replace(kind, step_dim=2 * own.latent_size + own.rope_size)
    if not own.index_topk:
        return [absorbed]
    # Sparse attention does so for prompts too, and only with the tokens that an indexer chose.
    latent = own.latent_size
    chosen = replace(
        absorbed, key_dim=latent + own.rope_size, value_dim=latent, window=own.index_topk
    )
    return [chosen, *(_indexer(layer, cache.token_bytes) for cache in caches[1:])]


def _indexer(layer: Layer, row_bytes: int) -> Attention:
    """What chooses the tokens of sparse attention: whole on every rank, and over the whole context."""
    queries = (
        sum(one.outputs)
        for one in layer.modules
        if isinstance(one, Linear) and one.name.endswith(INDEX_QUERIES)
    )
    return Attention(
        layers=1,
        query_heads=1,
        key_dim=sum(queries) / 2,  # in fp8, at twice the rate of attention's bf16
        value_dim=0,
        kv_bytes_per_token=row_bytes,
    )


# ── what is counted ─────────────────────────────────────────────────────────────────────────────


def _blocks(layer: Layer) -> tuple[bool, bool, bool]:
    """Whether the layer has (a mixer of tokens, a dense MLP, experts)."""
    return layer.attention.kind != modules.NONE, layer.mlp.width > 0, layer.mlp.experts > 0


def _reduces(layer: Layer) -> int:
    """All-reduces of a layer: each block ends in a product whose inputs the ranks share out."""
    return sum(_blocks(layer))


def _norms(layer: Layer, hidden: int) -> tuple[int, int]:
    """(all norms of the layer, those of whole hidden vectors); each is a kernel."""
    widths = [
        module.elements
        for module in layer.modules
        if isinstance(module, Tensor) and NORM.search(module.name) is not None
    ]
    return len(widths), widths.count(hidden)


def _counts(layer: Layer, hidden: int) -> tuple[int, int]:
    """(small kernels, operators that the host issues)."""
    mixer, dense, experts = _blocks(layer)
    norms, _ = _norms(layer, hidden)
    return (
        norms + mixer * MIXER_SMALL + dense * DENSE_SMALL + experts * EXPERT_SMALL,
        norms + mixer * MIXER_OPERATORS + dense * DENSE_OPERATORS + experts * EXPERT_OPERATORS,
    )


def _activation(layer: Layer, hidden: int, tensor: int) -> float:
    """Elements that the small kernels of a layer read and write for a token."""
    mlp = layer.mlp
    width = mlp.width + mlp.experts_per_token * mlp.expert_width + mlp.shared_width
    mixer, dense, experts = _blocks(layer)
    blocks = mixer + (dense or experts)
    further = max(0, _norms(layer, hidden)[1] - blocks)
    vectors = BLOCK_VECTORS * blocks + NORM_VECTORS * further
    return vectors * hidden + WIDTH_VECTORS * width / tensor
