"""Does the planner know what each vLLM version does with memory?"""

from __future__ import annotations

import pytest

from rayserve.engine import VLLM_VERSION
from rayserve.planner.memory.versions import (
    Batch,
    Runner,
    Usage,
    capture_sizes,
    default_batch,
    version_facts,
    version_number,
)
from rayserve.units import GIB

A100 = int(79.25 * GIB)
H100 = int(79.19 * GIB)
B200 = int(178.3 * GIB)


@pytest.mark.parametrize(
    "text,number",
    [
        ("0.32.0", (0, 32)),
        ("v0.6.3.post2.dev308", (0, 6)),
        ("0.23.1rc1.dev1201 (patched)", (0, 23)),
        ("0.24-0.26", (0, 24)),
        ("0.10.x", (0, 10)),
        ("nightly >=0.20", (0, 20)),
        ("nightly (May 2026)", None),
        ("", None),
    ],
)
def test_version_is_read_as_people_write_it(text, number):
    """A version is found before its suffixes and remarks; without a number there is none."""
    assert version_number(text) == number


def test_version_without_a_number_stands_for_the_pinned_one():
    """What is no version gets the pinned version's facts, and says that it is not known."""
    facts = version_facts("a build of our own")
    assert not facts.known
    assert facts.number == version_number(VLLM_VERSION)
    assert version_facts(VLLM_VERSION).known


@pytest.mark.parametrize(
    "version,runner,utilization,graphs,consumed,tokens",
    [
        ("0.6.5", Runner.V0, 0.9, False, False, False),
        ("0.8.4 (V0)", Runner.V0, 0.9, False, False, False),
        ("0.8.5", Runner.V1, 0.9, False, False, False),
        ("0.19.0", Runner.V1, 0.9, False, False, False),
        ("0.20.0", Runner.V1, 0.92, True, False, False),
        ("0.21.0", Runner.V1, 0.92, True, False, True),
        ("0.27.0", Runner.EITHER, 0.92, True, True, True),
        ("0.32.0", Runner.V2, 0.92, True, True, True),
    ],
)
def test_facts_change_where_vllm_changed(version, runner, utilization, graphs, consumed, tokens):
    """Each rule of the budget starts at the version that brought it."""
    facts = version_facts(version)
    assert facts.runner is runner
    assert facts.default_utilization == utilization
    assert facts.counts_graphs is graphs
    assert facts.measures_consumed is facts.activation_includes_graphs is consumed
    assert facts.tokens_from_concurrency is tokens


def test_vocabulary_is_sorted_until_0_16():
    """The sampler's sort ends at 0.17, and the experts' buffers stay from 0.12."""
    assert version_facts("0.16.0").sorts_vocabulary
    assert not version_facts("0.17.0").sorts_vocabulary
    assert not version_facts("0.11.0").keeps_expert_workspace
    assert version_facts("0.12.0").keeps_expert_workspace


@pytest.mark.parametrize(
    "version,gpu,total,usage,batch",
    [
        ("0.32.0", "A100-80GB-SXM", A100, Usage.SERVER, Batch(2048, 256)),
        ("0.32.0", "A100-80GB-SXM", A100, Usage.LIBRARY, Batch(8192, 256)),
        ("0.32.0", "H100-80GB-SXM", H100, Usage.SERVER, Batch(8192, 1024)),
        ("0.32.0", "H100-80GB-SXM", H100, Usage.LIBRARY, Batch(16384, 1024)),
        ("0.32.0", "B200", B200, Usage.SERVER, Batch(16384, 1024)),
        ("0.19.0", "MI300X", B200, Usage.SERVER, Batch(8192, 1024)),
        ("0.32.0", "RTX-3090", 24 * GIB, Usage.SERVER, Batch(2048, 256)),
    ],
)
def test_default_step_depends_on_gpu_and_use(version, gpu, total, usage, batch):
    """Large GPUs take large steps, but for the A100, which vLLM names as a case of its own."""
    facts = version_facts(version)
    found = default_batch(facts, gpu_name=gpu, total_bytes=total, max_model_len=4096, usage=usage)
    assert found == batch


@pytest.mark.parametrize(
    "version,length,step",
    [
        ("0.6.4", 20000, 20000),
        ("0.6.4", 1024, 2048),
        ("0.6.4", 128000, 512),
        ("0.7.3", 40000, 2048),
    ],
)
def test_old_engine_takes_whole_prompts(version, length, step):
    """V0 runs a prompt in one step, however small the GPU; only very long ones came in chunks."""
    facts = version_facts(version)
    found = default_batch(facts, gpu_name="H100", total_bytes=H100, max_model_len=length)
    assert found == Batch(step, 256)


@pytest.mark.parametrize(
    "version,batch,capability,count,largest",
    [
        ("0.19.0", Batch(8192, 1024), 9.0, 51, 512),
        ("0.32.0", Batch(8192, 1024), 9.0, 51, 512),
        ("0.32.0", Batch(8192, 1024), 10.0, 83, 1024),
        ("0.32.0", Batch(2048, 32), 8.0, 11, 64),
        ("0.23.0", Batch(8192, 1), 9.0, 2, 2),
        ("0.11.0", Batch(8192, 1024), 9.0, 67, 512),
        ("0.6.5", Batch(2048, 256), 8.0, 35, 256),
        ("0.32.0", Batch(20, 32), 8.0, 6, 20),
    ],
)
def test_default_graph_sizes(version, batch, capability, count, largest):
    """Sizes reach twice max_num_seqs, at most 512, on Blackwell 1024, and never beyond a step."""
    sizes = capture_sizes(version_facts(version), batch, capability=capability)
    assert len(sizes) == count
    assert max(sizes) == largest
    assert sizes == sorted(set(sizes))


def test_interactivity_records_every_small_size():
    """`--performance-mode interactivity` adds a graph for each size up to 32."""
    facts = version_facts("0.32.0")
    fine = capture_sizes(facts, Batch(2048, 32), capability=8.0, interactivity=True)
    assert fine[:32] == list(range(1, 33))
    assert fine[32:] == [40, 48, 56, 64]
