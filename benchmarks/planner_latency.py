"""Do published latencies of vLLM lie in the ranges that the planner gives?

    python -m benchmarks.planner_latency [--json OUT.json]

The model comes from the shapes of its config.json, by the code that `rayserve plan` runs. One row a
published figure: measured, the bound, the expected range, whether it is inside, the error
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.planner_bars import Bar, write_part
from rayserve.errors import Where
from rayserve.planner.catalogue import Gpu, gpus
from rayserve.planner.speed.latency import (
    V0_HOST,
    V1_SYNC_HOST,
    Estimate,
    Host,
    Setting,
    Traffic,
    tpot,
    ttft,
)
from rayserve.planner.speed.rooflines import Span
from rayserve.planner.speed.traffic import traffic
from rayserve.planner.weights.architecture import read_architecture

INSIDE_BAR = 0.60
ERROR_BAR = 0.20
"""Bars of the rows that no constant was chosen by: share inside, median error of the middle."""

Config = Mapping[str, Any]
"""What a config.json says, as far as it decides what a forward pass moves."""


def decoder(name: str, sizes: tuple[int, int, int, int, int, int], **more: Any) -> Config:
    """(layers, hidden, heads, KV heads, MLP width, vocabulary) of a grouped-query decoder."""
    layers, hidden, heads, kv_heads, width, vocab = sizes
    return {
        "architectures": [f"{name}ForCausalLM"],
        "torch_dtype": "bfloat16",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "intermediate_size": width,
        "vocab_size": vocab,
        "max_position_embeddings": 131072,
        **more,
    }


LLAMA_405B = decoder("Llama", (126, 16384, 128, 8, 53248, 128256))
LLAMA_405B_FP8 = {
    **LLAMA_405B,
    "quantization_config": {
        "quant_method": "fbgemm_fp8",
        "modules_to_not_convert": [f"model.layers.{layer}.self_attn" for layer in range(126)],
    },
}
LLAMA_70B = decoder("Llama", (80, 8192, 64, 8, 28672, 128256))
LLAMA_8B = decoder("Llama", (32, 4096, 32, 8, 14336, 128256))
QWEN_72B = decoder("Qwen2", (80, 8192, 64, 8, 29568, 152064))
QWEN_32B = decoder("Qwen2", (64, 5120, 40, 8, 27648, 152064))
QWEN3_06B = decoder("Qwen3", (28, 1024, 16, 8, 3072, 151936), tie_word_embeddings=True)
QWEN3_17B = decoder("Qwen3", (28, 2048, 16, 8, 6144, 151936), tie_word_embeddings=True)
QWEN3_4B_FP8 = decoder(
    "Qwen3", (36, 2560, 32, 8, 9728, 151936), tie_word_embeddings=True,
    quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
)  # fmt: skip
QWEN3_8B = decoder("Qwen3", (36, 4096, 32, 8, 12288, 151936))
GEMMA3_4B = decoder(
    "Gemma3", (34, 2560, 8, 4, 10240, 262208), head_dim=256, sliding_window=1024
)  # fmt: skip
GPT_OSS_120B = decoder(
    "GptOss", (36, 2880, 64, 8, 2880, 201088), head_dim=64, sliding_window=128,
    num_local_experts=128, num_experts_per_tok=4, quantization_config={"quant_method": "mxfp4"},
)  # fmt: skip
YI_34B = decoder("Llama", (60, 7168, 56, 8, 20480, 64000))
QWEN3_30B = decoder(
    "Qwen3Moe", (48, 2048, 32, 4, 6144, 151936), num_experts=128, num_experts_per_tok=8,
    moe_intermediate_size=768,
)  # fmt: skip
R1_AWQ = decoder(
    "DeepseekV3", (61, 7168, 128, 128, 18432, 129280), q_lora_rank=1536, kv_lora_rank=512,
    qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=256,
    num_experts_per_tok=8, moe_intermediate_size=2048, n_shared_experts=1, n_group=8,
    first_k_dense_replace=3,
    quantization_config={"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One setup whose figures somebody published."""

    name: str
    source: str
    model: Config
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


def moves(config: Config, gpu: Gpu, tensor: int) -> Traffic:
    """What a forward pass of the model moves on one of `tensor` ranks of this GPU."""
    return traffic(read_architecture(config, Where("config.json")), gpu, tensor=tensor)


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
    moved = moves(run.model, run.setting.gpu, run.setting.tensor)
    for batch, context, measured in run.tpots:
        yield f"TPOT b{batch} c{context}", measured, tpot(moved, run.setting, batch, context)
    for prompt, cached, measured in run.ttfts:
        what = f"TTFT {prompt}" + (f" ({cached} cached)" if cached else "")
        yield what, measured, ttft(moved, run.setting, prompt, cached_tokens=cached)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
