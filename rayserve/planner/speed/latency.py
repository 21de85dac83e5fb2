"""How soon does the first token come, and how fast the next ones?

From a neutral description of what a forward pass reads, multiplies and sends, as sums of terms that
stay apart: weights, KV cache, compute, the kernels between, all-reduces, launches, the host. Each
term has a bound from the hardware's peak rates and an expectation from low to high
(`rayserve.planner.speed.rooflines`); a total is never one number.

What is not modelled: other requests that share a step with a prompt, speculative decoding, expert
parallelism's all-to-all, networks between hosts, and prompts with images.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from rayserve.planner.catalogue import Gpu
from rayserve.planner.speed.collectives import all_reduce, call_us, hop, measured
from rayserve.planner.speed.rooflines import (
    Span,
    WeightFormat,
    Weights,
    attention_multiplying,
    attention_reading,
    independent,
    longest,
    multiplying,
    reading,
    streaming,
)

SMALL_KERNEL_US = (1.5, 4.0)
"""Assumption: a small kernel in a CUDA graph, with the gap to the next. An all-reduce of 1 KiB
between two GPUs, which must wait for the other one too, takes 4.4-5.0 µs there."""
OPERATOR_SHARES = (0.20, 0.75)
"""Time in which a host issues one operator without a graph, against one call of an all-reduce (two
kernels behind the same layers of Python). Low: 9 µs on the host of the A100 tables; a bare launch
takes 4-6 µs. High: 34 µs, the most that fits a published eager step (Llama 2 7B, 12 ms, #1440);
vllm-omni #7960 had about twice as much."""
PIECEWISE_OPERATORS = 3
"""What a host issues for each layer where attention stays outside the graphs: a piece of the graph,
the cache write, attention."""
MOST_STEPS = 64
"""Steps of a prompt that are looked at one by one."""
GRAPH_TOKENS = 512
"""vLLM captures no larger batch by default (max_cudagraph_capture_size)."""


@dataclass(frozen=True)
class Attention:
    """Layers of one kind of attention, on one rank of tensor parallelism, over all stages."""

    layers: int
    query_heads: float
    key_dim: float
    """Size of a head's query and key while a prompt is read."""
    value_dim: float
    kv_bytes_per_token: float
    """Keys and values (or the latent vector) of one layer and token on the rank."""
    window: int = 0
    """Tokens that a token sees; 0: all before it."""
    state_bytes: float = 0.0
    """State of one layer and sequence that each step reads and writes (linear attention, Mamba)."""
    chunked: bool = False
    """A token sees what is before it in its own chunk of `window` tokens."""
    step_dim: float = 0.0
    """Size of a key and a value that a decoded token's query meets, where they are not expanded
    (MLA); 0: `key_dim` and `value_dim`."""

    def seen(self, context_tokens: int) -> float:
        """Tokens that the next token attends to; of a chunk, half of it on average."""
        if not self.window or context_tokens <= self.window:
            return context_tokens
        return self.window / 2 if self.chunked else self.window

    def pairs(self, first: int, count: int) -> float:
        """Pairs of a token and one that it sees, for `count` tokens that follow `first` others."""
        last = first + count
        if self.window and self.chunked:
            return self._chunked_pairs(last) - self._chunked_pairs(first)
        if not self.window or last <= self.window:
            return count * first + count * (count + 1) / 2
        growing = max(0, self.window - first)
        return growing * first + growing * (growing + 1) / 2 + (count - growing) * self.window

    def _chunked_pairs(self, count: int) -> float:
        """Pairs of the first `count` tokens."""
        chunks, rest = divmod(count, self.window)
        return chunks * self.window * (self.window + 1) / 2 + rest * (rest + 1) / 2

    def flops(self, pairs: float) -> float:
        """Multiplications and additions of both products, of all layers, while a prompt is read."""
        return 2 * self.layers * self.query_heads * (self.key_dim + self.value_dim) * pairs

    def step_flops(self, context_tokens: int) -> float:
        """The same for one decoded token."""
        dim = self.step_dim or self.key_dim + self.value_dim
        return 2 * self.layers * self.query_heads * dim * self.seen(context_tokens)

    def read_bytes(self, context_tokens: int) -> float:
        """Bytes that one sequence's step reads from its cache, over all layers."""
        tokens = self.seen(context_tokens)
        return self.layers * (self.kv_bytes_per_token * tokens + 2 * self.state_bytes)


@dataclass(frozen=True)
class Traffic:
    """What one forward pass of a model moves, on one rank, over all pipeline stages together."""

    weights: tuple[Weights, ...]
    """Without the input embedding, of which a token reads one row."""
    attention: tuple[Attention, ...]
    hidden: int
    all_reduces: int
    """All-reduces of a pass: two a layer, one after the embedding; 0 with one rank."""
    small_kernels: int
    """Kernels of a pass that are neither matrix products nor all-reduces."""
    operators: int
    """Operators of a pass that the host issues without graphs, all-reduces left out."""
    activation_bytes_per_token: float
    """Bytes that the small kernels read and write for a token."""
    element_bytes: int = 2


@dataclass(frozen=True)
class Host:
    """Time (low, high) that the engine's processes add, in ms.

    step    a step's scheduling and sampling that the GPU waits for. vLLM's V1 engine schedules the
            next step while this one runs; assumption: 0.2-1.5
    request HTTP, templates, tokenizer, queues and the first event on its way back, 3-30: what is
            left of published TTFTs of very short or cached prompts (A100, H100; 10 and 33 ms)
    """

    step_ms: tuple[float, float] = (0.2, 1.5)
    request_ms: tuple[float, float] = (3.0, 30.0)


V1_SYNC_HOST = Host(step_ms=(0.5, 4.0))
"""The V1 engine without asynchronous scheduling (0.8-0.10): the GPU waits for all of a step's host
work (assumption)."""
V0_HOST = Host(step_ms=(1.0, 10.0))
"""The V0 engine: for 38 % of the time on the GPU, 29 % went to scheduling and 33 % to HTTP before
0.6.0, as its authors profiled Llama 3 8B on an H100, where the GPU needs about 6 ms a step."""


@dataclass(frozen=True)
class Setting:
    """On what, and how, the model runs."""

    gpu: Gpu
    step_tokens: int
    """max_num_batched_tokens: a longer prompt is read in several steps."""
    tensor: int = 1
    pipeline: int = 1
    graphs: bool = True
    attention_in_graphs: bool = True
    """Steps that only decode run as one graph (vLLM's FULL_AND_PIECEWISE, default from 0.11)."""
    graph_tokens: int = GRAPH_TOKENS
    """Largest captured batch; larger ones run without a graph."""
    block_tokens: int = 16
    """The prefix cache keeps whole blocks."""
    host: Host = field(default_factory=Host)
    offload: Span = field(default_factory=Span)
    """What every pass waits for weights that stay in host memory."""


@dataclass(frozen=True)
class Estimate:
    """A latency in ms: its terms, one after the other."""

    terms: dict[str, Span]

    @property
    def total(self) -> Span:
        """All terms; their errors have different causes and add up in quadrature."""
        return independent(*self.terms.values())

    @property
    def limited_by(self) -> str:
        """The largest term."""
        return max(self.terms, key=lambda name: self.terms[name].middle)


def tpot(traffic: Traffic, setting: Setting, batch: int, context_tokens: int) -> Estimate:
    """Time per output token while `batch` sequences of that many tokens are decoded.

    With pipeline stages the batch is split among them, and a token passes all stages.
    """
    part = -(-batch // setting.pipeline)
    work = [
        (
            layers,
            layers.step_flops(context_tokens) * part,
            layers.read_bytes(context_tokens) * part,
        )
        for layers in traffic.attention
    ]
    captured = setting.graphs and part <= setting.graph_tokens
    outside = _outside(traffic, captured=captured, whole=setting.attention_in_graphs)
    terms = _step(traffic, setting, (part, part), work, outside)
    terms["host"] = Span(0.0, *setting.host.step_ms)
    return Estimate(terms)


def ttft(
    traffic: Traffic, setting: Setting, prompt_tokens: int, *, cached_tokens: int = 0
) -> Estimate:
    """Time to the first token of a prompt that has the engine to itself.

    The tokens that the prefix cache does not hold are read in steps of `step_tokens`. Stages of a
    pipeline work on different steps at the same time: perfectly in the low, not at all in the high.
    """
    first = reused(prompt_tokens, cached_tokens, setting)
    terms: dict[str, Span] = {}
    steps = 0
    for start, count, alike in _chunks(first, prompt_tokens, setting.step_tokens):
        for name, span in _prefill(traffic, setting, start, count).items():
            terms[name] = terms.get(name, Span()) + span * alike
        steps += alike
    if setting.pipeline > 1:
        overlap = (steps + setting.pipeline - 1) / (steps * setting.pipeline)
        terms = {
            name: Span(span.bound * overlap, span.low * overlap, span.high)
            for name, span in terms.items()
        }
    terms["host"] = Span(0.0, *setting.host.step_ms) * steps + Span(0.0, *setting.host.request_ms)
    return Estimate(terms)


def _chunks(first: int, last: int, step_tokens: int) -> Iterator[tuple[int, int, int]]:
    """The steps that read tokens `first` to `last`: (first token, tokens, how many are alike).

    What a step takes grows in proportion to what is before it, so that of many steps the middle one
    stands for its neighbours.
    """
    whole, rest = divmod(last - first, step_tokens)
    group = max(1, -(-whole // MOST_STEPS))
    for at in range(0, whole, group):
        alike = min(group, whole - at)
        yield first + step_tokens * at + step_tokens * (alike - 1) // 2, step_tokens, alike
    if rest:
        yield first + step_tokens * whole, rest, 1


def chunk(traffic: Traffic, setting: Setting, tokens: int) -> Estimate:
    """One step that reads so many tokens of a prompt: what a running answer waits for."""
    return Estimate(_prefill(traffic, setting, 0, tokens))


def reused(prompt_tokens: int, cached_tokens: int, setting: Setting) -> int:
    """Tokens of a prompt that need not be read again: whole blocks, and never the last token."""
    block = setting.block_tokens
    return max(0, min(cached_tokens, prompt_tokens - 1)) // block * block


def eager_price(traffic: Traffic, setting: Setting, batch: int, context_tokens: int) -> Span:
    """What `--enforce-eager` costs a token, in ms (the bound is 0: a fast host may hide it)."""
    graphs, eager = (
        tpot(traffic, replace(setting, graphs=wanted), batch, context_tokens).total
        for wanted in (True, False)
    )
    return Span(0.0, max(0.0, eager.low - graphs.low), max(0.0, eager.high - graphs.high))


def notes(traffic: Traffic, setting: Setting) -> tuple[str, ...]:
    """What makes the estimate less certain than its range says, in whole sentences."""
    gpu = setting.gpu
    formats = {weights.format for weights in traffic.weights}
    found = []
    if not measured(gpu, setting.tensor):
        found.append(
            f"Nobody measured vLLM's all-reduce between {setting.tensor} {gpu.name}: its time is put "
            "together from assumed latencies and shares of the link's bandwidth."
        )
    if WeightFormat.FP8 in formats and not gpu.fp8_tflops:
        found.append(f"{gpu.name} has no fp8 units: fp8 weights save memory traffic, not compute.")
    if formats & {WeightFormat.W4A16, WeightFormat.W8A16}:
        found.append("Shares of 4- and 8-bit kernels come from TensorRT-LLM, not vLLM's Marlin.")
    if gpu.label != "A100":
        found.append("Shares of the memory bandwidth were measured on the A100 and taken over.")
    if gpu.matmul_fraction is None:
        found.append(f"What a matrix product reaches of {gpu.name}'s peak was not measured.")
    if not setting.graphs:
        found.append("Without CUDA graphs the host decides, and hosts differ by more than twice.")
    return tuple(found)


_Work = tuple[Attention, float, float]
"""Layers, their FLOPs and the bytes that they read in a step."""


def _prefill(traffic: Traffic, setting: Setting, first: int, count: int) -> dict[str, Span]:
    """The terms of one step that reads `count` tokens of a prompt after `first` others."""
    work: list[_Work] = [
        (layers, layers.flops(layers.pairs(first, count)), layers.read_bytes(first))
        for layers in traffic.attention
    ]
    captured = setting.graphs and count <= setting.graph_tokens
    outside = _outside(traffic, captured=captured, whole=False)
    return _step(traffic, setting, (count, 1), work, outside)


def _outside(traffic: Traffic, *, captured: bool, whole: bool) -> tuple[int, int]:
    """(operators, all-reduces) of a pass that the host issues outside of graphs."""
    if not captured:
        return traffic.operators, traffic.all_reduces
    layers = sum(layers.layers for layers in traffic.attention)
    return (0 if whole else PIECEWISE_OPERATORS * layers), 0


def _step(
    traffic: Traffic,
    setting: Setting,
    counts: tuple[int, int],
    work: Iterable[_Work],
    outside: tuple[int, int],
) -> dict[str, Span]:
    """The terms of a forward pass of (tokens, sampled tokens).

    What limits a matrix product names its term.
    """
    gpu, (tokens, sampled), (operators, calls) = setting.gpu, counts, outside
    terms = {"weights": Span(), "kv": Span(), "compute": Span()}
    for weights in traffic.weights:
        rows = sampled if weights.sampled_only else tokens
        read, multiply = reading(weights, gpu, rows), multiplying(weights, gpu, rows)
        name = "weights" if read.middle >= multiply.middle else "compute"
        terms[name] += longest(read, multiply)
    for _, flops, read_bytes in work:
        read, multiply = attention_reading(read_bytes, gpu), attention_multiplying(flops, gpu)
        name = "kv" if read.middle >= multiply.middle else "compute"
        terms[name] += longest(read, multiply)
    message = tokens * traffic.hidden * traffic.element_bytes
    terms["activations"] = streaming(tokens * traffic.activation_bytes_per_token, gpu)
    reduce = all_reduce(gpu, setting.tensor, message, graphs=not calls)
    terms["allreduce"] = reduce * traffic.all_reduces
    if setting.offload.high:
        terms["offload"] = setting.offload
    if setting.pipeline > 1:
        terms["pipeline"] = hop(gpu, message) * (setting.pipeline - 1)
    low_us, high_us = SMALL_KERNEL_US
    terms["launch"] = Span(0.0, low_us / 1e3, high_us / 1e3) * traffic.small_kernels
    terms["launch"] += _waiting(gpu, operators, calls, independent(*terms.values()))
    return terms


def _waiting(gpu: Gpu, operators: int, calls: int, busy: Span) -> Span:
    """How long the GPU waits for a host that issues operators and all-reduces one by one.

    The host runs ahead while the GPU is busy, so only what it needs beyond that counts.
    """
    low_us, high_us = call_us(gpu)
    low = (OPERATOR_SHARES[0] * operators + calls) * low_us
    high = (OPERATOR_SHARES[1] * operators + calls) * high_us
    return Span(0.0, max(0.0, low / 1e3 - busy.middle), max(0.0, high / 1e3 - busy.middle))
