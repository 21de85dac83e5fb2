"""What does a spec come to on its hardware? Cut, place and limits of one replica, or why there is none.

A plan is made from it, and so is every other way that a plan proposes: what would be refused is not told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rayserve.errors import RayserveError
from rayserve.plan import Placement
from rayserve.planner.arguments import check_engine_args, check_formats
from rayserve.planner.catalogue import Gpu, accelerator_type, find_gpu
from rayserve.planner.checkpoint import checkpoint_sum
from rayserve.planner.fit import EngineLimits, Fit
from rayserve.planner.lengths import Tried, Try
from rayserve.planner.memory.offload import read_offload
from rayserve.planner.memory.simple import Cut
from rayserve.planner.obstacles import Obstacles, check_format, check_hosts
from rayserve.planner.placement import choose_cut, place, sizes_by_heads
from rayserve.planner.positions import check_rope, rope_notes
from rayserve.planner.profile import ModelProfile
from rayserve.planner.replicas import check_replicas
from rayserve.planner.sizing import Sizing, holds, size
from rayserve.planner.subject import (
    check_guess,
    check_method,
    known_architecture,
    read_model_profile,
)
from rayserve.planner.timing import Timing, read_timing
from rayserve.planner.weights.architecture import Architecture
from rayserve.spec import ClusterSpec, NodePool, serving_pool
from rayserve.spec.rules import first_problem


@dataclass(frozen=True)
class Weights:
    """What is known of the model, as `build_plan` takes it."""

    config: Mapping[str, Any] | None
    draft_config: Mapping[str, Any] | None
    stored: Mapping[str, int]
    _architectures: dict[tuple[str, str], Architecture | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def architecture(self, spec: ClusterSpec, profile: ModelProfile) -> Architecture | None:
        """The model layer by layer; None where it is not known.

        Read once for each precision: what is tried in a spec's place seldom changes that.
        """
        key = (spec.precision.dtype, spec.precision.quantization)
        if key not in self._architectures:
            self._architectures[key] = known_architecture(spec, profile, self.config)
        return self._architectures[key]


@dataclass(frozen=True)
class Settled:
    """One replica, and what it follows from."""

    spec: ClusterSpec
    profile: ModelProfile
    gpu: Gpu | None
    architecture: Architecture | None
    fit: Fit | None
    obstacles: Obstacles | None
    cut: Cut
    placement: Placement
    timing: Timing | None
    sizing: Sizing
    told: list[str]
    """What should be known of formats and cut."""

    @property
    def pool(self) -> NodePool:
        """The node pool that carries it."""
        return serving_pool(self.spec)

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.cut.tensor * self.cut.pipeline

    @property
    def tensor_sizes(self) -> tuple[int, ...]:
        """Sizes of tensor parallelism on a host that the model allows; empty: not known."""
        return self.obstacles.tensor_sizes(self.pool) if self.obstacles is not None else ()

    @property
    def limits(self) -> EngineLimits:
        """Its limits, as estimates take them."""
        sizing = self.sizing
        return EngineLimits(
            sizing.max_num_batched_tokens.value,
            sizing.max_num_seqs.value,
            sizing.max_model_len.value,
        )


Attempt = Callable[[ClusterSpec], Settled | None]
"""What another spec of the same model would come to; None: it would be refused."""


def settle(spec: ClusterSpec, weights: Weights, attempt: Try | None) -> Settled:
    """What the spec comes to, by calculation alone.

    `attempt` plans what notes and refusals tell people to write; None: nobody reads them.

    Raises:
        SpecError: a value that this hardware or model does not take.
        EngineArgumentError: an entry of `engine_args` that vLLM does not take.
        DoesNotFitError: the hardware cannot hold it.
    """
    check_engine_args(spec)
    profile = read_model_profile(spec, weights.config, weights.draft_config)
    check_rope(spec, profile, weights.config or {})
    pool = serving_pool(spec)
    gpu = find_gpu(spec, pool)
    label = accelerator_type(spec, pool, gpu)
    check_formats(spec, gpu)
    check_method(spec, profile)
    architecture = weights.architecture(spec, profile)
    check_guess(spec, architecture, weights.config or {})
    fit = judge(spec, profile, architecture, gpu, weights.stored)
    obstacles = None
    if architecture is not None and gpu is not None:
        obstacles = Obstacles(spec, architecture, weights.config or {}, gpu)
    sizes = obstacles.tensor_sizes(pool) if obstacles is not None else ()
    cut = choose_cut(spec, pool, profile, lambda cut: holds(spec, profile, fit, cut), sizes)
    left = fit.left_bytes(cut) if fit is not None and read_offload(spec.engine_args) else 0
    check_hosts(spec, pool, cut, left, attempt)
    told = (
        check_format(spec, weights.config or {}, gpu)
        if obstacles is None
        else obstacles.check(pool, cut)
    )
    told = [*told, *rope_notes(spec, profile)]
    timing = read_timing(fit)
    sizing = size(spec, profile, fit, cut, timing, attempt)
    ways = sizes or sizes_by_heads(profile, pool.gpus_per_host)
    check_replicas(spec, pool, cut, (ways, profile.layers), attempt)
    placement = place(pool, cut, label)
    return Settled(
        spec, profile, gpu, architecture, fit, obstacles, cut, placement, timing, sizing, told
    )


def attempts(weights: Weights) -> Attempt:
    """Tries other specs of the same model, as a plan of each without real starts would."""

    def attempt(spec: ClusterSpec) -> Settled | None:
        if first_problem(spec) is not None:
            return None
        try:
            return settle(spec, weights, None)
        except RayserveError:
            return None

    return attempt


def tries(attempt: Attempt) -> Try:
    """The same trial, as remedies ask it."""

    def tried(spec: ClusterSpec) -> Tried | None:
        made = attempt(spec)
        if made is None:
            return None
        sure = made.fit is None or made.fit.sure(made.cut, made.limits)
        return Tried(made.cut, made.limits, sure)

    return tried


def judge(
    spec: ClusterSpec,
    profile: ModelProfile,
    architecture: Architecture | None,
    gpu: Gpu | None,
    stored: Mapping[str, int],
) -> Fit | None:
    """The judge of memory; None without GPUs."""
    if gpu is None:
        return None
    return Fit(
        spec, profile, architecture, gpu, checkpoint_sum(spec, profile, architecture, stored)
    )
