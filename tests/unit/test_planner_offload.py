"""How much of the weights does `cpu_offload_gb` take off a GPU, and how sure is that?"""

from __future__ import annotations

import json
import re

import pytest

from rayserve.errors import DoesNotFitError, EngineArgumentError, SpecError, Where
from rayserve.planner.memory.offload import NO_OFFLOAD, Offload, offloaded, read_offload, without
from rayserve.planner.memory.ranges import Range
from rayserve.planner.weights.architecture import read_architecture
from rayserve.planner.weights.tensors import Place
from rayserve.units import GIB
from tests.bad_specs import ROOT
from tests.plans import planned
from tests.unit.test_planner_remedies import FP8, LARGE, PACKED, plan, refusal, text

SMALL = json.loads((ROOT / "tests" / "golden" / "configs" / "llama-8b.json").read_text())
HERE = Where("config.json")
WIDEST = 2 * 14336 * 4096 * 2
"""Bytes of the largest parameter of a layer of Llama 8B: gate and up."""
LAYER = 2 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336 + 2 * 4096)
"""Bytes of all parameters of one of its 32 layers."""

SCALES = 32 * 4 * 4
"""Bytes of the four scales of each layer's attention."""


def left(offload: Offload, config=SMALL, **place) -> Range:
    """What stays in host memory of a rank."""
    return offloaded(read_architecture(config, HERE), offload, Place(**place))


def arguments(**values) -> str:
    """The section of engine arguments."""
    written = ", ".join(f"{name}: {value}" for name, value in values.items())
    return f"  engine_args: {{{written}}}\n"


def test_parameters_are_moved_until_the_size_is_reached():
    """At least what was asked for, and less than one parameter more."""
    assert left(Offload(3 * GIB)) == Range(
        3 * GIB, 3 * GIB, 3 * GIB + WIDEST, left(Offload(1)).basis
    )


def test_no_more_is_moved_than_the_layers_of_the_stage_have():
    """Embedding and head stay, and each stage counts its own layers."""
    for stages in (1, 2):
        found = left(Offload(100 * GIB), pipeline=stages)
        assert found.low == found.high == pytest.approx(32 * LAYER // stages, abs=SCALES)


def test_what_repacking_brings_back_is_not_known():
    """Of a quantized checkpoint, and of chosen parameters alone, perhaps nothing stays away."""
    quantized = {**SMALL, "quantization_config": FP8}
    for found in (left(Offload(GIB), quantized), left(Offload(GIB, picked=True))):
        assert found.low == 0
        assert found.expected == GIB < found.high
    assert left(Offload(prefetch=True)).low == 0
    assert left(Offload(prefetch=True)).high == pytest.approx(32 * LAYER, abs=SCALES)
    assert left(NO_OFFLOAD) == Range.exact(0)


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, NO_OFFLOAD),
        ({"cpu_offload_gb": 0}, NO_OFFLOAD),
        ({"cpu_offload_gb": 1.5}, Offload(3 * GIB // 2)),
        ({"cpu_offload_gb": 2, "cpu_offload_params": ["mlp"]}, Offload(2 * GIB, picked=True)),
        ({"cpu_offload_gb": 2, "offload_group_size": 4}, Offload(prefetch=True)),
        (
            {"cpu_offload_gb": 2, "offload_backend": "uva", "offload_group_size": 4},
            Offload(2 * GIB),
        ),
        ({"offload_backend": "prefetch", "offload_group_size": 4}, Offload(prefetch=True)),
    ],
)
def test_the_way_is_chosen_as_vllm_does(given, expected):
    """Prefetching comes before cpu_offload_gb, unless the backend is named."""
    assert read_offload(given) == expected


def test_weights_never_fall_below_nothing():
    """The range stays in order, whatever is taken off."""
    weights = Range(90, 100, 110)
    assert without(weights, Range(20, 30, 40)) == Range(50, 70, 90, ", ")
    assert without(weights, Range(0, 200, 300)) == Range(0, 0, 110, ", ")
    assert without(weights, Range.exact(0)) == weights


def test_a_plan_takes_it_off_the_weights_and_tells_its_price():
    """405B in 16 bits fits one host of eight A100 with 40 GiB away, and not with 10."""
    made = plan(LARGE, "A100-80GB-SXM", 8, add=arguments(cpu_offload_gb=40))
    assert made.memory.verdict == "fits"
    assert made.memory.weights_bytes / GIB == pytest.approx(94.5 - 40, abs=0.1)
    assert any("peak rate" in note and "1,342 ms" in note for note in made.notes)
    with pytest.raises(DoesNotFitError):
        plan(LARGE, "A100-80GB-SXM", 8, add=arguments(cpu_offload_gb=10))


def terms(rows) -> list[dict]:
    """The terms of each row of a plan's latencies by name."""
    return [{term.name: term for term in row.terms} for row in rows]


def test_weights_in_host_memory_stand_in_every_latency():
    """Each pass reads them over PCIe (32 GB/s at most): a token once, a prompt once for each step."""
    made = plan(LARGE, "A100-80GB-SXM", 8, add=arguments(cpu_offload_gb=40))
    least_ms = 40 * GIB / 32e6
    for row, found in zip(made.latency.tpot, terms(made.latency.tpot), strict=True):
        one = found["offload"]
        assert 0.9 * least_ms < one.bound_ms < least_ms < one.low_ms < one.high_ms < 3 * least_ms
        assert row.low_ms > least_ms
        assert row.limited_by == "offload"
    whole, *_, longest = terms(row for row in made.latency.ttft if not row.cached_tokens)
    assert longest["offload"].low_ms >= whole["offload"].low_ms >= least_ms
    assert not any("cpu_offload_gb" in note for note in made.latency.notes)


def test_promises_and_choices_follow_what_weights_in_host_memory_cost():
    """A promised token of 50 ms is refused, and the number of sequences is chosen by the true time."""
    add = arguments(cpu_offload_gb=10)
    made = plan(SMALL, "A100-80GB-SXM", 1, add=add)
    seqs = next(arg for arg in made.replica.engine_args if arg.name == "max_num_seqs")
    told = re.search(r"a token takes about (\d+) ms", seqs.reason)
    assert told is not None
    assert int(told[1]) > 10 * GIB / 32e6
    promise = "  slo: {tpot_ms: 50}\n"
    with pytest.raises(SpecError, match="needs at its peak") as raised:
        plan(SMALL, "A100-80GB-SXM", 1, add=add + promise)
    assert raised.value.do.startswith("remove engine_args.cpu_offload_gb: ")
    assert plan(SMALL, "A100-80GB-SXM", 1, add=promise).latency
    with pytest.raises(SpecError, match="needs at its peak") as raised:
        plan(SMALL, "A100-80GB-SXM", 1, add=add + "  slo: {tpot_ms: 0.1}\n")
    assert raised.value.do.startswith("write tpot_ms: ")


def test_weights_that_loading_may_bring_back_bound_no_latency():
    """Of a quantized checkpoint it is not known how much stays: the range begins at nothing."""
    made = plan(PACKED, "A100-80GB-SXM", 4, add=arguments(cpu_offload_gb=10))
    one = terms(made.latency.tpot)[0]["offload"]
    assert (one.bound_ms, one.low_ms) == (0, 0)
    assert one.high_ms > 10 * GIB / 32e6


def test_offload_whose_size_is_not_known_is_no_proof_of_anything():
    """Prefetching, and what repacking may bring back, leave the verdict to a measurement."""
    groups = arguments(offload_group_size=8, offload_num_in_group=4)
    made = plan(LARGE, "A100-80GB-SXM", 8, add=groups)
    assert made.memory.verdict.startswith("within the uncertainty")
    assert "engine_args.offload_group_size" in made.memory.uncounted
    assert refusal(PACKED, "A100-80GB-SXM", 2)
    made = plan(PACKED, "A100-80GB-SXM", 2, add=arguments(cpu_offload_gb=60))
    assert made.memory.verdict.startswith("within the uncertainty")


def test_of_an_unknown_architecture_it_makes_nothing_certain():
    """What a checkpoint's sum refused is left to a measurement, and so is the number of requests."""
    strange = {**PACKED, "architectures": ["ArceeForCausalLM"]}
    size = "  model: {path: /m, served_name: chat, config: config.json, checkpoint_bytes: 210000000000}\n"

    def made(gpus: int, add: str = ""):
        spec = text("A100-80GB-SXM", gpus, add=add)
        model = next(line for line in spec.splitlines(keepends=True) if "  model:" in line)
        return planned(spec.replace(model, size), strange)

    with pytest.raises(DoesNotFitError):
        made(2)
    found = made(2, arguments(cpu_offload_gb=60)).memory
    assert found.verdict.startswith("within the uncertainty")
    whole = made(8).memory
    assert (
        whole.expected_concurrency_low
        < whole.expected_concurrency
        < whole.expected_concurrency_high
    )


def test_no_more_is_said_to_be_left_than_the_layers_have():
    """Of a size beyond the weights the note tells what the decoder layers come to."""
    made = plan(SMALL, "A100-80GB-SXM", 1, add=arguments(cpu_offload_gb=10000))
    note = next(note for note in made.notes if "peak rate" in note)
    assert f"about {32 * LAYER / GIB:.3g} GiB" in note


@pytest.mark.parametrize("size", ["-1", "-0.5", "1.0e+308"])
def test_a_size_that_vllm_refuses_is_refused_before_it_is_calculated_with(size):
    """A negative or unrepresentable size ends in an error that names the argument."""
    with pytest.raises(EngineArgumentError, match="`cpu_offload_gb` to be"):
        plan(SMALL, "A100-80GB-SXM", 1, add=arguments(cpu_offload_gb=size))


BLOCKS = "  kv_offload: {cpu_gib: 100}\n"
"""The section of KV blocks in host memory."""


def hosted(model, memory: int, add: str):
    """The plan for a host with so much memory, in GiB."""
    spec = text("A100-80GB-SXM", 8, add=add)
    return planned(spec.replace("_host: 8", f"_host: 8, memory_gib: {memory}"), model)


@pytest.mark.parametrize(
    "model, size, memory, add, told",
    [
        (SMALL, 100, 16, "", "remove it"),
        (LARGE, 60, 300, "", "write cpu_offload_gb: 36"),
        (LARGE, 60, 400, BLOCKS, "write cpu_offload_gb: 36"),
        (LARGE, 30, 16, "", "take hosts of 248 GiB of memory, and write memory_gib: 248"),
        (LARGE, 30, 16, BLOCKS, "take hosts of 348 GiB of memory, and write memory_gib: 348"),
    ],
)
def test_weights_that_a_host_has_no_memory_for_are_refused(model, size, memory, add, told):
    """Each GPU's share lies in the host's memory beside KV blocks; what is told plans."""
    with pytest.raises(SpecError) as raised:
        hosted(model, memory, arguments(cpu_offload_gb=size) + add)
    assert raised.value.where.key.endswith("engine_args.cpu_offload_gb")
    assert raised.value.do.startswith(told)
    assert "something else" not in raised.value.do
    number = int(re.findall(r"\d+", f"{told} 0")[0])
    if told.startswith("take"):
        assert hosted(model, number, arguments(cpu_offload_gb=size) + add).memory
        with pytest.raises(SpecError):
            hosted(model, number - 1, arguments(cpu_offload_gb=size) + add)
    else:
        instead = arguments(cpu_offload_gb=number) if number else ""
        assert hosted(model, memory, instead + add).memory


def test_memory_that_does_not_do_alone_is_said_not_to():
    """Where the host holds no second replica either, its memory is told as one of two wants."""
    add = arguments(cpu_offload_gb=30) + "  replicas: {max: 2}\n"
    with pytest.raises(SpecError) as raised:
        hosted(LARGE, 16, add)
    assert "memory_gib: 248; the plan refuses something else then" in raised.value.do
    with pytest.raises(DoesNotFitError, match="2 gangs"):
        hosted(LARGE, 248, add)
