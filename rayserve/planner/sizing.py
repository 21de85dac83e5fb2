"""How long, how many and how much at once? Chooses each `auto` limit, with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from rayserve.documents import Loc
from rayserve.errors import DoesNotFitError, SpecError
from rayserve.plan import MemoryEstimate
from rayserve.planner import memory
from rayserve.planner.catalogue import GIB, Gpu
from rayserve.planner.memory import Cut
from rayserve.planner.profile import ModelProfile
from rayserve.spec import ClusterSpec

SEQS = 32
STEP_TOKENS = 2048
LEAST_LEN = 2048
FULL_SEQS = 8
BLOCK_TOKENS = 16
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


def bound_holds(spec: ClusterSpec, profile: ModelProfile, gpu: Gpu | None, cut: Cut) -> bool:
    """Whether weights and one sequence fit when everything else costs nothing."""
    if gpu is None:
        return True
    weights = _all_weights(spec, profile, cut)
    token_bytes = memory.kv_bytes_per_token(profile, cut, spec.precision.kv_cache_dtype)
    cache = max(_pinned(spec), _least_len(spec, profile) * token_bytes)
    return weights + cache <= _requested(spec, gpu)


def _lora(spec: ClusterSpec, profile: ModelProfile, cut: Cut) -> int:
    slots = len(spec.lora.adapters)
    return memory.lora_bytes(profile, cut, slots=slots, rank=spec.lora.max_rank)


def _all_weights(spec: ClusterSpec, profile: ModelProfile, cut: Cut) -> int:
    """Weights of the model, its adapters and its draft model."""
    model = memory.weights_bytes(profile, cut, spec.model.checkpoint_bytes)
    return model + _lora(spec, profile, cut) + memory.draft_bytes(profile, cut)


def _uncounted(spec: ClusterSpec) -> list[str]:
    """What takes GPU memory but stands in no term."""
    guess = spec.speculative
    if guess is None or guess.method in ("ngram", "suffix") or guess.config:
        return []
    if guess.method == "mtp":
        whole = spec.model.checkpoint_bytes
        return [] if whole else ["the layers that guess (mtp): give model.checkpoint_bytes"]
    return [f"the draft model {guess.model}: give speculative.config"]


def size(spec: ClusterSpec, profile: ModelProfile, gpu: Gpu | None, cut: Cut) -> Sizing:
    """Limits that fit.

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
    if gpu is None:
        return _size_cpu(spec, profile, cut, seqs)
    if not bound_holds(spec, profile, gpu, cut):
        raise _does_not_fit(spec, profile, gpu, cut)
    step = _step(spec, gpu, seqs.value)
    first = _estimate(spec, profile, gpu, cut, step.value, seqs.value, 1)
    length = _length(spec, profile, first.kv_tokens)
    step = _whole_prompt(spec, step, length.value)
    estimate = _estimate(spec, profile, gpu, cut, step.value, seqs.value, length.value)
    notes = [SIMPLE]
    if profile.hybrid:
        notes.append(HYBRID)
    notes += [f"Not counted: {what}." for what in estimate.uncounted]
    if estimate.kv_tokens < length.value:
        notes.append(TIGHT.format(tokens=estimate.kv_tokens, length=length.value))
    kv = Chosen(_pinned(spec))
    return Sizing(length, seqs, step, kv, uses_graphs(spec, gpu), estimate, tuple(notes))


def _pinned(spec: ClusterSpec) -> int:
    """Bytes of a KV cache that the spec fixes; 0: it does not."""
    wanted = spec.limits.kv_cache_gib
    return int(wanted * GIB) if wanted != "auto" else 0


def _requested(spec: ClusterSpec, gpu: Gpu) -> int:
    return int(gpu.memory_bytes * spec.limits.gpu_memory_utilization)


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


def _length(spec: ClusterSpec, profile: ModelProfile, kv_tokens: int) -> Chosen:
    wanted = spec.limits.max_model_len
    if wanted != "auto":
        return Chosen(wanted)
    limit = length = longest(spec, profile)
    while length > LEAST_LEN and kv_tokens < FULL_SEQS * length:
        length //= 2
    if length == limit:
        return Chosen(length, "the model's own limit")
    return Chosen(
        length, f"the model's {limit}, halved until {FULL_SEQS} full sequences fit at once"
    )


def _estimate(
    spec: ClusterSpec,
    profile: ModelProfile,
    gpu: Gpu,
    cut: Cut,
    step_tokens: int,
    seqs: int,
    length: int,
) -> MemoryEstimate:
    requested = _requested(spec, gpu)
    weights = memory.weights_bytes(profile, cut, spec.model.checkpoint_bytes)
    activation = memory.activation_bytes(profile, cut, step_tokens=step_tokens, seqs=seqs)
    overhead = memory.overhead_bytes(cut, graphs=uses_graphs(spec, gpu))
    lora, draft = _lora(spec, profile, cut), memory.draft_bytes(profile, cut)
    kv = _pinned(spec) or requested - weights - activation - overhead - lora - draft
    token_bytes = memory.kv_bytes_per_token(profile, cut, spec.precision.kv_cache_dtype)
    tokens = max(0, kv) // token_bytes // BLOCK_TOKENS * BLOCK_TOKENS
    return MemoryEstimate(
        model="simple",
        total_bytes=gpu.memory_bytes,
        requested_bytes=requested,
        weights_bytes=weights,
        activation_bytes=activation,
        overhead_bytes=overhead,
        lora_bytes=lora,
        draft_bytes=draft,
        kv_bytes=max(0, kv),
        kv_bytes_per_token=token_bytes,
        kv_tokens=tokens,
        max_concurrency=round(tokens / length, 2),
        uncounted=_uncounted(spec),
    )


def _size_cpu(spec: ClusterSpec, profile: ModelProfile, cut: Cut, seqs: Chosen) -> Sizing:
    wanted = spec.limits.max_model_len
    length = Chosen(wanted) if wanted != "auto" else Chosen(
        longest(spec, profile), "the model's own limit"
    )  # fmt: skip
    step = _whole_prompt(spec, _step(spec, None, seqs.value), length.value)
    token_bytes = memory.kv_bytes_per_token(profile, cut, spec.precision.kv_cache_dtype)
    if _pinned(spec):
        kv = Chosen(_pinned(spec))
    else:
        one = token_bytes * length.value
        most = max(one, min(one * seqs.value, GIB))
        kv = Chosen(-(-most // CPU_KV_STEP) * CPU_KV_STEP,
                    "each rank: max_num_seqs full sequences, at most 1 GiB")  # fmt: skip
    return Sizing(length, seqs, step, kv, graphs=False, memory=None, notes=(CPU_ONLY,))


def _does_not_fit(spec: ClusterSpec, profile: ModelProfile, gpu: Gpu, cut: Cut) -> DoesNotFitError:
    weights = _all_weights(spec, profile, cut)
    tokens = _least_len(spec, profile)
    token_bytes = memory.kv_bytes_per_token(profile, cut, spec.precision.kv_cache_dtype)
    requested = _requested(spec, gpu)
    cache = max(_pinned(spec), tokens * token_bytes)
    shorter = (requested - weights) // token_bytes // 1024 * 1024
    at: Loc
    if _pinned(spec) > tokens * token_bytes:
        do, at = "write kv_cache_gib: auto", ("limits", "kv_cache_gib")
    elif shorter >= 1024:
        do, at = f"write max_model_len: {shorter} at most", ("limits", "max_model_len")
    else:
        bits = 8 if profile.weight_bits > 9 else 4
        do = f"take a checkpoint of {bits} bits a weight, or spread it over more hosts (pipeline)"
        at = ("model", "config")
    return DoesNotFitError(
        f"{weights / GIB:.1f} GiB of weights and {cache / GIB:.1f} GiB of KV cache "
        f"(one sequence of {tokens} tokens, or more) on each {gpu.name}",
        found=f"{requested / GIB:.1f} GiB, {spec.limits.gpu_memory_utilization:.0%} of "
        f"{gpu.memory_gib} GiB, with nothing else in it",
        do=do,
        where=spec.where(*at),
    )
