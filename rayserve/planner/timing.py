"""How soon do tokens come from a replica with these limits, and is that what users were promised?

One model on one kind of GPU, for any cut and limits; the figures are those of `planner/speed`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

from rayserve.engine import VLLM_VERSION
from rayserve.errors import SpecError
from rayserve.plan import FirstTokenTime, LatencyEstimate, LatencyTerm, NextTokenTime
from rayserve.planner.fit import EngineLimits, Fit
from rayserve.planner.memory.offload import read_offload
from rayserve.planner.memory.simple import Cut
from rayserve.planner.memory.versions import Batch, capture_sizes, version_facts
from rayserve.planner.speed import latency
from rayserve.planner.speed.latency import Estimate, Setting, Traffic
from rayserve.planner.speed.rooflines import Span
from rayserve.planner.speed.traffic import fp4_compute, traffic
from rayserve.planner.weights.architecture import Architecture
from rayserve.planner.weights.modules import MLA
from rayserve.planner.wishes import compilation, expected
from rayserve.spec import serving_pool

PROMPTS = (4096, 32768)
CONTEXTS = (16384,)
BATCHES = (1, 8, 32)
NEAR = 1.1
"""Rows of the table between the expected workload and max_model_len, which has none of its own where
it is that near."""
SHOWN_MS = 0.05
"""Terms that stay below are left out."""
HALF = 2
"""Bytes of an element of bf16 and fp16, whose rates are known."""
TIMED_ELSE = (
    "data_parallel_size",
    "decode_context_parallel_size",
    "enable_dbo",
    "offload_group_size",
    "prefill_context_parallel_size",
)
"""Engine arguments that change latencies in ways that no term follows."""
PCIE_SHARES = (0.5, 0.85)
"""Assumption: share of the peak of PCIe that kernels reach which read weights in host memory in place.
Copies of large blocks reach 0.8-0.86."""
FP4_NOTE = "4-bit products are counted at the rate of fp8, so a first token may beat its bound."
EXPERTS_NOTE = "Expert parallelism: all ranks are taken to be equally busy, and routers are uneven."
LATENT_NOTE = (
    "Latent attention: of the one published run (DeepSeek-R1 AWQ on 8 H100, an earlier vLLM) a token took "
    "twice as long as the upper end here."
)
ONLY_CACHED = "Only prompts that are in the prefix cache can keep it."
NETWORK_NOTE = "Stages on different hosts: the network is taken to be as fast as links within one."


def read_timing(fit: Fit | None) -> Timing | None:
    """Latencies of the model of `fit`; None for the CPU engine, and where the architecture or the rates
    of its compute type are not known.
    """
    architecture = fit.architecture if fit is not None else None
    if fit is None or architecture is None or architecture.element_bytes != HALF:
        return None
    return Timing(fit, architecture)


class Timing:
    """Latencies of one model on one kind of GPU."""

    def __init__(self, fit: Fit, architecture: Architecture) -> None:
        self.spec = fit.spec
        self.gpu = fit.gpu
        self._fit = fit
        self._architecture = architecture
        self._traffic = functools.cache(self._read)
        self._offload = functools.cache(self._host_weights)

    def token(self, cut: Cut, limits: EngineLimits, batch: int, context: int) -> Estimate:
        """Time per output token of each of `batch` sequences."""
        return latency.tpot(self._traffic(cut), self._setting(cut, limits), batch, context)

    def first(self, cut: Cut, limits: EngineLimits, prompt: int, cached: int = 0) -> Estimate:
        """Time to the first token of a prompt that has the engine to itself."""
        setting = self._setting(cut, limits)
        return latency.ttft(self._traffic(cut), setting, prompt, cached_tokens=cached)

    def pause(self, cut: Cut, limits: EngineLimits) -> Estimate:
        """What a running answer waits for while a step reads as much of a prompt as it may."""
        tokens = min(limits.step_tokens, limits.length)
        return latency.chunk(self._traffic(cut), self._setting(cut, limits), tokens)

    def eager_price(self, cut: Cut, limits: EngineLimits) -> Span:
        """What a token of one sequence takes longer without CUDA graphs."""
        prompt, output = expected(self.spec, limits.length)
        setting = self._setting(cut, limits)
        return latency.eager_price(self._traffic(cut), setting, 1, prompt + output // 2)

    def table(self, cut: Cut, limits: EngineLimits) -> LatencyEstimate:
        """The plan's rows: the expected workload first, then longer ones up to max_model_len.

        A batch has no more sequences than the KV cache holds at once.
        """
        setting, length = self._setting(cut, limits), limits.length
        prompt, output = expected(self.spec, length)
        longest = max(prompt, length - output)
        prompts = [prompt, *(size for size in PROMPTS if prompt < size < longest), longest]
        context = prompt + output // 2
        contexts = [context, *(size for size in CONTEXTS if context < size < length)]
        contexts += [length] if length > NEAR * context else []
        return LatencyEstimate(
            ttft=[
                self._first_row(cut, limits, size, cached)
                for size in dict.fromkeys(prompts)
                for cached in dict.fromkeys((0, self._cached(size, setting)))
            ],
            tpot=[
                self._next_row(cut, limits, batch, size)
                for size in dict.fromkeys(contexts)
                for batch in self._batches(cut, limits, size)
            ],
            notes=self._notes(cut, setting),
        )

    def promises(self, cut: Cut, limits: EngineLimits) -> list[str]:
        """Where the expected workload misses what users are promised, or may miss it.

        Raises:
            SpecError: a promise below the bound of these GPUs: no software keeps it.
        """
        slo, setting = self.spec.slo, self._setting(cut, limits)
        prompt, output = expected(self.spec, limits.length)
        context = prompt + output // 2
        whole = self.first(cut, limits, prompt).total
        cached = self.first(cut, limits, prompt, self._cached(prompt, setting)).total
        alone = self.token(cut, limits, 1, context).total
        notes: list[str] = []
        if slo.ttft_ms:
            told = f"{math.ceil(whole.high)}, the upper end of what is expected"
            self._possible("ttft_ms", slo.ttft_ms, cached, told)
            what = f"slo.ttft_ms ({slo.ttft_ms:g}) for {prompt:,} tokens, none of them cached,"
            judged = _judged(what, slo.ttft_ms, whole)
            if slo.ttft_ms < whole.bound and cached.bound < whole.bound:
                judged = [f"{note} {ONLY_CACHED}" for note in judged]
            notes += judged
        if slo.tpot_ms:
            told = self._attainable(cut, limits, context)
            self._possible("tpot_ms", slo.tpot_ms, alone * (1 / self._guesses()), told)
            what = f"slo.tpot_ms ({slo.tpot_ms:g}) for one sequence alone"
            notes += _judged(what, slo.tpot_ms, alone) or self._crowded(cut, limits, context)
        return notes

    def _attainable(self, cut: Cut, limits: EngineLimits, context: int) -> str:
        """The tpot_ms to write for one sequence alone, and for as many as a table shows at most.

        max_num_seqs follows the promise, so the least that can be kept leaves room for few.
        """
        alone = math.ceil(self.token(cut, limits, 1, context).total.high)
        told = f"{alone}, the upper end of what is expected of one sequence alone"
        written = self.spec.limits.max_num_seqs
        most = written if written != "auto" else max(BATCHES)
        step = max(most, limits.step_tokens)
        wide = EngineLimits(step, most, limits.length)
        many = self._batches(cut, wide, context)[-1]
        if many == 1:
            return told
        together = math.ceil(self.token(cut, wide, many, context).total.high)
        return f"{told}, or {together}, that of {many} at once"

    def _crowded(self, cut: Cut, limits: EngineLimits, context: int) -> list[str]:
        """Whether all of max_num_seqs at once keep the promise that one alone keeps."""
        slo, seqs = self.spec.slo.tpot_ms, limits.seqs
        what = f"slo.tpot_ms ({slo:g}) with all {seqs} of max_num_seqs running"
        return _judged(what, slo, self.token(cut, limits, seqs, context).total)

    def _possible(self, key: str, promised: float, least: Span, told: str) -> None:
        """Refuse a promise that physics breaks.

        Args:
            key: of `slo`.
            promised: in ms.
            least: with all that may shorten it.
            told: what to write instead.
        """
        if promised >= least.bound or fp4_compute(self._architecture, self.gpu):
            return
        raise SpecError(
            f"slo.{key} of at least {least.bound:.3g}, which is what {self.gpu.name} needs at its peak "
            "rates for the expected workload",
            found=f"{promised:g}",
            do=f"write {key}: {told}, or take a smaller model or more GPUs",
            where=self.spec.where("slo", key),
        )

    def _guesses(self) -> int:
        """Most tokens that one step can yield: with speculative decoding, all guesses and one more."""
        guess = self.spec.speculative
        return 1 + (guess.num_tokens if guess is not None else 0)

    def _cached(self, prompt: int, setting: Setting) -> int:
        caching = self.spec.scheduling.prefix_caching
        return latency.reused(prompt, prompt, setting) if caching else 0

    def _batches(self, cut: Cut, limits: EngineLimits, context: int) -> list[int]:
        _, held, _ = self._fit.concurrency(cut, limits, context)
        most = max(1, int(min(limits.seqs, held)))
        return sorted({min(batch, most) for batch in (*BATCHES, limits.seqs)})

    def _first_row(
        self, cut: Cut, limits: EngineLimits, prompt: int, cached: int
    ) -> FirstTokenTime:
        found = self.first(cut, limits, prompt, cached)
        total = found.total
        return FirstTokenTime(
            prompt_tokens=prompt,
            cached_tokens=cached,
            bound_ms=round(total.bound, 1),
            low_ms=round(total.low, 1),
            high_ms=round(total.high, 1),
            limited_by=found.limited_by,
            terms=list(_terms(found)),
        )

    def _next_row(self, cut: Cut, limits: EngineLimits, batch: int, context: int) -> NextTokenTime:
        found = self.token(cut, limits, batch, context)
        total = found.total
        return NextTokenTime(
            batch=batch,
            context_tokens=context,
            bound_ms=round(total.bound, 1),
            low_ms=round(total.low, 1),
            high_ms=round(total.high, 1),
            limited_by=found.limited_by,
            terms=list(_terms(found)),
        )

    def _notes(self, cut: Cut, setting: Setting) -> list[str]:
        spec = self.spec
        notes = list(latency.notes(self._traffic(cut), setting))
        left = [f"engine_args.{name}" for name in TIMED_ELSE if spec.engine_args.get(name)]
        left += ["speculative"] if spec.speculative is not None else []
        left += ["lora"] if spec.lora.adapters else []
        if left:
            notes.append(f"Not in these figures: {', '.join(left)}.")
        if fp4_compute(self._architecture, self.gpu):
            notes.append(FP4_NOTE)
        if any(layer.attention.kind == MLA for layer in self._architecture.layers):
            notes.append(LATENT_NOTE)
        if self._expert_ranks(cut) > 1:
            notes.append(EXPERTS_NOTE)
        if cut.tensor * cut.pipeline > serving_pool(spec).gpus_per_host:
            notes.append(NETWORK_NOTE)
        return notes

    def _expert_ranks(self, cut: Cut) -> int:
        return cut.tensor if self.spec.engine_args.get("enable_expert_parallel") else 1

    def _read(self, cut: Cut) -> Traffic:
        return traffic(
            self._architecture,
            self.gpu,
            tensor=cut.tensor,
            expert_ranks=self._expert_ranks(cut),
            kv_cache_dtype=self.spec.precision.kv_cache_dtype,
        )

    def _setting(self, cut: Cut, limits: EngineLimits) -> Setting:
        mode = str(compilation(self.spec).get("cudagraph_mode", "")).upper()
        return Setting(
            gpu=self.gpu,
            step_tokens=limits.step_tokens,
            tensor=cut.tensor,
            pipeline=cut.pipeline,
            graphs=self.spec.scheduling.cuda_graphs is not False and mode != "NONE",
            attention_in_graphs=mode != "PIECEWISE",
            graph_tokens=self._graph_tokens(limits),
            block_tokens=self._fit.block_tokens(cut, limits),
            offload=self._offload(cut),
        )

    def _host_weights(self, cut: Cut) -> Span:
        """What a pass takes to read weights that stay in host memory, beyond what the GPU's own took.

        Each rank has its own link. Of a mixture's weights a token needs at least its experts' share.
        """
        if not read_offload(self.spec.engine_args).most_bytes:
            return Span()
        left, gpu, profile = self._fit.left_range(cut), self.gpu, self._fit.profile
        least = left.low * (profile.experts_per_token / profile.experts if profile.experts else 1)
        low, high = PCIE_SHARES
        peak = gpu.pcie_gb_s * 1e6
        # The term of the weights has counted these bytes at the rate of the GPU's memory.
        counted = least / (gpu.memory_gb_s * 1e6)
        return Span(
            least / peak - counted, least / (peak * high) - counted, left.high / (peak * low)
        )

    def _graph_tokens(self, limits: EngineLimits) -> int:
        """The largest batch that gets a graph."""
        chosen = self.spec.engine_args.get("cudagraph_capture_sizes")
        chosen = chosen or compilation(self.spec).get("cudagraph_capture_sizes")
        if isinstance(chosen, list) and chosen:
            return max(size for size in (0, *chosen) if isinstance(size, int))
        sizes = capture_sizes(
            version_facts(VLLM_VERSION),
            Batch(limits.step_tokens, limits.seqs),
            capability=self.gpu.compute_capability,
            query_tokens=self._guesses(),
        )
        return max(sizes, default=0)


def _judged(what: str, promised_ms: float, span: Span) -> list[str]:
    """A sentence where the expected range reaches beyond a promise."""
    if promised_ms >= span.high:
        return []
    verdict = "will be missed" if promised_ms < span.low else "may be missed"
    return [
        f"{what} {verdict}: {spread(span)} expected, {_digits(span.bound)} ms at the very best."
    ]


def spread(span: Span) -> str:
    """An expectation as people read it: two digits that mean something, and the unit."""
    return f"{_digits(span.low)}-{_digits(span.high)} ms"


def _digits(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 10 else f"{ms:.1f}"


def _terms(found: Estimate) -> Iterator[LatencyTerm]:
    """The terms that a person would see, in ms with one digit."""
    for name, span in found.terms.items():
        if span.high >= SHOWN_MS:
            yield LatencyTerm(
                name=name,
                bound_ms=round(span.bound, 1),
                low_ms=round(span.low, 1),
                high_ms=round(span.high, 1),
            )
