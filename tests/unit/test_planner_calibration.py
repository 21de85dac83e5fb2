"""Which terms of memory does a real start narrow, and is what it leaves an honest range?

No start on a GPU was at hand: the lines follow the format that rayserve/starts.py reads.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve.planner.memory.budget import Terms, kv_budget
from rayserve.planner.memory.calibration import Shape, calibrate, measured_start
from rayserve.planner.memory.ranges import Range
from rayserve.planner.memory.terms import GraphMemory
from rayserve.planner.memory.versions import Batch, version_facts
from rayserve.units import GIB, MIB
from tests.golden_specs import GOLDEN, plan_of
from tests.start_lines import ledger_of, rank_memory, start_line

V32 = version_facts("0.32.0")
PLAN = plan_of(GOLDEN / "one-host-w4a16.yml")
STAGES = plan_of(GOLDEN / "two-hosts-bf16.yml")
ALL = ("weights", "activation", "non_torch", "cuda_graphs")


def unsure() -> Terms:
    """Terms before a start: wide."""
    wide = Range.gib(0, 2, 30)
    return Terms(wide, wide, wide, wide, GraphMemory(wide, wide))


def measured(plan=PLAN, **changes):
    """What one start measured."""
    (start,) = ledger_of(start_line(plan, **changes)).starts
    found = measured_start(V32, start)
    assert found is not None
    return found


def shape(**changes) -> Shape:
    """The shape of the planned start."""
    one = measured().shape
    batch = Batch(changes.pop("step", one.batch.step_tokens), changes.pop("seqs", one.batch.seqs))
    return Shape(**{**vars(one), "batch": batch, **changes})


def test_a_start_replaces_guesses_by_measurements():
    """Each term is the measured one, and the sum is the KV cache that vLLM found, to the byte."""
    start = measured()
    terms = calibrate(unsure(), [start], shape(), 0)
    assert terms.calibrated == ALL
    assert (terms.weights.low, terms.weights.high) == (25 * GIB, 25 * GIB)
    assert terms.activation.expected == GIB // 2, "0.32 reports the peak with the graphs"
    assert terms.non_torch.expected == 2 * GIB
    assert terms.buffers.high == 0
    assert terms.graphs.estimate.expected == GIB // 2
    made = kv_budget(V32, terms, total_bytes=start.total_bytes, utilization=0.92)
    assert made.kv.expected == rank_memory(0)["kv_bytes"]
    assert made.kv.low < made.kv.expected < made.kv.high
    assert made.kv.width < 0.5 * GIB


def test_calibrated_terms_say_what_they_rest_on():
    """The basis has the number of starts and what was derived without them."""
    terms = calibrate(unsure(), [measured(), measured()], shape(), 0)
    assert "2 starts" in terms.activation.basis
    assert "derived: 0.00-30.00 GiB" in terms.activation.basis


@pytest.mark.parametrize(
    "changes, names",
    [
        ({"step": 8192}, ("weights", "non_torch")),
        ({"seqs": 64}, ("weights",)),
        ({"length": 999}, ("weights", "cuda_graphs")),
        ({"tensor": 4}, ()),
        ({"pipeline": 2}, ()),
    ],
)
def test_a_start_of_another_shape_narrows_less(changes, names):
    """What a term depends on must be the same: another cut leaves everything as it was derived."""
    terms = calibrate(unsure(), [measured()], shape(**changes), 0)
    assert terms.calibrated == names
    for name in {"weights", "activation", "non_torch"} - set(names):
        assert getattr(terms, name) == getattr(unsure(), name)


def test_no_start_changes_nothing():
    """Without evidence the terms are those that were derived."""
    assert calibrate(unsure(), [], shape(), 0) == unsure()


@given(st.lists(st.integers(min_value=0, max_value=5 * GIB), min_size=1, max_size=6))
def test_the_range_holds_every_start_it_rests_on(peaks):
    """Starts that stray widen the range; none of them lies outside, and the weights stay exact."""
    starts = [
        measured(terms={"activation_bytes": peak + GIB // 2, "cudagraph_bytes": GIB // 2})
        for peak in peaks
    ]
    term = calibrate(unsure(), starts, shape(), 0).activation
    assert term.low <= min(peaks)
    assert term.high >= max(peaks)
    assert term.low <= term.expected <= term.high
    if max(peaks):
        assert term.high >= max(peaks) + 64 * MIB, "a next start may stray further"


def test_the_fullest_rank_decides():
    """Terms are those of one rank, the one that leaves the smallest cache, so that they add up."""
    line = start_line(PLAN)
    line["memory"][3] = rank_memory(3, consumed_bytes=28 * GIB)
    line["memory"][5] = rank_memory(5, activation_bytes=GIB + GIB // 4)
    start = measured_start(V32, ledger_of(line).starts[0])
    terms = calibrate(unsure(), [start], shape(), 0)
    assert terms.non_torch.expected == 3 * GIB
    assert terms.activation.expected == GIB // 2


def test_each_stage_is_calibrated_by_its_own_ranks():
    """The last stage has the output head, the first the embedding: their weights differ."""
    line = start_line(STAGES)
    tensor = line["engine"]["tensor_parallel_size"]
    assert line["engine"]["pipeline_parallel_size"] == 2
    for rank in range(tensor, 2 * tensor):
        line["memory"][rank] = rank_memory(rank, weights_bytes=24 * GIB)
    start = measured_start(V32, ledger_of(line).starts[0])
    weights = [calibrate(unsure(), [start], start.shape, stage).weights for stage in (0, 1)]
    assert [term.expected // GIB for term in weights] == [25, 24]


def test_eager_mode_measures_no_graphs():
    """Graphs of no bytes are exactly that."""
    start = measured(terms={"cudagraph_bytes": 0, "activation_bytes": GIB})
    terms = calibrate(unsure(), [start], shape(), 0)
    assert (terms.graphs.estimate.low, terms.graphs.estimate.high) == (0, 0)
    assert terms.activation.expected == GIB


def test_a_pinned_cache_leaves_the_weights_alone():
    """With a KV cache of fixed size vLLM measures no peak: only the weights are known."""
    line = start_line(PLAN)
    for rank in line["memory"]:
        for name in ("consumed_bytes", "activation_bytes", "cudagraph_bytes", "kv_bytes"):
            del rank[name]
    start = measured_start(V32, ledger_of(line).starts[0])
    assert calibrate(unsure(), [start], shape(), 0).calibrated == ("weights",)


def test_a_cpu_start_measures_no_memory():
    """Its workers report what they requested, and that is no measurement."""
    cpu = plan_of(GOLDEN / "cpu-eight-ranks.yml")
    assert measured_start(V32, ledger_of(start_line(cpu)).starts[0]) is None


def test_versions_that_did_not_report_it_narrow_the_weights():
    """Before 0.27 "consumed memory" was not one measured number."""
    (start,) = ledger_of(start_line(PLAN)).starts
    found = measured_start(version_facts("0.19.0"), start)
    assert calibrate(unsure(), [found], shape(), 0).calibrated == ("weights",)
