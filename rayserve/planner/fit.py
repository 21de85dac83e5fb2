"""What does a cut of the model leave for the KV cache on the spec's GPUs?

Exact where the architecture is known (memory/estimate.py); else bounds around the checkpoint's sum
(memory/bounded.py), marked so.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rayserve.engine import VLLM_VERSION
from rayserve.errors import SpecError
from rayserve.plan import MemoryEstimate, MemoryTerm
from rayserve.planner.catalogue import Gpu
from rayserve.planner.kv.cache import max_concurrency
from rayserve.planner.kv.layers import layer_bytes_per_token
from rayserve.planner.measuring import measure_start
from rayserve.planner.memory import simple as memory
from rayserve.planner.memory.bounded import Bounded, bounded
from rayserve.planner.memory.budget import (
    Budget,
    Outcome,
    Verdict,
    requested_bytes,
)
from rayserve.planner.memory.calibration import Measured
from rayserve.planner.memory.estimate import (
    Estimate,
    Setup,
    estimate,
    fullest_bytes,
    left_bytes,
    left_ranges,
    stage_bytes,
)
from rayserve.planner.memory.offload import read_offload
from rayserve.planner.memory.ranges import Range
from rayserve.planner.memory.simple import Cut
from rayserve.planner.memory.versions import Batch, version_facts
from rayserve.planner.profile import ModelProfile
from rayserve.planner.uncounted import uncounted
from rayserve.planner.weights.architecture import Architecture
from rayserve.planner.wishes import expected, fine_graphs
from rayserve.spec import ClusterSpec
from rayserve.units import GIB

BLOCK_TOKENS = 16
BLOCKS = "num_gpu_blocks_override"
LORA_BASIS = "LoRA slots: a bound"


@dataclass(frozen=True)
class EngineLimits:
    """What the memory of a step depends on."""

    step_tokens: int
    seqs: int
    length: int
    """max_model_len."""


def pinned_bytes(spec: ClusterSpec) -> int:
    """Bytes of a KV cache that the spec fixes; 0: it does not."""
    wanted = spec.limits.kv_cache_gib
    return int(wanted * GIB) if wanted != "auto" else 0


class Fit:
    """Memory of one model on one kind of GPU, for any cut and limits.

    `checkpoint_bytes`: of all its weights as they are loaded; needed where there is no architecture.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        profile: ModelProfile,
        architecture: Architecture | None,
        gpu: Gpu,
        checkpoint_bytes: int = 0,
        starts: Sequence[Measured] = (),
    ) -> None:
        self.spec = spec
        self.checkpoint_bytes = checkpoint_bytes
        self.profile = profile
        self.architecture = architecture
        self.gpu = gpu
        self.starts = tuple(starts)
        # What CUDA reports differs by driver; where a start tells, that is the total.
        self.total_bytes = min((one.total_bytes for one in starts), default=gpu.memory_bytes)
        self.facts = version_facts(VLLM_VERSION)
        self._weights = functools.cache(self._stage_weights)
        self._exact = functools.cache(self._solve)

    @property
    def requested_bytes(self) -> int:
        """What vLLM takes of a GPU."""
        return requested_bytes(self.total_bytes, self.spec.limits.gpu_memory_utilization)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of a KV cache that the spec fixes; 0: it does not."""
        return pinned_bytes(self.spec)

    @property
    def blocks(self) -> int:
        """Blocks of a KV cache that the spec fixes; 0: it does not."""
        return _whole(self.spec.engine_args.get(BLOCKS), 0)

    def block_range(self, cut: Cut, limits: EngineLimits) -> tuple[int, int, int]:
        """Blocks of a KV cache: the fewest that hold one request, most for sure, most at best."""
        if self.architecture is None:
            size = self.token_bytes(cut) * self._setup(cut, limits).block_size
            room = self._bounded(cut, limits).budget.room
            return (
                -(-limits.length * self.token_bytes(cut) // size),
                room.low // size,
                room.high // size,
            )
        found = self._exact(cut, limits)
        rooms = list(zip(found.budgets, found.layout.stage_block_bytes, strict=True))
        return (
            found.expected.blocks_per_request + 1,  # the null block, which no request gets
            min(one.room.low // block for one, block in rooms),
            min(one.room.high // block for one, block in rooms),
        )

    def weights(self, cut: Cut) -> int:
        """Weights on the GPU of model, adapters and draft model, on the fullest rank."""
        if self.architecture is None:
            model = memory.weights_range(self.profile, cut, self.checkpoint_bytes).expected
        else:
            setup = self._setup(cut, EngineLimits(1, 1, 1))
            model = fullest_bytes(self.architecture, setup, self._weights(cut))
        return model + self._lora(cut) + memory.draft_bytes(self.profile, cut)

    def left_bytes(self, cut: Cut) -> int:
        """Weights that stay in host memory, as far as cpu_offload_gb says, of the rank with most."""
        setup = self._setup(cut, EngineLimits(1, 1, 1))
        if self.architecture is not None:
            return left_bytes(self.architecture, setup)
        whole = memory.weights_range(self.profile, cut, self.checkpoint_bytes).low
        return min(setup.offload.most_bytes, whole)

    def left_range(self, cut: Cut) -> Range:
        """Weights that `cpu_offload_gb` leaves in host memory, of a rank, over all stages together."""
        assert self.architecture is not None  # the callers have looked
        left = left_ranges(self.architecture, self._setup(cut, EngineLimits(1, 1, 1)))
        return Range(
            sum(one.low for one in left),
            sum(one.expected for one in left),
            sum(one.high for one in left),
        )

    def token_bytes(self, cut: Cut) -> int:
        """Bytes of one token in the layers that keep all tokens, on the fullest rank."""
        kv_cache_dtype = self.spec.precision.kv_cache_dtype
        if self.architecture is None:
            return memory.kv_bytes_per_token(self.profile, cut, kv_cache_dtype)
        stages = self._exact(cut, EngineLimits(1, 1, 1)).stages
        return max(
            sum(layer_bytes_per_token(layer) for layer in stage if not layer.window)
            for stage in stages
        )

    def _uncounted(self) -> list[str]:
        return uncounted(self.spec, self.architecture, drafted=self.profile.draft is not None)

    def holds(self, cut: Cut, limits: EngineLimits) -> bool:
        """Whether nothing proves that vLLM would refuse to start."""
        return self._verdict(cut, limits).outcome is not Outcome.CANNOT

    def expects(self, cut: Cut, limits: EngineLimits) -> bool:
        """Whether it holds by what is expected too, where only bounds are known."""
        if self.architecture is not None:
            return self.holds(cut, limits)
        kv = self._bounded(cut, limits).budget.kv.expected
        return self.holds(cut, limits) and kv >= limits.length * self.token_bytes(cut)

    def _verdict(self, cut: Cut, limits: EngineLimits) -> Verdict:
        if self.architecture is None:
            return self._bounded(cut, limits).verdict
        return self._exact(cut, limits).verdict

    def sure(self, cut: Cut, limits: EngineLimits) -> bool:
        """Whether vLLM starts even where every term has its worst value, and every term is known."""
        return self._verdict(cut, limits).starts is True and not self._uncounted()

    def concurrency(
        self, cut: Cut, limits: EngineLimits, tokens: int
    ) -> tuple[float, float, float]:
        """Sequences of so many tokens that the KV cache holds at once: low, expected, high."""
        if self.architecture is None:
            kv, size = self._bounded(cut, limits).budget.kv, self.token_bytes(cut) * tokens
            return max(0, kv.low) / size, max(0, kv.expected) / size, max(0, kv.high) / size
        found = self._exact(cut, limits)
        low, middle, high = (
            max_concurrency(found.layout, capacity.num_blocks, found.settings, tokens)
            for capacity in (found.lowest, found.expected, found.highest)
        )
        return low, middle, high

    def block_tokens(self, cut: Cut, limits: EngineLimits) -> int:
        """Tokens of a block of an attention layer, which the prefix cache keeps as a whole."""
        if self.architecture is None:
            return BLOCK_TOKENS
        return self._exact(cut, limits).layout.block_size

    def estimate(self, cut: Cut, limits: EngineLimits) -> MemoryEstimate:
        """The plan's account of a GPU's memory: of the stage that decides."""
        memory = self._account(cut, limits)
        prompt, output = expected(self.spec, limits.length)
        low, middle, high = self.concurrency(cut, limits, prompt + output)
        return memory.model_copy(
            update={
                "request_tokens": prompt + output,
                "expected_concurrency": round(middle, 2),
                "expected_concurrency_low": round(low, 2),
                "expected_concurrency_high": round(high, 2),
            }
        )

    def stages(self, cut: Cut, limits: EngineLimits) -> list[MemoryEstimate]:
        """The account of each pipeline stage; of one where stages are not told apart."""
        told = range(cut.pipeline) if self.architecture is not None else [0]
        return [self._account(cut, limits, stage) for stage in told]

    def _account(self, cut: Cut, limits: EngineLimits, stage: int | None = None) -> MemoryEstimate:
        """Of a stage, or of the one that decides."""
        if self.architecture is None:
            return self._simple(cut, limits)
        found = self._exact(cut, limits)
        stage = found.decisive if stage is None else stage
        budget = found.budgets[stage]
        return MemoryEstimate(
            model="exact",
            **self._parts(budget, cut, last=stage == cut.pipeline - 1),
            kv_bytes_per_token=self.token_bytes(cut),
            kv_tokens=found.expected.printed_tokens,
            max_concurrency=round(found.expected.max_concurrency, 2),
            max_concurrency_low=round(found.lowest.max_concurrency, 2),
            max_concurrency_high=round(found.highest.max_concurrency, 2),
            verdict=found.verdict.title,
            because=found.verdict.reason,
            calibrated=list(budget.terms.calibrated),
            uncounted=self._uncounted(),
        )

    def refusal(self, cut: Cut, limits: EngineLimits) -> tuple[str, str]:
        """What is needed on each GPU, and what there is, where it does not fit."""
        gpu, share = self.gpu, self.spec.limits.gpu_memory_utilization
        there = f"{self.requested_bytes / GIB:.1f} GiB, {share:.0%} of {gpu.memory_gib} GiB"
        if self.architecture is None:
            weights = memory.weights_range(self.profile, cut, self.checkpoint_bytes).low
            cache = max(self.pinned_bytes, limits.length * self.token_bytes(cut))
            needed = (
                f"{weights / GIB:.1f} GiB of weights at least and {cache / GIB:.1f} GiB of KV cache "
                f"(one sequence of {limits.length} tokens, or more) on each {gpu.name}"
            )
            return needed, f"{there}; {self._bounded(cut, limits).verdict.reason}"
        found = self._exact(cut, limits)
        counted = found.budgets[found.decisive].counted
        sizes = [(name, f"{term.expected / GIB:.1f}") for name, term in counted]
        parts = ", ".join(f"{name} {size}" for name, size in sizes if size != "0.0")
        request = max(found.expected.request_bytes) / GIB
        needed = (
            f"{request:.1f} GiB of KV cache for one sequence of {limits.length} tokens on each "
            f"{gpu.name}, beside {self.weights(cut) / GIB:.1f} GiB of weights"
        )
        if self.blocks:
            return needed, f"{BLOCKS}: {self.blocks}; {found.verdict.reason}"
        if self.pinned_bytes:
            return needed, f"kv_cache_gib: {self.pinned_bytes / GIB:g}; {found.verdict.reason}"
        return needed, f"{there}, of which are taken: {parts}; {found.verdict.reason}"

    def measure(self, cut: Cut, limits: EngineLimits) -> str:
        """The vLLM command that measures the uncertain terms on these GPUs; empty: none is needed."""
        if self._verdict(cut, limits).outcome is not Outcome.MEASURE:
            return ""
        batch = Batch(limits.step_tokens, limits.seqs)
        return measure_start(self.spec, self.profile, cut, batch, limits.length)

    def _solve(self, cut: Cut, limits: EngineLimits) -> Estimate:
        assert self.architecture is not None  # the callers have looked
        try:
            return estimate(self.architecture, self._setup(cut, limits), self._weights(cut))
        except SpecError as error:
            if error.where is not None:
                raise
            where = self.spec.where("model", "config")
            raise SpecError(error.needed, found=error.found, do=error.do, where=where) from None

    def _setup(self, cut: Cut, limits: EngineLimits) -> Setup:
        spec = self.spec
        lora, draft = self._lora(cut), memory.draft_bytes(self.profile, cut)
        guess = spec.speculative
        experts = bool(spec.engine_args.get("enable_expert_parallel"))
        return Setup(
            total_bytes=self.total_bytes,
            capability=self.gpu.compute_capability,
            rocm=not self.gpu.nvidia,
            facts=self.facts,
            batch=Batch(limits.step_tokens, limits.seqs),
            utilization=spec.limits.gpu_memory_utilization,
            max_model_len=limits.length,
            tensor=cut.tensor,
            pipeline=cut.pipeline,
            expert_ranks=cut.tensor if experts else 1,
            kv_cache_dtype=spec.precision.kv_cache_dtype,
            graphs=spec.scheduling.cuda_graphs is not False,
            interactivity=fine_graphs(spec),
            prefix_caching=spec.scheduling.prefix_caching,
            pinned_kv_bytes=self.pinned_bytes,
            extra=Range(lora // 2, lora, lora, LORA_BASIS if lora else ""),
            draft_weights=Range(int(0.97 * draft), draft, int(1.05 * draft)),
            images=spec.limits.max_images,
            hybrid_manager=not spec.engine_args.get("disable_hybrid_kv_cache_manager"),
            blocks_override=self.blocks,
            block_size=_whole(spec.engine_args.get("block_size"), BLOCK_TOKENS),
            offload=read_offload(spec.engine_args),
            draft=guess is not None and guess.method == "mtp",
            extra_caches=memory.draft_caches(self.profile, cut, spec.precision.kv_cache_dtype),
            starts=self.starts,
            speculative_tokens=guess.num_tokens if guess is not None else 0,
        )

    def _stage_weights(self, cut: Cut) -> tuple[int, ...]:
        assert self.architecture is not None
        return stage_bytes(self.architecture, self._setup(cut, EngineLimits(1, 1, 1)))

    def _lora(self, cut: Cut) -> int:
        lora = self.spec.lora
        return memory.lora_bytes(self.profile, cut, slots=len(lora.adapters), rank=lora.max_rank)

    def _bounded(self, cut: Cut, limits: EngineLimits) -> Bounded:
        return bounded(
            self.profile,
            self._setup(cut, limits),
            checkpoint_bytes=self.checkpoint_bytes,
            request_bytes=limits.length * self.token_bytes(cut),
        )

    def _simple(self, cut: Cut, limits: EngineLimits) -> MemoryEstimate:
        found, token_bytes = self._bounded(cut, limits), self.token_bytes(cut)
        kv = found.budget.kv

        def tokens(kv_bytes: int) -> int:
            return max(0, kv_bytes) // token_bytes // BLOCK_TOKENS * BLOCK_TOKENS

        return MemoryEstimate(
            model="simple",
            **self._parts(found.budget, cut, last=True),
            kv_bytes_per_token=token_bytes,
            kv_tokens=tokens(kv.expected),
            max_concurrency=round(tokens(kv.expected) / limits.length, 2),
            max_concurrency_low=round(tokens(kv.low) / limits.length, 2),
            max_concurrency_high=round(tokens(kv.high) / limits.length, 2),
            verdict=found.verdict.title,
            because=found.verdict.reason,
            uncounted=self._uncounted(),
        )

    def _parts(self, budget: Budget, cut: Cut, *, last: bool) -> dict[str, Any]:
        """The fields of the account that a budget fills; `last`: its rank holds the draft model."""
        lora = self._lora(cut)
        draft = memory.draft_bytes(self.profile, cut) if last else 0
        terms = dict(budget.counted)
        rest = [term for name, term in terms.items() if name not in ("weights", "activation")]
        return {
            "total_bytes": budget.total_bytes,
            "requested_bytes": budget.requested_bytes,
            "weights_bytes": terms["weights"].expected - lora - draft,
            "activation_bytes": terms["activation"].expected,
            "overhead_bytes": sum(term.expected for term in rest),
            "lora_bytes": lora,
            "draft_bytes": draft,
            "kv_bytes": max(0, budget.kv.expected),
            "kv_low_bytes": max(0, budget.kv.low),
            "kv_high_bytes": max(0, budget.kv.high),
            "terms": [_term(name, term) for name, term in terms.items()],
        }


def _whole(value: object, default: int) -> int:
    """An engine argument that is a whole number, else the default."""
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _term(name: str, term: Range) -> MemoryTerm:
    return MemoryTerm(
        name=name,
        low_bytes=term.low,
        expected_bytes=term.expected,
        high_bytes=term.high,
        basis=term.basis,
    )
