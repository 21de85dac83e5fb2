"""What did real starts measure, and which terms of the next start does that narrow?

A measurement holds for what it depends on: weights for the cut; what stays for the cut, max_num_seqs
and max_model_len; the peak also for the tokens of a step; CUDA graphs for cut and step. Each pipeline
stage is calibrated by its own ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rayserve.planner.memory.budget import Terms
from rayserve.planner.memory.ranges import Range
from rayserve.planner.memory.terms import GraphMemory
from rayserve.planner.memory.versions import Batch, VersionFacts
from rayserve.starts import RankMemory, Start
from rayserve.units import GIB, MIB

AGAIN = 0.02
AGAIN_BYTES = 64 * MIB
"""How far a second start of the same engine may stray, beyond the spread of those that are known: three
starts of one GLM-5.2 on GH200 (0.23) agree within 0.01 GiB in all terms but one, whose setting
differed. Weights are torch's own count of what is allocated, and get no allowance."""


@dataclass(frozen=True)
class Shape:
    """What the measured terms depend on, beside model, GPU, version and settings."""

    tensor: int
    pipeline: int
    batch: Batch
    length: int
    """max_model_len."""


@dataclass(frozen=True)
class StageMemory:
    """What the fullest rank of a stage measured, in bytes; None: not reported."""

    weights: int | None
    headroom: int | None
    """Peak beyond what stays, without CUDA graphs."""
    rest: int | None
    """What stays beside the weights: non-torch memory and torch's own buffers."""
    graphs: int | None


@dataclass(frozen=True)
class Measured:
    """What one start of the engine measured on GPUs."""

    shape: Shape
    total_bytes: int
    """Of the smallest GPU."""
    stages: tuple[StageMemory, ...]


def measured_start(facts: VersionFacts, start: Start) -> Measured | None:
    """The memory of a start; None where its workers measured none, as on the CPU engine."""
    tensor, pipeline = start.cut
    totals = [rank.total_bytes for rank in start.memory if rank.total_bytes is not None]
    if len(totals) < len(start.memory):
        return None
    ranks = sorted(start.memory, key=lambda rank: rank.rank)
    # vLLM numbers the ranks of a stage one after the other.
    stages = [ranks[stage * tensor : (stage + 1) * tensor] for stage in range(pipeline)]
    engine = start.engine
    batch = Batch(engine.max_num_batched_tokens, engine.max_num_seqs)
    return Measured(
        shape=Shape(tensor, pipeline, batch, engine.max_model_len),
        total_bytes=min(totals),
        stages=tuple(_stage(facts, stage) for stage in stages),
    )


def _stage(facts: VersionFacts, ranks: Sequence[RankMemory]) -> StageMemory:
    """The rank with the least left for its cache: all terms are those of one rank, as they add up."""
    fullest = max(
        ranks,
        key=lambda rank: (
            (rank.consumed_bytes or 0) + (rank.activation_bytes or 0),
            rank.weights_bytes or 0,
        ),
    )
    weights, graphs = fullest.weights_bytes, fullest.cudagraph_bytes
    consumed, peak = fullest.consumed_bytes, fullest.activation_bytes
    if not facts.measures_consumed or consumed is None or peak is None or weights is None:
        return StageMemory(weights, None, None, None)
    if facts.activation_includes_graphs and facts.counts_graphs:
        if graphs is None or graphs > peak:  # the estimate was switched off, so it is in neither
            return StageMemory(weights, None, consumed - weights, None)
        peak -= graphs
    return StageMemory(weights, peak, consumed - weights, graphs)


def calibrate(terms: Terms, starts: Iterable[Measured], shape: Shape, stage: int) -> Terms:
    """The terms of a stage, narrowed by starts of the same model on the same GPUs and vLLM.

    `calibrated` of the result names what was measured; other starts change nothing.
    """
    cut = [
        one
        for one in starts
        if (one.shape.tensor, one.shape.pipeline) == (shape.tensor, shape.pipeline)
    ]
    stays = [
        one.stages[stage]
        for one in cut
        if (one.shape.batch.seqs, one.shape.length) == (shape.batch.seqs, shape.length)
    ]
    same = [one.stages[stage] for one in cut if one.shape == shape]
    step = [one.stages[stage] for one in cut if one.shape.batch == shape.batch]
    buffers = terms.non_torch + terms.buffers
    found = {
        "weights": _again([one.stages[stage].weights for one in cut], terms.weights, exact=True),
        "activation": _again([one.headroom for one in same], terms.activation),
        "non_torch": _again([one.rest for one in stays], buffers),
        "cuda_graphs": _again([one.graphs for one in step], terms.graphs.estimate),
    }
    changes: dict[str, Any] = {name: value for name, value in found.items() if value is not None}
    names = tuple(changes)
    if "non_torch" in changes:
        changes["buffers"] = Range.exact(0, "within non_torch: one measured number")
    if "cuda_graphs" in changes:
        # vLLM measures its estimate of the graphs; what they then take stays as uncertain as it was.
        estimate, actual = changes.pop("cuda_graphs"), terms.graphs.actual
        low, high = min(actual.low, estimate.low), max(actual.high, estimate.high)
        changes["graphs"] = GraphMemory(estimate, Range(low, estimate.expected, high, actual.basis))
    return replace(terms, **changes, calibrated=names)


def _again(values: Sequence[int | None], derived: Range, *, exact: bool = False) -> Range | None:
    """The range of the next start: that of the known ones, and an allowance; None: none is known."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    count = f"{len(known)} start{'s' if len(known) > 1 else ''}"
    basis = (
        f"measured: {count} of this model on such GPUs; "
        f"derived: {derived.low / GIB:.2f}-{derived.high / GIB:.2f} GiB"
    )
    # In eager mode there are no graphs: nothing strays.
    stray, share = (0, 0.0) if exact or not known[-1] else (AGAIN_BYTES, AGAIN)
    low = max(0, math.floor(known[0] * (1 - share)) - stray)
    high = math.ceil(known[-1] * (1 + share)) + stray
    return Range(low, known[len(known) // 2], high, basis)
