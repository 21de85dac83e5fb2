"""Is what vLLM needs beside the weights known, and does the verdict say how sure it is?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from rayserve.planner.memory.ranges import Range, combined
from rayserve.planner.memory.terms import (
    ExpertKernel,
    Experts,
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
