"""How long, how many and how much at once? Chooses each `auto` limit, with its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rayserve.documents import Loc
from rayserve.errors import DoesNotFitError, SpecError
from rayserve.plan import MemoryEstimate
from rayserve.planner.catalogue import GIB, Gpu
from rayserve.planner.fit import EngineLimits, Fit, pinned_bytes
from rayserve.planner.memory import simple as memory
from rayserve.planner.memory.simple import Cut
from rayserve.planner.profile import ModelProfile
from rayserve.spec import ClusterSpec

SEQS = 32
STEP_TOKENS = 2048
LEAST_LEN = 2048
FULL_SEQS = 8
CPU_KV_STEP = 64 * 2**20
SIMPLE = (
    "Memory: a simple estimate. Weights and KV cache follow from the shapes, the rest is an "
    "allowance; the engine's own profile at start has the last word."
)
HYBRID = (
    "Some layers keep less than the whole context: the KV cache holds more tokens than estimated."
)
TIGHT = (
    "Tight: the estimate leaves {tokens} tokens of KV cache for a max_model_len of {length}; vLLM "
    "may refuse to start."
)
CPU_ONLY = "CPU engine: no GPU memory to prove. It serves the same API, slowly."


@dataclass(frozen=True)
class Chosen:
    """A value and why it was chosen; no reason where a person wrote it."""

    value: int
    reason: str = ""


@dataclass(frozen=True)
class Sizing:
    """All limits of one replica."""

    max_model_len: Chosen
    max_num_seqs: Chosen
    max_num_batched_tokens: Chosen
    kv_cache_bytes: Chosen
    """0: vLLM takes what is left."""
    graphs: bool
    memory: MemoryEstimate | None
    notes: tuple[str, ...] = ()


def uses_graphs(spec: ClusterSpec, gpu: Gpu | None) -> bool:
    """Whether CUDA graphs are recorded."""
    return gpu is not None and spec.scheduling.cuda_graphs is not False


def longest(spec: ClusterSpec, profile: ModelProfile) -> int:
    """The longest context that the model's positions allow."""
    rope = spec.rope_scaling
    if rope is None:
        return profile.max_position
    return int(rope.original_max_position_embeddings * rope.factor)


def holds(spec: ClusterSpec, profile: ModelProfile, fit: Fit | None, cut: Cut) -> bool:
    """Whether nothing proves that vLLM would refuse this cut at the least limits of the spec."""
    return fit is None or fit.holds(cut, _least(spec, profile, fit.gpu))


def _least(spec: ClusterSpec, profile: ModelProfile, gpu: Gpu) -> EngineLimits:
    seqs = _seqs(spec).value
    return EngineLimits(_step(spec, gpu, seqs).value, seqs, _least_len(spec, profile))


def size(spec: ClusterSpec, profile: ModelProfile, fit: Fit | None, cut: Cut) -> Sizing:
    """EngineLimits that fit; `fit` is None for the CPU engine.

    Raises:
        SpecError: max_model_len is beyond the model's positions.
        DoesNotFitError: not even weights and one sequence fit.
    """
    limits = spec.limits
    if limits.max_model_len != "auto" and limits.max_model_len > longest(spec, profile):
        raise SpecError(
            f"at most {longest(spec, profile)} tokens, the model's own limit",
            found=str(limits.max_model_len),
            do=f"write {longest(spec, profile)}, or stretch it with `rope_scaling`",
            where=spec.where("limits", "max_model_len"),
        )
    seqs = _seqs(spec)
    if fit is None:
        return _size_cpu(spec, profile, cut, seqs)
    least = _least(spec, profile, fit.gpu)
    if not fit.holds(cut, least):
        raise _does_not_fit(spec, fit, cut, least)
    step = _step(spec, fit.gpu, seqs.value)

    def concurrency(length: int) -> float:
        whole = _whole_prompt(spec, step, length).value
        return fit.estimate(cut, EngineLimits(whole, seqs.value, length)).max_concurrency

    length = _length(spec, profile, concurrency)
    step = _whole_prompt(spec, step, length.value)
    chosen = EngineLimits(step.value, seqs.value, length.value)
    if not fit.holds(cut, chosen):
        raise _does_not_fit(spec, fit, cut, chosen)
    estimate = fit.estimate(cut, chosen)
    kv = Chosen(fit.pinned_bytes)
    notes = _notes(profile, estimate, length.value, fit.measure(cut, chosen))
    return Sizing(length, seqs, step, kv, uses_graphs(spec, fit.gpu), estimate, notes)


def _notes(
    profile: ModelProfile, estimate: MemoryEstimate, length: int, measure: str
) -> tuple[str, ...]:
    notes = [f"Measure before you rely on it, on one such host: {measure}"] if measure else []
    notes += [f"Not counted: {what}." for what in estimate.uncounted]
    if estimate.model == "simple":
        notes.append(SIMPLE)
        if profile.hybrid:
            notes.append(HYBRID)
    if estimate.kv_tokens < length:
        notes.append(TIGHT.format(tokens=estimate.kv_tokens, length=length))
    return tuple(notes)


def _least_len(spec: ClusterSpec, profile: ModelProfile) -> int:
    wanted = spec.limits.max_model_len
    return wanted if wanted != "auto" else min(LEAST_LEN, longest(spec, profile))


def _seqs(spec: ClusterSpec) -> Chosen:
    wanted = spec.limits.max_num_seqs
    if wanted != "auto":
        return Chosen(wanted)
    step = spec.limits.max_num_batched_tokens
    most = min(SEQS, step) if step != "auto" else SEQS
    return Chosen(most, "latency first: a token of 32 requests costs little more than one of 4")


def _step(spec: ClusterSpec, gpu: Gpu | None, seqs: int) -> Chosen:
    wanted = spec.limits.max_num_batched_tokens
    if wanted != "auto":
        return Chosen(wanted)
    tokens = gpu.step_tokens if gpu is not None else STEP_TOKENS
    name = gpu.name if gpu is not None else "CPU hosts"
    if seqs > tokens:
        return Chosen(seqs, "at least a token for each of max_num_seqs")
    return Chosen(tokens, f"vLLM's own choice for {name}: long prompts do not stall answers")


def _whole_prompt(spec: ClusterSpec, step: Chosen, length: int) -> Chosen:
    if spec.scheduling.chunked_prefill or step.value >= length:
        return step
    return Chosen(length, "chunked_prefill is off, so a step holds the longest prompt")


def _length(
    spec: ClusterSpec, profile: ModelProfile, concurrency: Callable[[int], float]
) -> Chosen:
    wanted = spec.limits.max_model_len
    if wanted != "auto":
        return Chosen(wanted)
    limit = length = longest(spec, profile)
    while length > LEAST_LEN and concurrency(length) < FULL_SEQS:
        length //= 2
    if length == limit:
        return Chosen(length, "the model's own limit")
    until = f"{FULL_SEQS} full sequences fit at once" if length > LEAST_LEN else "it was short"
    return Chosen(length, f"the model's {limit}, halved until {until}")


def _size_cpu(spec: ClusterSpec, profile: ModelProfile, cut: Cut, seqs: Chosen) -> Sizing:
    wanted = spec.limits.max_model_len
    length = Chosen(wanted) if wanted != "auto" else Chosen(
        longest(spec, profile), "the model's own limit"
    )  # fmt: skip
    step = _whole_prompt(spec, _step(spec, None, seqs.value), length.value)
    token_bytes = memory.kv_bytes_per_token(profile, cut, spec.precision.kv_cache_dtype)
    if pinned_bytes(spec):
        kv = Chosen(pinned_bytes(spec))
    else:
        one = token_bytes * length.value
        most = max(one, min(one * seqs.value, GIB))
        kv = Chosen(-(-most // CPU_KV_STEP) * CPU_KV_STEP,
                    "each rank: max_num_seqs full sequences, at most 1 GiB")  # fmt: skip
    return Sizing(length, seqs, step, kv, graphs=False, memory=None, notes=(CPU_ONLY,))


def _does_not_fit(spec: ClusterSpec, fit: Fit, cut: Cut, limits: EngineLimits) -> DoesNotFitError:
    shorter = fit.longest(cut, limits) // 1024 * 1024
    at: Loc
    if fit.pinned_bytes:
        small = fit.pinned_bytes <= limits.length * fit.token_bytes(cut)
        do = "raise kv_cache_gib, or write auto" if small else "write kv_cache_gib: auto"
        at = ("limits", "kv_cache_gib")
    elif 1024 <= shorter < limits.length:
        do, at = f"write max_model_len: {shorter} at most", ("limits", "max_model_len")
    else:
        bits = 8 if fit.profile.weight_bits > 9 else 4
        do = f"take a checkpoint of {bits} bits a weight, or spread it over more hosts (pipeline)"
        at = ("model", "config")
    needed, found = fit.refusal(cut, limits)
    error = DoesNotFitError(needed, found=found, do=do, where=spec.where(*at))
    error.weights_bytes = fit.weights(cut)
    return error
