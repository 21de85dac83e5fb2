"""Does the budget follow each version of vLLM, and the verdict the ends of its range?"""

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
from rayserve.planner.memory.ranges import Range
from rayserve.planner.memory.terms import (
    GraphMemory,
)
from rayserve.planner.memory.versions import version_facts
from rayserve.units import GIB, MIB

V19 = version_facts("0.19.0")


V32 = version_facts("0.32.0")


H100 = int(79.19 * GIB)


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


def test_a_small_request_is_told_in_mib():
    """A request of half a MiB does not read as none."""
    assert "one whole request takes 0.50 MiB" in judge(made_budget(20, 21, 22), MIB // 2).reason
