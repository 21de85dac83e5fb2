"""Is what vLLM needs beside the weights known, and does the verdict say how sure it is?"""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve.planner.memory.budget import (
    Budget,
    Outcome,
    Terms,
    judge,
    kv_budget,
    measure_command,
    requested_bytes,
    worst,
)
from rayserve.planner.memory.ranges import Range, combined
from rayserve.planner.memory.terms import (
    ExpertKernel,
    Experts,
    GraphMemory,
    Vision,
    Work,
    activation,
    flashinfer_buffer,
    graph_memory,
    images_profiled,
    kept_buffers,
    mla_prefill_bytes,
    non_torch,
)
from rayserve.planner.memory.versions import version_facts
from rayserve.units import GIB, MIB

LLAMA_8B = Work(step_tokens=8192, seqs=1024, hidden=4096, padded_vocab=128256, mlp_width=14336)
PHI_4 = Work(step_tokens=2048, seqs=256, hidden=5120, padded_vocab=100352, mlp_width=17920)
QWEN_MOE = Work(
    step_tokens=8192,
    seqs=1024,
    hidden=2048,
    padded_vocab=151936,
    mlp_width=5632,
    experts=Experts(top_k=4, width=1408),
)
SCAN = replace(LLAMA_8B, hidden=5120, padded_vocab=131072, mlp_width=32768)
V19 = version_facts("0.19.0")
V32 = version_facts("0.32.0")
H100 = int(79.19 * GIB)


def peak(work, version="0.19.0", capability=9.0):
    """The activation term in GiB: low, expected, high."""
    found = activation(version_facts(version), work, capability=capability)
    return found.low / GIB, found.expected / GIB, found.high / GIB


# ── ranges ──────────────────────────────────────────────────────────────────────────────────────


def test_range_is_ascending():
    """A range whose ends are swapped is refused."""
    with pytest.raises(ValueError, match="not ascending"):
        Range(2, 1, 3)


def test_ranges_add_at_their_ends():
    """The sum of two ranges is as unsure as both together, and says what both rest on."""
    total = Range(1, 2, 4, "a log") + Range(10, 20, 40, "a table")
    assert (total.low, total.expected, total.high) == (11, 22, 44)
    assert total.basis == "a log; a table"
    assert total.width == 33


def test_independent_ranges_combine_narrower_than_their_sum():
    """Errors that are independent add as the root of their squares."""
    total = combined([Range(7, 10, 13), Range(16, 20, 24)])
    assert (total.low, total.expected, total.high) == (25, 30, 35)
    assert combined([Range.exact(5), Range.exact(6)]).width == 0


# ── activation: figures of public start-up logs ─────────────────────────────────────────────────


@pytest.mark.parametrize(
    "work,version,capability,logged",
    [
        (LLAMA_8B, "0.19.0", 9.0, 1.89),
        (LLAMA_8B, "0.11.0", 9.0, 4.76),
        (replace(LLAMA_8B, seqs=256), "0.6.5", 9.0, 1.26),
        (replace(LLAMA_8B, first_stage=False), "0.19.0", 9.0, 2.01),
        (PHI_4, "0.6.5", 8.0, 0.94),
        (QWEN_MOE, "0.19.0", 9.0, 2.47),
        (replace(LLAMA_8B, step_tokens=29000, seqs=256), "0.6.4", 8.6, 2.99),
    ],
)
def test_peak_is_that_of_published_logs(work, version, capability, logged):
    """The derived peak is within 1.5 % of vLLM's own, and the log within the range.

    0.19 and 0.11: github.com/llm-d-incubation/llm-d-planner; 0.6.4 and 0.6.5:
    github.com/vllm-project/vllm/issues/10511 and 10517, and a Phi-4 GPTQ log on an A100.
    """
    low, expected, high = peak(work, version, capability)
    assert expected == pytest.approx(logged, rel=0.015)
    assert low - 0.005 <= logged <= high + 0.005


def test_w8a8_forward_pass_sets_the_peak():
    """Where the MLP is wide, the forward pass with its int8 inputs needs more than sampling.

    Mistral-Small-3.1-24B w8a8 in 0.19 on H100: 2.18 GiB, bf16 2.03.
    """
    images = Vision(pixels=2 * 3 * 1540**2, patches=0, output_tokens=6050, hidden=0, width=0)
    seen = replace(SCAN, vision=images)
    assert peak(replace(seen, int8_inputs=True))[1] == pytest.approx(2.18, rel=0.015)
    assert peak(seen)[1] == pytest.approx(2.03, rel=0.015)


def test_peak_does_not_depend_on_the_ranks_where_sampling_sets_it():
    """Logits are gathered on each rank: more ranks do not make the peak smaller."""
    assert peak(replace(LLAMA_8B, tensor=2, mlp_width=7168)) == peak(LLAMA_8B)


def test_few_sequences_need_little():
    """max_num_seqs 32 removes nearly all that sampling takes, and one layer's forward remains."""
    few = peak(replace(LLAMA_8B, seqs=32))[1]
    assert few == pytest.approx(8192 * (3 * 14336 + 4 * 4096) * 2 / GIB, abs=0.05)


def test_stage_without_the_head_does_not_sample():
    """With pipeline parallelism only the last stage holds logits."""
    assert peak(replace(LLAMA_8B, last_stage=False))[1] < 1.0 < peak(LLAMA_8B)[1]


def test_pinned_version_is_less_sure():
    """0.32 profiles without top-k and top-p: the range spans its source and what 0.19 took."""
    low, expected, high = peak(LLAMA_8B, "0.32.0")
    assert low < expected < high
    assert low == pytest.approx(0.9, abs=0.1)
    assert high >= peak(LLAMA_8B)[1]


def test_images_stay_while_sampling():
    """Pixels and embeddings of the profiled images are there to the end.

    Gemma-3-12B in 0.19 on H100: 32 images of 256 tokens, 3.94 GiB.
    """
    text = replace(LLAMA_8B, hidden=3840, padded_vocab=262208, mlp_width=15360)
    images = Vision(32 * 3 * 896 * 896, 32 * 4096, 8192, hidden=1152, width=4304)
    low, expected, high = peak(replace(text, vision=images))
    assert expected == pytest.approx(3.94, rel=0.01)
    assert low < 3.94 < high


@pytest.mark.parametrize(
    "step,seqs,tokens,per_prompt,images",
    [
        (8192, 1024, 256, 1, 32),
        (8192, 1024, 3025, 1, 2),
        (2048, 256, 16384, 1, 1),
        (8192, 4, 256, 1, 4),
    ],
)
def test_images_profiled(step, seqs, tokens, per_prompt, images):
    """As many images as fit a step, at least one, and no more than there may be requests."""
    assert images_profiled(step, seqs, tokens, per_prompt) == images


def test_expert_kernels_differ():
    """Marlin and unknown kernels get a range; Triton's two buffers follow from the shapes."""
    ranges = {
        kernel: activation(
            V19, replace(QWEN_MOE, experts=Experts(4, 1408, kernel)), capability=9.0
        ).width
        for kernel in ExpertKernel
    }
    assert ranges[ExpertKernel.TRITON] < ranges[ExpertKernel.MARLIN] < ranges[ExpertKernel.OTHER]


def test_expert_buffers_ended_with_the_layer_before_0_12():
    """In 0.11 sampling found the experts' buffers freed again."""
    dense = replace(QWEN_MOE, experts=None)
    assert peak(QWEN_MOE, "0.11.0")[1] == peak(dense, "0.11.0")[1]


def test_mla_expands_a_chunk_of_context():
    """At most 65,536 tokens of keys and values; of a short context no more than there are."""
    assert mla_prefill_bytes(16, 256, 8 * 131072, 2) == 65536 * 16 * 256 * 2
    assert mla_prefill_bytes(16, 256, 8192, 2) == 8192 * 16 * 256 * 2


# ── NCCL, buffers, graphs ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "version,tensor,capability,logged",
    [
        ("0.19.0", 1, 9.0, 0.25),
        ("0.19.0", 1, 9.0, 0.46),
        ("0.19.0", 2, 9.0, 2.07),
        ("0.19.0", 4, 9.0, 2.21),
        ("0.11.0", 1, 9.0, 0.13),
        ("0.11.0", 2, 9.0, 0.55),
        ("0.26.0", 4, 10.0, 0.95),
        ("0.6.5", 2, 9.0, 3.58),
    ],
)
def test_non_torch_holds_what_logs_say(version, tensor, capability, logged):
    """Figures of public logs lie within the range of their version and number of ranks."""
    found = non_torch(version_facts(version), tensor=tensor, pipeline=1, capability=capability)
    assert found.low <= logged * GIB <= found.high
    assert found.basis


def test_more_ranks_are_less_sure():
    """Nothing is known of eight A100: the range is wider than that of two."""
    two, eight = (non_torch(V19, tensor=tensor, pipeline=1, capability=8.0) for tensor in (2, 8))
    assert eight.width > two.width
    assert eight.expected > two.expected


def test_eager_mode_has_no_graphs():
    """Without batch sizes to record there is nothing to hold."""
    none = graph_memory(V32, [], layers=80)
    assert none.estimate.high == none.actual.high == 0


def test_graphs_grow_with_sizes_and_layers():
    """More batch sizes, more layers and experts take more; 70B at 51 sizes took 1.8 GiB in 0.19."""
    sizes = list(range(1, 52))
    whole = graph_memory(V19, [*sizes[:-1], 512], layers=80).actual
    assert whole.low < 1.79 * GIB < whole.high
    assert graph_memory(V19, sizes, layers=40).actual.expected < whole.expected
    assert graph_memory(V19, [1, 2], layers=78, experts=True).actual.expected < 0.1 * GIB
    assert graph_memory(version_facts("0.6.5"), sizes, layers=40).estimate.high == 0


def test_flashinfer_makes_its_workspace_as_graphs_are_recorded():
    """394 MiB, which the estimate holds from 0.20 on; 0.32 lets it grow with step and heads."""
    older = flashinfer_buffer(version_facts("0.24.0"), step_tokens=8192, query_width=4096)
    assert (older.low, older.expected, older.high) == (394 * MIB, 394 * MIB, 512 * MIB)
    assert flashinfer_buffer(V32, step_tokens=8192, query_width=4096).expected == 512 * MIB
    assert flashinfer_buffer(V32, step_tokens=2048, query_width=1024).expected == 394 * MIB
    plain = graph_memory(V19, [1, 2], layers=8)
    more = plain.beside(older)
    assert more.estimate.expected - plain.estimate.expected == 394 * MIB
    assert more.actual.high - plain.actual.high == 512 * MIB


def test_before_0_17_nobody_knows_who_sampled():
    """FlashInfer sorts nothing: the low end is without the sort, the expectation and the rest with it."""
    unsure = activation(version_facts("0.11.0"), LLAMA_8B, capability=9)
    sure = activation(V19, LLAMA_8B, capability=9)
    assert unsure.low <= sure.expected < unsure.expected < unsure.high
    assert unsure.expected - unsure.low > 2 * GIB


def test_buffers_count_from_0_27():
    """Penalty counters are part of the consumed memory, which older versions did not measure."""
    assert kept_buffers(version_facts("0.26.0"), LLAMA_8B).high == 0
    assert kept_buffers(V32, LLAMA_8B).expected > 1024 * 128256 * 4
    assert kept_buffers(V32, replace(LLAMA_8B, seqs=32)).expected < 0.1 * GIB


# ── the budget ──────────────────────────────────────────────────────────────────────────────────


def exact_terms(weights, peak_gib, other, estimate, actual=0.0):
    """Terms without doubt, in GiB."""
    weight, top, rest, before, after = (
        Range.exact(round(value * GIB)) for value in (weights, peak_gib, other, estimate, actual)
    )
    return Terms(weight, top, rest, Range.exact(0), GraphMemory(before, after))


def test_requested_is_rounded_up():
    """vLLM takes the ceiling of total x utilization."""
    assert requested_bytes(101, 0.9) == 91
    assert requested_bytes(100, 1.0) == 100


@pytest.mark.parametrize(
    "version,total,utilization,terms,logged",
    [
        ("0.19.0", 79.19, 0.95, exact_terms(14.99, 1.89, 0.25, 0.84), 58.11),
        ("0.26.0", 184.31, 0.92, exact_terms(106.69, 6.31, 0.95, 4.99), 50.62),
        ("0.11.0", 79.18, 0.9, exact_terms(33.88, 4.84, 0.55, 0.0), 32.0),
        ("0.6.5", 79.25, 0.15, exact_terms(8.51, 0.94, 0.26, 0.0), 2.18),
    ],
)
def test_identity_of_each_version(version, total, utilization, terms, logged):
    """The logs' own terms give the logs' own KV cache; graphs count from 0.20 only."""
    made = kv_budget(
        version_facts(version), terms, total_bytes=int(total * GIB), utilization=utilization
    )
    assert made.kv.expected / GIB == pytest.approx(logged, abs=0.02)
    assert made.kv.width <= 2


def made_budget(low, expected, high, *, utilization=0.9, actual=0.0, total=H100):
    """A budget whose KV cache is the given range in GiB."""
    requested = requested_bytes(total, utilization)
    weights = Range(*(requested - round(value * GIB) for value in (high, expected, low)))
    terms = replace(exact_terms(0, 0, 0, 0, actual), weights=weights)
    return kv_budget(V19, terms, total_bytes=total, utilization=utilization)


@pytest.mark.parametrize(
    "low,expected,high,needed,outcome",
    [
        (20, 21, 22, 10, Outcome.FITS),
        (20, 21, 22, 19, Outcome.MARGIN),
        (20, 21, 22, 20.5, Outcome.MEASURE),
        (20, 21, 22, 21.5, Outcome.MEASURE),
        (20, 21, 22, 22.5, Outcome.CANNOT),
        (-3, -2, -1, 0, Outcome.CANNOT),
        (-1, 0, 1, 0, Outcome.MEASURE),
    ],
)
def test_verdict_follows_the_ends_of_the_range(low, expected, high, needed, outcome):
    """Above the low end it fits, beyond the high end it cannot, between only a measurement tells."""
    verdict = judge(made_budget(low, expected, high), int(needed * GIB))
    assert verdict.outcome is outcome
    assert str(verdict).startswith(str(outcome))


@given(
    low=st.floats(-20, 60),
    spread=st.floats(0, 10),
    share=st.floats(0, 1),
    needed=st.floats(0.001, 80),
)
def test_never_fits_what_the_low_end_does_not_hold(low, spread, share, needed):
    """Whatever the numbers: `fits` needs one whole request within the low end."""
    made = made_budget(low, low + share * spread, low + spread)
    verdict = judge(made, int(needed * GIB))
    if verdict.outcome in {Outcome.FITS, Outcome.MARGIN}:
        assert made.kv.low >= int(needed * GIB)
        assert verdict.starts
    if made.kv.high < int(needed * GIB):
        assert verdict.starts is False


def test_margin_is_said():
    """`fits with margin` says how much the low end leaves."""
    assert "fits with margin 1.00 GiB" in str(judge(made_budget(20, 21, 22), 19 * GIB))


def test_memory_that_another_process_holds():
    """vLLM refuses to start where less is free than requested, whatever would fit.

    "Free memory on device cuda:1 (60.87/79.19 GiB) on startup is less than desired".
    """
    made = made_budget(20, 21, 22, utilization=0.95)
    verdict = judge(made, GIB, free_bytes=int(60.87 * GIB))
    assert verdict.outcome is Outcome.CANNOT
    assert "another process" in verdict.reason
    assert judge(made, GIB, free_bytes=int(78 * GIB)).starts


def test_graphs_need_room_beside_the_budget():
    """With nearly the whole GPU requested, graphs outside the budget have no place: measure."""
    tight = made_budget(20, 21, 22, utilization=0.98, actual=1.8)
    verdict = judge(tight, GIB)
    assert verdict.outcome is Outcome.MEASURE
    assert "CUDA graphs" in verdict.reason


def test_context_and_nccl_come_before_the_request():
    """vLLM first asks whether the requested memory is free, when CUDA and NCCL have theirs."""
    tight = made_budget(20, 21, 22, utilization=0.99, actual=0.1)
    verdict = judge(tight, GIB)
    assert verdict.outcome is Outcome.MEASURE
    assert "NCCL" in verdict.reason


def test_pinned_cache_is_as_large_as_asked_for():
    """With a pinned size the utilization counts no more, but the GPU's whole memory does."""
    terms = exact_terms(40, 2, 1, 1)
    for gib, starts in ((20, True), (34.5, None), (40, False)):
        made = kv_budget(
            V32, terms, total_bytes=H100, utilization=0.5, pinned_kv_bytes=int(gib * GIB)
        )
        assert made.kv.expected == int(gib * GIB)
        assert judge(made, GIB, free_bytes=GIB).starts is starts


def test_worst_rank_decides():
    """Of several ranks the worst verdict counts, and of equal ones that with the least margin."""
    good, tight, bad = (judge(made_budget(20, 21, 22), int(gib * GIB)) for gib in (5, 10, 30))
    assert worst([good, bad, tight]) is bad
    assert worst([good, tight]) is tight


def test_command_that_measures():
    """The measuring start takes random weights and few layers, quoted for a shell."""
    line = measure_command(
        "org/model", {"tensor_parallel_size": 8, "enforce_eager": False, "foo": True}, layers=4
    )
    words = shlex.split(line)
    assert words[:5] == ["vllm", "serve", "org/model", "--load-format", "dummy"]
    assert json.loads(words[words.index("--hf-overrides") + 1]) == {"num_hidden_layers": 4}
    assert words[-3:] == ["--tensor-parallel-size", "8", "--foo"]
    inner = measure_command("m", {}, layers=2, text_config=True)
    assert '"text_config": {"num_hidden_layers": 2}' in inner


def test_budget_names_what_it_counts():
    """The terms that come off are named, and before 0.20 graphs are not among them."""
    made: Budget = made_budget(20, 21, 22)
    assert [name for name, _ in made.counted] == ["weights", "activation", "non_torch", "buffers"]
    late = kv_budget(V32, made.terms, total_bytes=H100, utilization=0.9)
    assert late.counted[-1][0] == "cuda_graphs"
    assert late.outside.low == 0
    assert MIB * 1024 == GIB
