"""What does a cut of the model leave for the KV cache on the spec's GPUs?

Exact where the architecture is known (estimate.py); else the simple sum of memory.py, marked so.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from rayserve.engine import VLLM_VERSION
from rayserve.errors import SpecError
from rayserve.plan import MemoryEstimate, MemoryTerm
from rayserve.planner.catalogue import Gpu
from rayserve.planner.kv.caches import layer_caches
from rayserve.planner.kv.layers import (
    CacheKind,
    LayerCache,
    attention_layer,
    layer_bytes_per_token,
)
from rayserve.planner.memory import simple as memory
from rayserve.planner.memory.budget import Outcome, measure_command
from rayserve.planner.memory.estimate import Estimate, Setup, estimate, stage_bytes
from rayserve.planner.memory.ranges import GIB, Range
from rayserve.planner.memory.simple import Cut
from rayserve.planner.memory.versions import Batch, version_facts
from rayserve.planner.profile import ModelProfile
from rayserve.planner.weights.architecture import Architecture
from rayserve.spec import ClusterSpec

BLOCK_TOKENS = 16
MEASURED_LAYERS = 4
"""Of full width on each stage: what is measured does not depend on depth."""


@dataclass(frozen=True)
class EngineLimits:
    """What the memory of a step depends on."""

    step_tokens: int
    seqs: int
    length: int
    """max_model_len."""


class Fit:
    """Memory of one model on one kind of GPU, for any cut and limits."""

    def __init__(
        self, spec: ClusterSpec, profile: ModelProfile, architecture: Architecture | None, gpu: Gpu
    ) -> None:
        self.spec = spec
        self.profile = profile
        self.architecture = architecture
        self.gpu = gpu
        self.facts = version_facts(VLLM_VERSION)
        self._weights = functools.cache(self._stage_weights)

    @property
    def requested_bytes(self) -> int:
        """What vLLM takes of a GPU."""
        return int(self.gpu.memory_bytes * self.spec.limits.gpu_memory_utilization)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of a KV cache that the spec fixes; 0: it does not."""
        wanted = self.spec.limits.kv_cache_gib
        return int(wanted * GIB) if wanted != "auto" else 0

    def weights(self, cut: Cut) -> int:
        """Weights of the model, its adapters and its draft model, on the fullest rank."""
        if self.architecture is None:
            model = memory.weights_bytes(self.profile, cut, self.spec.model.checkpoint_bytes)
        else:
            model = max(self._weights(cut))
        return model + self._lora(cut) + memory.draft_bytes(self.profile, cut)

    def token_bytes(self, cut: Cut) -> int:
        """Bytes of one token in the layers that keep all tokens, on the fullest rank."""
        kv_cache_dtype = self.spec.precision.kv_cache_dtype
        if self.architecture is None:
            return memory.kv_bytes_per_token(self.profile, cut, kv_cache_dtype)
        stages = layer_caches(
            self.architecture,
            tensor=cut.tensor,
            pipeline=cut.pipeline,
            kv_cache_dtype=kv_cache_dtype,
        )
        stages[-1] += self._draft_caches(cut)
        return max(
            sum(layer_bytes_per_token(layer) for layer in stage if not layer.window)
            for stage in stages
        )

    def _draft_caches(self, cut: Cut) -> list[LayerCache]:
        draft = self.profile.draft
        if draft is None:
            return []
        layer = attention_layer(
            CacheKind.FULL,
            kv_heads=draft.kv_heads,
            tensor=cut.tensor,
            head_dim=draft.head_dim,
            kv_cache_dtype=self.spec.precision.kv_cache_dtype,
            model_bytes=draft.dtype_bits // 8,
        )
        return [layer] * draft.layers

    def holds(self, cut: Cut, limits: EngineLimits) -> bool:
        """Whether nothing proves that vLLM would refuse to start."""
        if self.architecture is None:
            needed = max(self.pinned_bytes, limits.length * self.token_bytes(cut))
            return self.weights(cut) + needed <= self.requested_bytes
        return self._exact(cut, limits).verdict.outcome is not Outcome.CANNOT

    def longest(self, cut: Cut, limits: EngineLimits) -> int:
        """The longest request that could fit, in tokens; 0: none."""
        if self.architecture is None:
            return (self.requested_bytes - self.weights(cut)) // self.token_bytes(cut)
        return self._exact(cut, limits).highest.estimated_max_model_len

    def estimate(self, cut: Cut, limits: EngineLimits) -> MemoryEstimate:
        """The plan's account of a GPU's memory."""
        if self.architecture is None:
            return self._simple(cut, limits)
        found = self._exact(cut, limits)
        budget = found.poorest
        lora, draft = self._lora(cut), memory.draft_bytes(self.profile, cut)
        terms = dict(budget.counted)
        overhead = sum(
            term.expected for name, term in terms.items() if name not in ("weights", "activation")
        )
        return MemoryEstimate(
            model="exact",
            total_bytes=budget.total_bytes,
            requested_bytes=budget.requested_bytes,
            weights_bytes=terms["weights"].expected - lora - draft,
            activation_bytes=terms["activation"].expected,
            overhead_bytes=overhead,
            lora_bytes=lora,
            draft_bytes=draft,
            kv_bytes=max(0, budget.kv.expected),
            kv_low_bytes=max(0, budget.kv.low),
            kv_high_bytes=max(0, budget.kv.high),
            kv_bytes_per_token=self.token_bytes(cut),
            kv_tokens=found.expected.printed_tokens,
            max_concurrency=round(found.expected.max_concurrency, 2),
            max_concurrency_low=round(found.lowest.max_concurrency, 2),
            max_concurrency_high=round(found.highest.max_concurrency, 2),
            verdict=str(found.verdict).removesuffix(f": {found.verdict.reason}"),
            because=found.verdict.reason,
            terms=[_term(name, term) for name, term in terms.items()],
            uncounted=self._uncounted(),
        )

    def measure(self, cut: Cut, limits: EngineLimits) -> str:
        """The vLLM command that measures the uncertain terms on these GPUs; empty: none is needed."""
        if self.architecture is None:
            return ""
        if self._exact(cut, limits).verdict.outcome is not Outcome.MEASURE:
            return ""
        arguments = {
            "tensor_parallel_size": cut.tensor,
            "pipeline_parallel_size": cut.pipeline,
            "max_model_len": limits.length,
            "max_num_seqs": limits.seqs,
            "max_num_batched_tokens": limits.step_tokens,
            "gpu_memory_utilization": self.spec.limits.gpu_memory_utilization,
        }
        return measure_command(
            self.spec.model.path or self.spec.model.hf_id,
            arguments,
            layers=MEASURED_LAYERS * cut.pipeline,
            text_config=self.profile.multimodal,
        )

    def _exact(self, cut: Cut, limits: EngineLimits) -> Estimate:
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
        extra = self._lora(cut) + memory.draft_bytes(self.profile, cut)
        guess = spec.speculative
        return Setup(
            total_bytes=self.gpu.memory_bytes,
            capability=self.gpu.compute_capability,
            rocm=not self.gpu.nvidia,
            facts=self.facts,
            batch=Batch(limits.step_tokens, limits.seqs),
            utilization=spec.limits.gpu_memory_utilization,
            max_model_len=limits.length,
            tensor=cut.tensor,
            pipeline=cut.pipeline,
            kv_cache_dtype=spec.precision.kv_cache_dtype,
            graphs=spec.scheduling.cuda_graphs is not False,
            interactivity=True,
            prefix_caching=spec.scheduling.prefix_caching,
            pinned_kv_bytes=self.pinned_bytes,
            extra=(Range.exact(extra),) if extra else (),
            draft=guess is not None and guess.method == "mtp",
            extra_caches=tuple(self._draft_caches(cut)),
            speculative_tokens=guess.num_tokens if guess is not None else 0,
        )

    def _stage_weights(self, cut: Cut) -> tuple[int, ...]:
        assert self.architecture is not None
        return stage_bytes(self.architecture, self._setup(cut, EngineLimits(1, 1, 1)))

    def _lora(self, cut: Cut) -> int:
        lora = self.spec.lora
        return memory.lora_bytes(self.profile, cut, slots=len(lora.adapters), rank=lora.max_rank)

    def _uncounted(self) -> list[str]:
        """What takes GPU memory but stands in no term."""
        guess = self.spec.speculative
        if guess is None or guess.method in ("ngram", "suffix") or guess.config:
            return []
        if guess.method == "mtp":
            known = self.spec.model.checkpoint_bytes or (
                self.architecture is not None and self.architecture.draft
            )
            return [] if known else ["the layers that guess (mtp): give model.checkpoint_bytes"]
        return [f"the draft model {guess.model}: give speculative.config"]

    def _simple(self, cut: Cut, limits: EngineLimits) -> MemoryEstimate:
        profile, graphs = self.profile, self.spec.scheduling.cuda_graphs is not False
        weights = memory.weights_bytes(profile, cut, self.spec.model.checkpoint_bytes)
        activation = memory.activation_bytes(
            profile, cut, step_tokens=limits.step_tokens, seqs=limits.seqs
        )
        overhead = memory.overhead_bytes(cut, graphs=graphs)
        lora, draft = self._lora(cut), memory.draft_bytes(profile, cut)
        left = self.requested_bytes - weights - activation - overhead - lora - draft
        kv = self.pinned_bytes or left
        token_bytes = self.token_bytes(cut)
        tokens = max(0, kv) // token_bytes // BLOCK_TOKENS * BLOCK_TOKENS
        return MemoryEstimate(
            model="simple",
            total_bytes=self.gpu.memory_bytes,
            requested_bytes=self.requested_bytes,
            weights_bytes=weights,
            activation_bytes=activation,
            overhead_bytes=overhead,
            lora_bytes=lora,
            draft_bytes=draft,
            kv_bytes=max(0, kv),
            kv_bytes_per_token=token_bytes,
            kv_tokens=tokens,
            max_concurrency=round(tokens / limits.length, 2),
            uncounted=self._uncounted(),
        )


def _term(name: str, term: Range) -> MemoryTerm:
    return MemoryTerm(
        name=name,
        low_bytes=term.low,
        expected_bytes=term.expected,
        high_bytes=term.high,
        basis=term.basis,
    )
