"""What does `--enforce-eager` cost a token?

With a config.json that the planner can lay out and a GPU of the catalogue, the planner's own latency
with graphs and without; else the part that needs no model: its all-reduces.
"""

from __future__ import annotations

from typing import Any

from rayserve.planner.catalogue import Gpu, gpus
from rayserve.planner.convert.draft import Draft, Setting
from rayserve.planner.speed import latency
from rayserve.planner.speed.collectives import all_reduce, call_us, measured
from rayserve.planner.speed.traffic import traffic
from rayserve.planner.weights.architecture import Architecture

CONTEXT_TOKENS = 4096
"""Of the one sequence that the price is told for."""
REDUCES_PER_LAYER = 2
"""After attention and after the MLP."""
MOST_LAYERS, MOST_HIDDEN = 1000, 1 << 20
LLAMA_405B = (126, 16384)
"""Layers and hidden size where config.json is not given."""
ELEMENT_BYTES = 2
MEASURED_ON = "A100-80GB-SXM"
"""The GPU of the price where none is named."""
SOURCES = "AIConfigurator's tables; vllm#45709; vllm#7567"


def judge_eager(draft: Draft, setting: Setting, architecture: Architecture | None) -> None:
    """The price of a token without CUDA graphs, and what it does not buy."""
    gpu = draft.context.gpu
    tensor = draft.get("parallelism.tensor", 1)
    if gpu is not None and architecture is not None and architecture.element_bytes == ELEMENT_BYTES:
        cost, certainty = _whole(draft, architecture, gpu), "computed"
    elif tensor > 1:
        cost, certainty = _reduces(draft.context.config, tensor, gpu), "computed"
    else:
        cost = (
            "the launch of every kernel of every layer on every token: a 7B model went from 13 ms a token "
            "to 22 ms on one A800 (vllm-omni#7960)"
        )
        certainty = "reported"
    draft.find(
        "warning",
        "aim",
        setting,
        f"{setting.written} slows every token, and for one user does not shorten the first",
        why=f"it costs {cost}. The first token of one user took 22.24 ms with graphs and 22.16 ms without "
        "(vllm#45709; with 4 and 8 users at once graphs made it 13 % and 20 % longer there), and prompts "
        "above 512 tokens are not in graphs anyway. It saves 0.1 to 2 GiB and start time",
        do="remove `cuda_graphs: false`; a small max_num_seqs keeps graphs few",
        certainty=certainty,
        source=SOURCES,
    )


def _whole(draft: Draft, architecture: Architecture, gpu: Gpu) -> str:
    """The planner's latency of one sequence, without graphs less with them."""
    tensor = draft.get("parallelism.tensor", 1)
    experts = draft.get("engine_args.enable_expert_parallel")
    moved = traffic(
        architecture,
        gpu,
        tensor=tensor,
        expert_ranks=tensor if experts else 1,
        kv_cache_dtype=str(draft.get("precision.kv_cache_dtype", "auto")),
    )
    held = latency.Setting(
        gpu=gpu,
        step_tokens=gpu.step_tokens,
        tensor=tensor,
        pipeline=draft.get("parallelism.pipeline", 1),
    )
    price = latency.eager_price(moved, held, 1, CONTEXT_TOKENS)
    return (
        f"{price.low:.1f} to {price.high:.1f} ms on every token of one sequence of {CONTEXT_TOKENS} "
        f"tokens on {gpu.name}, by the planner's latency"
    )


def _reduces(config: Any, tensor: int, named: Gpu | None) -> str:
    """The host's time for each all-reduce, less the GPU's in a graph."""
    layers, hidden = config.get("num_hidden_layers"), config.get("hidden_size")
    known = isinstance(layers, int) and 0 < layers < MOST_LAYERS
    layers = layers if known else LLAMA_405B[0]
    fitting = isinstance(hidden, int) and 0 < hidden < MOST_HIDDEN
    hidden = hidden if fitting else LLAMA_405B[1]
    gpu = named or gpus()[MEASURED_ON]
    calls = REDUCES_PER_LAYER * layers
    graph = all_reduce(gpu, tensor, hidden * ELEMENT_BYTES, graphs=True)
    low_us, high_us = call_us(gpu)
    low = max(0.0, low_us / 1e3 - graph.high) * calls
    high = max(0.0, high_us / 1e3 - graph.low) * calls
    model = f"{layers} layers" + ("" if known else ", as Llama-3.1-405B has")
    basis = "measured" if measured(gpu, tensor) else "put together from assumed latencies"
    return (
        f"{low:.1f} to {high:.1f} ms on every token with {model}, for {calls} all-reduces over {tensor} "
        f"{gpu.name} alone ({basis}): the host takes {_between(low_us, high_us)} µs for each, the GPU in "
        f"a graph {_between(graph.low * 1e3, graph.high * 1e3)} µs. Where the GPUs compute longer than the "
        "host takes, less of it is seen, and other kernels' launches come on top: --config CONFIG.JSON with "
        "--gpu computes the whole token"
    )


def _between(low: float, high: float) -> str:
    return f"{low:.0f}" if round(low) == round(high) else f"{low:.0f} to {high:.0f}"
