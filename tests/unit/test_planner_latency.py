"""Do latency estimates follow the hardware's limits, and near what was computed and measured?"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import planner_latency as published
from rayserve.planner.catalogue import gpus
from rayserve.planner.speed.collectives import KIB, all_reduce, call_us, hop, measured
from rayserve.planner.speed.latency import (
    Attention,
    Setting,
    eager_price,
    notes,
    reused,
    tpot,
    ttft,
)
from rayserve.planner.speed.rooflines import (
    Span,
    WeightFormat,
    Weights,
    compute_rate,
    independent,
    longest,
    multiplying,
    reading,
)
from rayserve.units import MIB

A100, H100 = gpus()["A100-80GB-SXM"], gpus()["H100-80GB-SXM"]
EIGHT_A100 = Setting(gpu=A100, step_tokens=2048, tensor=8)
SURVEY_US = {KIB: 5.6, 32 * KIB: 8.4, 128 * KIB: 17.1, MIB: 27.9, 8 * MIB: 214, 64 * MIB: 1161}
"""All-reduce of 8 A100 in a graph, of the campaign before the one in our tables (vLLM 0.14)."""


def compressed(bits: int, kind: str, group: int = 0, *, inputs: bool = False):
    """The quantization_config of a checkpoint of compressed-tensors."""
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    scheme = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind, **strategy}}
    if inputs:
        scheme["input_activations"] = {"num_bits": bits, "type": kind, "dynamic": True}
    return {"quant_method": "compressed-tensors", "ignore": ["lm_head"],
            "config_groups": {"group_0": scheme}}  # fmt: skip


QUANTIZED = {
    WeightFormat.BF16: None,
    WeightFormat.FP8: compressed(8, "float", inputs=True),
    WeightFormat.W8A8: compressed(8, "int", inputs=True),
    WeightFormat.W8A16: compressed(8, "int", 128),
    WeightFormat.W4A16: compressed(4, "int", 128),
}


def big(kind: WeightFormat):
    """Llama-3.1-405B on one of 8 ranks of A100, its layers in one format."""
    config = {**published.LLAMA_405B, "quantization_config": QUANTIZED[kind]}
    return published.moves(config, A100, 8)


W4, W8A8, FP8 = (big(kind) for kind in (WeightFormat.W4A16, WeightFormat.W8A8, WeightFormat.FP8))


def middle(estimate):
    """The middle of a total."""
    return estimate.total.middle


# ── the golden case: 405B on 8 A100, whose figures were computed, not measured ──────────────────


@pytest.mark.parametrize(
    "traffic, ms", [(W4, 22), (W8A8, 36), (FP8, 38)], ids=["w4a16", "w8a8", "fp8"]
)
def test_405b_decodes_near_the_hand_calculation(traffic, ms):
    """One sequence's TPOT with graphs is near weights / bandwidth + all-reduces, and above it:
    the hand calculation left out small kernels and the host.
    """
    assert ms * 0.97 <= middle(tpot(traffic, EIGHT_A100, 1, 2048)) <= ms * 1.25


def test_405b_decodes_near_the_hand_calculation_without_graphs():
    """Eager TPOT holds 31 ms, which counts the host's all-reduces alone; its other operators push
    the middle above that.
    """
    total = tpot(W4, replace(EIGHT_A100, graphs=False), 1, 2048).total
    assert total.holds(31)
    assert 31 < total.middle < 31 * 1.35


@pytest.mark.parametrize(
    "traffic, prompt, ms",
    [(W4, 512, 300), (W4, 2048, 1125), (W4, 8192, 4500), (W8A8, 2048, 737), (FP8, 2048, 1125)],
)
def test_405b_reads_prompts_near_the_hand_calculation(traffic, prompt, ms):
    """TTFT of an uncached prompt is near compute + all-reduces of its steps, and above it: the hand
    calculation left out the request's way and the kernels between.
    """
    assert -0.05 < middle(ttft(traffic, EIGHT_A100, prompt)) / ms - 1 < 0.32


def test_int8_is_what_speeds_prompts_up_on_ampere():
    """Of the quantized formats only int8 x int8 reads a prompt faster on an A100."""
    first = {kind: middle(ttft(big(kind), EIGHT_A100, 2048)) for kind in WeightFormat}
    assert min(first, key=first.__getitem__) is WeightFormat.W8A8
    assert first[WeightFormat.W8A8] < 0.85 * first[WeightFormat.BF16]
    assert first[WeightFormat.W4A16] >= first[WeightFormat.BF16]
    assert first[WeightFormat.FP8] == first[WeightFormat.W8A16]


def test_every_published_figure_is_above_its_bound():
    """No measured latency is below the roofline: else a term counts too much."""
    for run in published.RUNS:
        for what, value, estimate in published._figures(run):
            assert value > estimate.total.bound, (run.name, what)


def test_the_published_figures_that_nobody_looked_at_meet_the_bars(capsys):
    """The benchmark's own bars hold, and it prints a row for each figure."""
    assert published.main() == 0
    printed = capsys.readouterr().out
    rows = sum(len(run.tpots) + len(run.ttfts) for run in published.RUNS)
    assert printed.count("TPOT b") + printed.count("TTFT ") == rows
    assert "\nnot looked at: " in printed


# ── what must hold whatever the constants are ───────────────────────────────────────────────────


@given(
    traffic=st.sampled_from([W4, W8A8, FP8]),
    name=st.sampled_from(sorted(gpus())),
    tensor=st.sampled_from([1, 2, 4, 8]),
    pipeline=st.sampled_from([1, 2]),
    graphs=st.booleans(),
    batch=st.integers(1, 256),
    context=st.integers(1, 131072),
)
def test_expectations_are_ordered_and_above_the_bound(
    traffic, name, tensor, pipeline, graphs, batch, context
):
    """Of each term and of the total: bound <= low <= high, on every GPU and cut."""
    setting = Setting(gpu=gpus()[name], step_tokens=2048, tensor=tensor, pipeline=pipeline,
                      graphs=graphs)  # fmt: skip
    for estimate in (
        tpot(traffic, setting, batch, context),
        ttft(traffic, setting, context, cached_tokens=batch),
    ):
        for span in (*estimate.terms.values(), estimate.total):
            assert 0 <= span.bound <= span.low + 1e-9
            assert span.low <= span.high
        assert estimate.limited_by in estimate.terms


@pytest.mark.parametrize("traffic", [W4, W8A8], ids=["w4a16", "w8a8"])
def test_more_work_takes_longer(traffic):
    """TPOT grows with batch and context, TTFT with the prompt; a cached prefix shortens it."""
    by_batch = [middle(tpot(traffic, EIGHT_A100, batch, 4096)) for batch in (1, 8, 32, 128)]
    by_context = [middle(tpot(traffic, EIGHT_A100, 32, size)) for size in (512, 8192, 131072)]
    by_prompt = [middle(ttft(traffic, EIGHT_A100, size)) for size in (128, 512, 2048, 32768)]
    by_cached = [
        middle(ttft(traffic, EIGHT_A100, 8192, cached_tokens=cached))
        for cached in (8192, 4096, 1024, 0)
    ]
    for row in (by_batch, by_context, by_prompt, by_cached):
        assert row == sorted(row)
        assert row[0] < row[-1]


def test_terms_stay_apart():
    """Each term grows with its own cause alone."""
    short = tpot(W4, EIGHT_A100, 1, 512).terms
    longer = tpot(W4, EIGHT_A100, 1, 65536).terms
    assert {name for name in short if short[name] != longer[name]} == {"kv"}
    alone = tpot(W4, replace(EIGHT_A100, tensor=1), 1, 512).terms
    assert alone["allreduce"] == Span()
    assert {name for name in short if short[name] != alone[name]} == {"allreduce"}


def test_decoding_is_limited_by_weights_and_prompts_by_compute():
    """The largest term is the one that the roofline says."""
    assert tpot(W4, EIGHT_A100, 1, 512).limited_by == "weights"
    assert ttft(W4, EIGHT_A100, 2048).limited_by == "compute"
    assert tpot(W4, EIGHT_A100, 64, 100_000).limited_by == "kv"


def test_a_smaller_step_reads_a_prompt_in_more_steps():
    """Chunked prefill of the same prompt is slower with small steps: each reads all weights."""
    sizes = (8192, 2048, 512, 128)
    spans = [middle(ttft(W8A8, replace(EIGHT_A100, step_tokens=size), 8192)) for size in sizes]
    assert spans == sorted(spans)


def test_the_middle_step_stands_for_its_neighbours(monkeypatch):
    """A prompt of thousands of steps takes as long as if each had been looked at, within 1 %."""
    small = replace(EIGHT_A100, step_tokens=64)
    grouped = ttft(W4, small, 131_072 + 7).total
    monkeypatch.setattr("rayserve.planner.speed.latency.MOST_STEPS", 10_000)
    each = ttft(W4, small, 131_072 + 7).total
    for one, other in zip(vars(grouped).values(), vars(each).values(), strict=True):
        assert one == pytest.approx(other, rel=0.01)


def test_attention_grows_with_the_square_of_the_prompt():
    """Pairs of tokens: n (n + 1) / 2, whatever the steps are, and at most the window each."""
    full = Attention(1, 1, 128, 128, 512)
    assert full.pairs(0, 1000) == 500_500
    assert full.pairs(0, 600) + full.pairs(600, 400) == full.pairs(0, 1000)
    window = replace(full, window=100)
    assert window.pairs(0, 1000) == sum(min(position, 100) for position in range(1, 1001))
    assert window.pairs(950, 50) == 50 * 100
    assert window.pairs(60, 80) == sum(min(position, 100) for position in range(61, 141))
    assert full.flops(500_500) == 2 * 256 * 500_500


def test_a_window_bounds_what_a_step_reads():
    """A sliding layer reads its window, a full one the context, a recurrent one its state twice."""
    full = Attention(10, 8, 128, 128, 512)
    assert full.read_bytes(100_000) == 10 * 512 * 100_000
    assert replace(full, window=4096).read_bytes(100_000) == 10 * 512 * 4096
    assert replace(full, kv_bytes_per_token=0, state_bytes=7).read_bytes(100_000) == 140


@pytest.mark.parametrize(
    "prompt, cached, expected",
    [(2035, 2035, 2032), (2048, 2048, 2032), (2048, 100, 96), (1, 1, 0), (16, 16, 0), (17, 16, 16)],
)
def test_whole_blocks_are_reused_and_never_the_last_token(prompt, cached, expected):
    """The last token is read even where the cache holds all, and so is its block."""
    assert reused(prompt, cached, EIGHT_A100) == expected


def test_pipeline_stages_take_turns_at_a_token_and_share_a_prompt():
    """A token passes all stages and their hops; a prompt of many steps keeps the stages busy."""
    one = replace(EIGHT_A100, tensor=1)
    two = replace(one, pipeline=2)
    assert "pipeline" in tpot(W4, two, 1, 512).terms
    assert middle(tpot(W4, two, 1, 512)) > middle(tpot(W4, one, 1, 512))
    assert middle(tpot(W4, two, 64, 512)) < middle(tpot(W4, one, 64, 512))
    assert ttft(W4, two, 32768).total.bound < 0.6 * ttft(W4, one, 32768).total.bound
    assert ttft(W4, two, 100).total.bound >= ttft(W4, one, 100).total.bound


def test_eager_costs_what_the_host_cannot_hide():
    """Eager is never cheaper; a slower GPU hides more of its host; large prompts hide all of it."""
    price = eager_price(W4, EIGHT_A100, 1, 2048)
    assert 0 <= price.low < 9.1 < price.high
    slow_gpu = Setting(gpu=replace(A100, memory_gb_s=200), step_tokens=2048, tensor=8)
    assert eager_price(W4, slow_gpu, 1, 2048).middle < price.middle
    eager = replace(EIGHT_A100, graphs=False)
    assert middle(ttft(W4, eager, 2048)) == middle(ttft(W4, EIGHT_A100, 2048))


@pytest.mark.parametrize(
    "setting, word",
    [
        (Setting(gpus()["L40S-48GB"], 2048, tensor=2), "all-reduce"),
        (Setting(gpus()["L40S-48GB"], 2048), "matrix product"),
        (replace(EIGHT_A100, graphs=False), "Without CUDA graphs"),
        (EIGHT_A100, "no fp8 units"),
    ],
)
def test_notes_say_what_was_not_measured(setting, word):
    """Each weakness of an estimate is said, and only where it applies."""
    assert any(word in note for note in notes(FP8, setting))
    assert not any(word in note for note in notes(big(WeightFormat.BF16), Setting(H100, 8192)))


# ── experts ─────────────────────────────────────────────────────────────────────────────────────


def test_touched_experts_follow_from_independent_choices():
    """8 of 128 at one token, nearly all at 128 tokens; dense weights are always all read."""
    experts = Weights("experts", WeightFormat.BF16, 1e9, 5e8, experts=128, experts_per_token=8)
    assert experts.touched(1) == pytest.approx(8 / 128)
    assert experts.touched(2) == pytest.approx(1 - (120 / 128) ** 2)
    assert 0.99 < experts.touched(128) < 1
    assert replace(experts, experts=0).touched(1) == 1
    assert experts.flops(10) == pytest.approx(2 * 5e8 * 8 / 128 * 10)
    assert experts.rows(1024) == 64


def test_experts_read_less_and_less_efficiently():
    """One token reads the chosen experts alone, and their narrow matrices at a worse share."""
    dense = Weights("mlp", WeightFormat.BF16, 1e9, 5e8)
    experts = replace(dense, experts=128, experts_per_token=8)
    assert reading(experts, A100, 1).bound == pytest.approx(reading(dense, A100, 1).bound / 16)
    spread = [span.high / span.low for span in (reading(dense, A100, 1), reading(experts, A100, 1))]
    assert spread[0] < spread[1]


# ── building blocks ─────────────────────────────────────────────────────────────────────────────


def test_rates_are_the_makers_and_shares_the_measured_ones():
    """A bound is bytes / bandwidth or FLOPs / peak; shares of compute follow the chip's own best."""
    weights = Weights("mlp", WeightFormat.BF16, 2039e6, 1e9)
    assert reading(weights, A100, 1).bound == pytest.approx(1.0)
    assert multiplying(weights, A100, 156).bound == pytest.approx(1.0)
    assert compute_rate(WeightFormat.BF16, A100, 4096)[1:] == pytest.approx((0.70, 0.95))
    assert compute_rate(WeightFormat.BF16, A100, 512)[1:] == pytest.approx((0.60, 0.87))
    assert compute_rate(WeightFormat.BF16, A100, 1)[1:] == pytest.approx((0.40, 0.75))
    between = compute_rate(WeightFormat.BF16, A100, 1024)
    assert between[1:] == pytest.approx((0.65, 0.91))
    assert compute_rate(WeightFormat.BF16, H100, 4096)[2] < 0.95
    low, high = compute_rate(WeightFormat.BF16, gpus()["L40S-48GB"], 4096)[1:]
    assert high / low > 0.95 / 0.70


def test_int8_gains_up_to_what_was_measured():
    """W8A8 on an A100 is 1.5 to 1.87 times as fast as bf16; fp8 is widened there."""
    peak, low, high = compute_rate(WeightFormat.W8A8, A100, 4096)
    bf16, bf16_low, bf16_high = compute_rate(WeightFormat.BF16, A100, 4096)
    assert peak * high / (bf16 * bf16_high) == pytest.approx(1.87)
    assert peak * low / (bf16 * bf16_low) == pytest.approx(1.5)
    assert compute_rate(WeightFormat.FP8, A100, 64)[0] == A100.bf16_tflops
    assert compute_rate(WeightFormat.FP8, H100, 64)[0] == H100.fp8_tflops


def test_spans_add_up_by_their_causes():
    """One cause adds linearly, several add in quadrature and never fall below the bound."""
    span = Span(1, 2, 4)
    assert span + span == Span(2, 4, 8) == span * 2
    total = independent(span, span)
    assert total.middle == 6
    assert 4 < total.low < total.high < 8
    assert independent(Span(5, 5, 5), Span(0, 0, 4)).low == 5
    assert longest(Span(1, 5, 6), Span(2, 3, 9)) == Span(2, 5, 9)
    assert span.holds(2)
    assert not span.holds(4.1)


# ── all-reduces ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size, us", SURVEY_US.items())
def test_two_campaigns_agree_on_the_a100(size, us):
    """The stated spread of the tables holds an earlier campaign's figures."""
    assert all_reduce(A100, 8, size, graphs=True).holds(us / 1e3)


def test_between_measured_sizes_the_time_is_interpolated():
    """On logarithmic scales between two sizes, in proportion above the last, flat below the first."""
    times = [all_reduce(A100, 8, size, graphs=True).middle for size in (MIB, 1.5 * MIB, 2 * MIB)]
    assert times == sorted(times)
    largest = all_reduce(A100, 8, 256 * MIB, graphs=True)
    assert all_reduce(A100, 8, 512 * MIB, graphs=True).middle == pytest.approx(2 * largest.middle)
    assert all_reduce(A100, 8, 1, graphs=True).high == all_reduce(A100, 8, KIB, graphs=True).high


def test_an_eager_call_is_the_hosts_time_until_the_message_is_large():
    """Small eager all-reduces cost the GPU no more than in a graph; large ones do."""
    assert all_reduce(A100, 8, KIB, graphs=False) == all_reduce(A100, 8, KIB, graphs=True)
    assert call_us(A100) == (46.0, 46.0)
    large = all_reduce(A100, 8, 64 * MIB, graphs=False)
    assert large.high > all_reduce(A100, 8, 64 * MIB, graphs=True).high
    assert large.high == pytest.approx(1.3225 * 1.1)


def test_what_nobody_measured_has_a_wide_range():
    """PCIe and Infinity Fabric are put together from hops and bandwidth, wider than the tables."""
    pcie = all_reduce(gpus()["L40S-48GB"], 8, 16 * KIB, graphs=True)
    assert not measured(gpus()["L40S-48GB"], 8)
    assert not measured(gpus()["A100-80GB-PCIe"], 2)
    assert measured(A100, 4)
    assert not measured(A100, 3)
    assert pcie.high / pcie.low > 2
    assert pcie.low > all_reduce(A100, 8, 16 * KIB, graphs=True).high
    assert all_reduce(A100, 1, MIB, graphs=True) == Span()
    assert call_us(gpus()["MI300X-192GB"]) == (20.0, 46.0)
    assert hop(A100, MIB).high < hop(gpus()["L40S-48GB"], MIB).high
