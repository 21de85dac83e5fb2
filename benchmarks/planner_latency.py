"""Do published latencies of vLLM lie in the ranges that the planner gives?

    python -m benchmarks.planner_latency [--json OUT.json]

One row a published figure: measured, the bound, the expected range, whether it is inside, the error
of the range's middle. No constant is fitted to a row; where a row was looked at when a constant was
chosen, the row says so and is left out of the summary "not looked at". A range that is always right
because it is wide is worth nothing, so its width is printed too. Exit code 1: a bar is missed.

Three kinds of published rows are not here, because the load that made them is not known: throughput
of many requests, latencies under queues (Llama-3.1-405B on 8 MI300X), synthesized pages. Nor are
runs whose reporter calls them faulty (Qwen3-14B-AWQ, vllm #20469).

The sweeps of tt-inference-server #340 and #356 reuse one seed with the prefix cache on, so a longer
prompt seems to begin with the last shorter one: R1's prompts of 1, 2, 3 and 4 thousand tokens all
take 105-132 ms, and the one of 8192 on an A100 would else need more than the chip's peak. Their
rows therefore say what was probably cached; this is a reading, not a published fact.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.planner_bars import Bar, write_part
from rayserve.planner.catalogue import gpus
from rayserve.planner.speed.latency import (
    V0_HOST,
    V1_SYNC_HOST,
    Attention,
    Estimate,
    Host,
    Setting,
    Traffic,
    tpot,
    ttft,
)
from rayserve.planner.speed.rooflines import Span, WeightFormat, Weights

DENSE_SMALL, DENSE_OPERATORS = 6, 10
"""A dense layer: two norms, rotary, cache write, activation, merge of attention's parts; with the
four matrix products and attention for the host's part."""
EXPERT_SMALL, EXPERT_OPERATORS = 11, 16
"""A layer of experts: routing, top-k, sorting and the weighted sum besides."""
BF16 = WeightFormat.BF16
BYTES = dict.fromkeys(WeightFormat, 1.0) | {WeightFormat.W4A16: 0.52, BF16: 2.0}
"""Bytes a weight: 4 bits with a bf16 scale and zero for each group of 128."""
INSIDE_BAR = 0.60
ERROR_BAR = 0.20
"""Bars of the rows that no constant was chosen by: share inside, median error of the middle."""


@dataclass(frozen=True)
class Model:
    """Shapes of a decoder whose layers are alike."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    head_dim: int = 128
    format: WeightFormat = BF16
    attention_format: WeightFormat | None = None
    experts: int = 0
    experts_per_token: int = 0
    shared_width: int = 0
    dense_layers: int = 0
    dense_width: int = 0
    latent: tuple[int, int, int, int, int] | None = None
    """MLA: ranks of queries and keys, sizes of a head without position, with it, of a value."""


LLAMA_405B = Model(126, 16384, 128, 8, 53248, 128256)
LLAMA_405B_FP8 = Model(
    126, 16384, 128, 8, 53248, 128256, format=WeightFormat.FP8, attention_format=BF16
)
LLAMA_70B = Model(80, 8192, 64, 8, 28672, 128256)
LLAMA_8B = Model(32, 4096, 32, 8, 14336, 128256)
QWEN_72B = Model(80, 8192, 64, 8, 29568, 152064)
QWEN_32B = Model(64, 5120, 40, 8, 27648, 152064)
QWEN3_06B = Model(28, 1024, 16, 8, 3072, 151936)
QWEN3_17B = Model(28, 2048, 16, 8, 6144, 151936)
QWEN3_4B_FP8 = Model(36, 2560, 32, 8, 9728, 151936, format=WeightFormat.FP8)
QWEN3_8B = Model(36, 4096, 32, 8, 12288, 151936)
GEMMA3_4B = Model(34, 2560, 8, 4, 10240, 262208, head_dim=256)  # windows matter little here
GPT_OSS_120B = Model(
    36, 2880, 64, 8, 2880, 201088, head_dim=64, format=WeightFormat.W4A16, attention_format=BF16,
    experts=128, experts_per_token=4,
)  # fmt: skip
YI_34B = Model(60, 7168, 56, 8, 20480, 64000)
QWEN3_30B = Model(48, 2048, 32, 4, 768, 151936, experts=128, experts_per_token=8)
R1_AWQ = Model(
    61, 7168, 128, 128, 2048, 129280, format=WeightFormat.W4A16, experts=256, experts_per_token=8,
    shared_width=2048, dense_layers=3, dense_width=18432, latent=(1536, 512, 128, 64, 128),
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One setup whose figures somebody published."""

    name: str
    source: str
    model: Model
    setting: Setting
    tpots: tuple[tuple[int, int, float], ...] = ()
    """(batch, context, measured ms)."""
    ttfts: tuple[tuple[int, int, float], ...] = ()
    """(prompt, cached, measured ms)."""
    survey: bool = False
    """In the survey that the planner was built on."""
    looked_at: bool = False
    """The row was known when constants were chosen."""


def setting(
    gpu: str,
    tensor: int,
    step_tokens: int,
    *,
    host: Host | None = None,
    piecewise: bool = False,
) -> Setting:
    """A setting on a GPU of the catalogue."""
    return Setting(
        gpu=gpus()[gpu],
        step_tokens=step_tokens,
        tensor=tensor,
        attention_in_graphs=not piecewise,
        host=V1_SYNC_HOST if piecewise else host or Host(),
    )


A100, H100 = "A100-80GB-SXM", "H100-80GB-SXM"
RUNS = (
    Run("Llama-3.1-405B-FP8, 8 H100, 0.6.3", "dstackai/benchmarks 06c957ab", LLAMA_405B_FP8,
        setting(H100, 8, 512, host=V0_HOST),
        tpots=((4, 1152, 34.8), (8, 1152, 36.6), (16, 1152, 37.0), (32, 1152, 38.3),
               (64, 1152, 60.0)), survey=True, looked_at=True),
    Run("Llama-3.3-70B, 4 H100, 0.6", "vllm #12101", LLAMA_70B,
        setting(H100, 4, 8192, host=V0_HOST), tpots=((1, 1052, 18.7),), ttfts=((1052, 0, 135.0),),
        survey=True, looked_at=True),
    Run("Qwen2.5-72B, 2 H100", "tt-inference-server #143", QWEN_72B,
        setting(H100, 2, 8192, piecewise=True),
        tpots=((1, 1024, 30.9),), ttfts=((128, 0, 41.0), (1024, 0, 129.0), (4096, 0, 505.0),
                                         (8192, 0, 1064.0)), survey=True, looked_at=True),
    Run("DeepSeek-R1-AWQ, 8 H100", "tt-inference-server #356", R1_AWQ,
        setting(H100, 8, 8192, piecewise=True),
        tpots=((1, 128, 16.1),), ttfts=((128, 0, 47.0), (1024, 128, 105.0), (4096, 3072, 120.0),
                                        (8192, 4096, 242.0)), survey=True, looked_at=True),
    Run("Qwen3-30B-A3B, 1 A100", "tt-inference-server #340", QWEN3_30B,
        setting(A100, 1, 2048, piecewise=True),
        tpots=((1, 1024, 9.6),), ttfts=((128, 0, 36.0), (1024, 128, 70.0), (8192, 4096, 227.0)),
        survey=True, looked_at=True),
    Run("Llama-3.1-8B, 1 A100, 0.31", "start-up and benchmark log", LLAMA_8B,
        setting(A100, 1, 2048), tpots=((1, 2035, 11.5),),
        ttfts=((2035, 0, 182.0), (2035, 2035, 45.0)), survey=True, looked_at=True),
    Run("Llama-3.1-70B, 2 A100 PCIe", "vllm #7567", LLAMA_70B,
        setting("A100-80GB-PCIe", 2, 2048, host=V0_HOST), tpots=((1, 512, 58.8),),
        survey=True, looked_at=True),
    Run("QwQ-32B, 2 A100, 0.7.2", "vllm #16300", QWEN_32B, setting(A100, 2, 2048, host=V0_HOST),
        tpots=((1, 100, 27.5), (16, 100, 30.4)), looked_at=True),
    Run("QwQ-32B, 4 A100, 0.7.2", "vllm #16300", QWEN_32B, setting(A100, 4, 2048, host=V0_HOST),
        tpots=((1, 100, 19.6), (16, 100, 23.9)), looked_at=True),
    Run("QwQ-32B, 8 A100, 0.7.2", "vllm #16300", QWEN_32B, setting(A100, 8, 2048, host=V0_HOST),
        tpots=((1, 100, 15.8), (16, 100, 21.3)), looked_at=True),
    Run("Qwen3-1.7B, 1 A100", "tt-inference-server #340", QWEN3_17B,
        setting(A100, 1, 2048, piecewise=True),
        tpots=((1, 192, 4.6), (1, 1088, 4.8), (1, 2112, 5.0)),
        ttfts=((128, 0, 11.4), (1024, 128, 26.4), (2048, 1024, 30.9)), looked_at=True),
    Run("Qwen3-0.6B, 1 A100", "tt-inference-server #340", QWEN3_06B,
        setting(A100, 1, 2048, piecewise=True),
        tpots=((1, 192, 4.2), (1, 1088, 4.4)),
        ttfts=((128, 0, 12.4), (1024, 128, 21.0)), looked_at=True),
    Run("Qwen3-4B-FP8, 1 RTX 4090, 0.19", "club-3090 #697", QWEN3_4B_FP8,
        setting("RTX-4090-24GB", 1, 8192), tpots=((1, 500, 7.22),), ttfts=((30, 0, 13.0),)),
    Run("Qwen3-8B, 1 RTX 4090, 2026", "llmfit #1046", QWEN3_8B, setting("RTX-4090-24GB", 1, 2048),
        tpots=((1, 300, 17.04),)),
    Run("gpt-oss-120b, 8 H100, 2026", "InferenceX #828", GPT_OSS_120B, setting(H100, 8, 8192),
        tpots=((4, 1536, 3.72), (8, 1536, 4.05), (16, 1536, 4.83), (32, 1536, 5.82))),
    Run("Gemma-3-4B, 1 A100, 0.10", "tt-inference-server #521", GEMMA3_4B,
        setting(A100, 1, 2048, piecewise=True),
        tpots=((1, 192, 8.4), (1, 1088, 10.8), (1, 2112, 10.1)),
        ttfts=((128, 0, 16.8), (1024, 0, 62.7), (2048, 0, 107.7), (4096, 0, 208.0)),
        looked_at=True),
    Run("Yi-34B, 1 A100, early 2024", "vllm #2404", YI_34B, setting(A100, 1, 4096, host=V0_HOST),
        tpots=((1, 2735, 47.8),), ttfts=((2649, 0, 1058.0),), looked_at=True),
)  # fmt: skip


def traffic(model: Model, tensor: int) -> Traffic:
    """What a forward pass of the model moves on one of `tensor` ranks."""
    expert_layers = model.layers - model.dense_layers if model.experts else 0
    attention, layers = _attention(model, tensor)
    width = model.intermediate if not model.experts else model.dense_width
    dense = 3 * model.hidden * width / tensor * (model.layers - expert_layers)
    shared = 3 * model.hidden * model.shared_width / tensor * expert_layers
    routed = 3 * model.hidden * model.intermediate * model.experts / tensor * expert_layers
    router = model.hidden * model.experts * expert_layers
    weights = [
        _weights("attention", model.attention_format or model.format, attention),
        _weights("mlp", model.format, dense + shared),
        _weights("router", BF16, router),
        _weights("head", BF16, model.vocab * model.hidden / tensor, sampled_only=True),
        _weights("experts", model.format, routed, model.experts, model.experts_per_token),
    ]
    active = model.intermediate * model.experts_per_token + model.shared_width
    widths = width * (model.layers - expert_layers) + active * expert_layers
    dense_layers = model.layers - expert_layers
    return Traffic(
        weights=tuple(item for item in weights if item.parameters),
        attention=(layers,),
        hidden=model.hidden,
        all_reduces=2 * model.layers + 1 if tensor > 1 else 0,
        small_kernels=DENSE_SMALL * dense_layers + EXPERT_SMALL * expert_layers,
        operators=DENSE_OPERATORS * dense_layers + EXPERT_OPERATORS * expert_layers,
        # norms and residuals read and write 10 hidden vectors a layer, the activation 6 widths
        activation_bytes_per_token=2 * (10 * model.hidden * model.layers + 6 * widths / tensor),
    )


def main(arguments: Sequence[str] = ()) -> int:
    """Print the table and the summaries, write them; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    out = parser.parse_args(list(arguments)).json
    rows: list[tuple[Run, Span, float]] = []
    report: list[dict[str, Any]] = []
    print(f"{'':40} {'':>24} {'measured':>8} {'bound':>7} {'expected ms':>15}  in  middle  largest")
    for run in RUNS:
        for what, measured, estimate in _figures(run):
            total = estimate.total
            verdict = "yes" if total.holds(measured) else "NO "
            rows.append((run, total, measured))
            report.append(_row(run, what, measured, total))
            print(
                f"{run.name:40} {what:>24} {measured:8.1f} {total.bound:7.1f} "
                f"{total.low:7.1f}-{total.high:7.1f}  {verdict} "
                f"{total.middle / measured - 1:+6.0%}  {estimate.limited_by}"
            )
    print()
    _summary("survey", [row[1:] for row in rows if row[0].survey])
    _summary("looked at when constants were chosen", [row[1:] for row in rows if row[0].looked_at])
    unseen = [row[1:] for row in rows if not row[0].looked_at]
    inside, error = _summary("not looked at", unseen)
    _summary("all", [row[1:] for row in rows])
    below = sum(measured < span.bound for _, span, measured in rows)
    print(f"measured below the bound: {below}")
    bars = _bars(inside, error, len(unseen), below, len(rows))
    if out:
        write_part(out, report, bars)
    return int(not all(bar.passed for bar in bars))


def _row(run: Run, what: str, measured_ms: float, span: Span) -> dict[str, Any]:
    return {
        "run": run.name,
        "source": run.source,
        "what": what,
        "looked_at": run.looked_at,
        "measured_ms": measured_ms,
        "bound_ms": span.bound,
        "low_ms": span.low,
        "high_ms": span.high,
        "inside": span.holds(measured_ms),
    }


def _bars(inside: float, error: float, unseen: int, below: int, rows: int) -> list[Bar]:
    share, middle = "latency, share inside, rows not looked at", "latency, median error of these"
    return [
        Bar(share, f"{inside:.0%}", f"≥ {INSIDE_BAR:.0%}", inside >= INSIDE_BAR, unseen),
        Bar(middle, f"{error:.0%}", f"≤ {ERROR_BAR:.0%}", error <= ERROR_BAR, unseen),
        Bar("latency, measured below the bound", str(below), "0", below == 0, rows),
    ]


def _summary(title: str, rows: list[tuple[Span, float]]) -> tuple[float, float]:
    """Print and return the share inside and the median error of the middle."""
    inside = sum(span.holds(measured) for span, measured in rows)
    error = statistics.median(abs(span.middle / measured - 1) for span, measured in rows)
    width = statistics.median((span.high - span.low) / 2 / span.middle for span, _ in rows)
    print(
        f"{title}: {inside} of {len(rows)} inside, median error {error:.0%}, "
        f"median half width {width:.0%}"
    )
    return inside / len(rows), error


def _figures(run: Run) -> Iterator[tuple[str, float, Estimate]]:
    moved = traffic(run.model, run.setting.tensor)
    for batch, context, measured in run.tpots:
        yield f"TPOT b{batch} c{context}", measured, tpot(moved, run.setting, batch, context)
    for prompt, cached, measured in run.ttfts:
        what = f"TTFT {prompt}" + (f" ({cached} cached)" if cached else "")
        yield what, measured, ttft(moved, run.setting, prompt, cached_tokens=cached)


def _weights(
    name: str,
    kind: WeightFormat,
    parameters: float,
    experts: int = 0,
    experts_per_token: int = 0,
    *,
    sampled_only: bool = False,
) -> Weights:
    return Weights(
        name=name,
        format=kind,
        size_bytes=parameters * BYTES[kind],
        parameters=parameters,
        experts=experts,
        experts_per_token=experts_per_token,
        sampled_only=sampled_only,
    )


def _attention(model: Model, tensor: int) -> tuple[float, Attention]:
    """(weights of all layers' attention on a rank, what they read and multiply)."""
    heads, hidden = model.heads / tensor, model.hidden
    if model.latent is None:
        kv_heads = max(1.0, model.kv_heads / tensor)
        weights = hidden * model.head_dim * (2 * heads + 2 * kv_heads)
        key_dim = value_dim = model.head_dim
        cached = 2 * kv_heads * model.head_dim
    else:
        query_rank, latent, plain, rotary, value_dim = model.latent
        key_dim, cached = plain + rotary, float(latent + rotary)
        down = hidden * (query_rank + latent + rotary)  # whole on every rank
        up = heads * (query_rank * key_dim + latent * (plain + value_dim))
        weights = down + up + heads * value_dim * hidden
    layers = Attention(
        layers=model.layers,
        query_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        kv_bytes_per_token=2 * cached,
    )
    return weights * model.layers, layers


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
