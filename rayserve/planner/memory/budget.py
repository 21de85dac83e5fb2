"""How much memory is left for the KV cache, does it hold what is asked for, and how sure is that?

vLLM takes a share of the GPU, measures what weights, buffers and one step need, and gives the rest to
the KV cache. This module does the same sum with ranges, and judges the result.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from rayserve.planner.memory.ranges import Range, combined
from rayserve.planner.memory.terms import GraphMemory
from rayserve.planner.memory.versions import VersionFacts
from rayserve.units import GIB, MIB

CONTEXT = Range.gib(0.3, 0.5, 1.0, "CUDA context of a process, outside vLLM's count")
COMFORT = 0.05
"""Spare share of the requested memory from which "fits" needs no margin beside it."""


# ── the sum ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Terms:
    """What a rank needs beside the KV cache."""

    weights: Range
    activation: Range
    non_torch: Range
    buffers: Range
    graphs: GraphMemory
    calibrated: tuple[str, ...] = ()
    """Names of the terms that a real start narrowed."""


@dataclass(frozen=True)
class Budget:
    """One rank's memory; all in bytes. `kv` may be negative: so much is missing."""

    total_bytes: int
    requested_bytes: int
    terms: Terms
    counted: tuple[tuple[str, Range], ...]
    """The terms that come off `requested_bytes` in this version of vLLM, by name."""
    kv: Range
    outside: Range
    """What must fit beside `requested_bytes`: graphs beyond the estimate, or all of them."""
    ranks: int = 1
    """Of the whole replica."""
    pinned: bool = False
    """The KV cache has the size that was asked for, whatever is left."""
    overridden: bool = False
    """It has as many blocks as were asked for; vLLM asks for its share of the GPU all the same."""

    @property
    def fixed(self) -> bool:
        """Whether the size of the KV cache is not what is left."""
        return self.pinned or self.overridden

    @property
    def room(self) -> Range:
        """The largest KV cache that the GPU has memory for, whatever share of it vLLM asks for."""
        used = combined([*(term for _, term in self.counted), self.outside, CONTEXT])
        free = self.total_bytes
        return Range(free - used.high, free - used.expected, free - used.low)

    @property
    def spare(self) -> Range:
        """What the GPU has left when everything is there, the process's CUDA context included."""
        if self.fixed:
            room, kv = self.room, self.kv.expected
            return Range(room.low - kv, room.expected - kv, room.high - kv)
        used = combined([self.outside, CONTEXT])
        free = self.total_bytes - self.requested_bytes
        return Range(free - used.high, free - used.expected, free - used.low)

    def with_cache(self, kv_bytes: int) -> Budget:
        """The same rank with a KV cache of so many bytes (`num_gpu_blocks_override`)."""
        return replace(self, kv=Range.exact(kv_bytes, "asked for"), overridden=True)


def requested_bytes(total_bytes: int, utilization: float) -> int:
    """What vLLM takes of a GPU: ceil(total x utilization) (vllm/v1/worker/utils.py)."""
    return math.ceil(total_bytes * utilization)


def kv_budget(
    facts: VersionFacts,
    terms: Terms,
    *,
    total_bytes: int,
    utilization: float,
    pinned_kv_bytes: int = 0,
    ranks: int = 1,
) -> Budget:
    """The KV cache of one rank by the version's identity.

    requested - weights - non-torch - buffers - activation, and less the estimate for CUDA graphs from
    0.20. `total_bytes` is what CUDA reports, not the GPU's catalogue size.
    """
    counted = {
        "weights": terms.weights,
        "activation": terms.activation,
        "non_torch": terms.non_torch,
        "buffers": terms.buffers,
    }
    outside = terms.graphs.actual
    if facts.counts_graphs:
        counted["cuda_graphs"] = terms.graphs.estimate
        over = max(0, terms.graphs.actual.high - terms.graphs.estimate.expected)
        outside = Range(0, 0, over, terms.graphs.actual.basis)
    requested = requested_bytes(total_bytes, utilization)
    used = combined(list(counted.values()))
    kv = Range(requested - used.high, requested - used.expected, requested - used.low)
    if pinned_kv_bytes:
        kv = Range.exact(pinned_kv_bytes, "asked for")
    return Budget(
        total_bytes=total_bytes,
        requested_bytes=requested,
        terms=terms,
        counted=tuple(counted.items()),
        kv=kv,
        outside=outside,
        ranks=ranks,
        pinned=bool(pinned_kv_bytes),
    )


# ── the verdict ─────────────────────────────────────────────────────────────────────────────────


class Outcome(StrEnum):
    """What can be said, from best to worst."""

    FITS = "fits"
    MARGIN = "fits with margin"
    MEASURE = "within the uncertainty: measure"
    CANNOT = "cannot fit"


@dataclass(frozen=True)
class Verdict:
    """One rank's verdict. `margin_bytes`: what the low end leaves beyond one whole request."""

    outcome: Outcome
    margin_bytes: int
    reason: str

    @property
    def starts(self) -> bool | None:
        """Whether the engine will start; None where only a measurement tells."""
        if self.outcome is Outcome.MEASURE:
            return None
        return self.outcome is not Outcome.CANNOT

    @property
    def title(self) -> str:
        """The outcome, with its margin where that is small."""
        margin = f" {_gib(self.margin_bytes)}" if self.outcome is Outcome.MARGIN else ""
        return f"{self.outcome}{margin}"

    def __str__(self) -> str:
        return f"{self.title}: {self.reason}"


def judge(budget: Budget, request_bytes: int, *, free_bytes: int | None = None) -> Verdict:
    """Does one request of max_model_len fit the rank's KV cache, and all of it the GPU?

    `request_bytes`: the blocks of one such request. `free_bytes`: what the GPU has free at the start,
    where it is known: vLLM refuses to start below the requested memory.
    """
    margin = budget.kv.low - request_bytes
    if free_bytes is not None and free_bytes < budget.requested_bytes and not budget.pinned:
        short = f"{_gib(free_bytes)} of {_gib(budget.requested_bytes)} are free at the start"
        return Verdict(Outcome.CANNOT, margin, f"{short}: another process holds the rest")
    one = f"one whole request takes {_gib(request_bytes)}"
    left = f"the KV cache has {_gib(budget.kv.low)} to {_gib(budget.kv.high)}"
    if budget.kv.high < 0:
        left = f"{_gib(-budget.kv.high)} are missing before there is any KV cache"
    if budget.kv.high < request_bytes or budget.kv.high <= 0:
        return Verdict(Outcome.CANNOT, margin, f"{one}, and {left}")
    spare = budget.spare
    if budget.fixed and spare.high < 0:
        return Verdict(Outcome.CANNOT, margin, f"the GPU lacks {_gib(-spare.high)} at least")
    if margin < 0 or budget.kv.low <= 0:
        return Verdict(Outcome.MEASURE, margin, f"{one}, and {left}")
    # The first thing that vLLM asks: is the requested memory free, after NCCL and the context took
    # theirs? How much NCCL takes by then is at most what it takes in the end.
    before = budget.total_bytes - budget.requested_bytes - CONTEXT.high
    before -= budget.terms.non_torch.high if budget.ranks > 1 else 0
    if before < 0 and not budget.pinned and free_bytes is None:
        short = f"{_gib(-before)} may be taken by CUDA's context and NCCL"
        return Verdict(Outcome.MEASURE, margin, f"{short} of what is requested")
    # Without a fixed size the room of the step's peak is free while graphs are recorded.
    doubtful = spare.low if budget.fixed else spare.expected
    if doubtful < 0:
        short = f"{_gib(-doubtful)} may be missing for CUDA graphs and context"
        return Verdict(Outcome.MEASURE, margin, f"{short} beside what is requested")
    if margin < COMFORT * budget.requested_bytes:
        return Verdict(Outcome.MARGIN, margin, f"{one}, and {left}")
    return Verdict(Outcome.FITS, margin, f"{one}, and {left}")


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict that decides: the worst rank's, and of equal ones that with the least margin."""
    order = list(Outcome)
    return max(verdicts, key=lambda one: (order.index(one.outcome), -one.margin_bytes))


def measure_command(
    model: str,
    arguments: Mapping[str, object],
    *,
    layers: int,
    kinds: Sequence[str] = (),
    text_config: bool = False,
) -> str:
    """The command that measures the uncertain terms without the checkpoint's weights.

    Activation, logits and NCCL's buffers do not depend on depth, so a few layers of full width with
    random weights are enough, on the same GPUs. `arguments`: vLLM's own names, underscored; `True`
    makes a bare flag. `kinds`: config.json's `layer_types`, which are cut too. `text_config`: the model's config.json keeps its language model in one.
    """
    depth: dict[str, Any] = {"num_hidden_layers": layers}
    if kinds:
        depth["layer_types"] = list(kinds[:layers])
    overrides = {"text_config": depth} if text_config else depth
    words = ["vllm", "serve", model, "--load-format", "dummy"]
    words += ["--hf-overrides", json.dumps(overrides)]
    for name, value in arguments.items():
        if value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        words += [] if value is True else [str(value)]
    return shlex.join(words)


def _gib(value: int) -> str:
    """A size with two decimals, in MiB where GiB would show nothing of it."""
    return f"{value / GIB:.2f} GiB" if abs(value) >= GIB / 100 else f"{value / MIB:.2f} MiB"
