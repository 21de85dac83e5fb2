"""How long, how many and how much at once? Chooses each `auto` limit, with its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from rayserve.errors import SpecError
from rayserve.plan import MemoryEstimate
from rayserve.planner.aims import (
    SEQS,
    STEP_TOKENS,
    Chosen,
    Scene,
    at_least,
    choose_seqs,
    choose_step,
    largest,
    unknown_speed,
    within_cache,
)
from rayserve.planner.catalogue import Gpu
from rayserve.planner.fit import EngineLimits, Fit, pinned_bytes
from rayserve.planner.lengths import Try, possible, within
from rayserve.planner.memory import simple as memory
from rayserve.planner.memory.offload import read_offload
from rayserve.planner.memory.simple import Cut
from rayserve.planner.positions import longest, stretched
from rayserve.planner.profile import ModelProfile
from rayserve.planner.remedies import does_not_fit
from rayserve.planner.timing import Timing, spread
from rayserve.planner.wishes import expected
from rayserve.spec import ClusterSpec
from rayserve.units import GIB

LEAST_LEN = 2048
FULL_SEQS = 8
HIDDEN_MS = 0.1
CPU_KV_STEP = 64 * 2**20
SIMPLE = (
    "Memory: the planner does not know this architecture. The sum of the weights is the checkpoint's "
    "own; how they are cut over ranks, and all else, is bounded."
)
HYBRID = (
    "Some layers keep less than the whole context: the KV cache holds more tokens than estimated."
)
TIGHT = (
    "Tight: the estimate leaves {tokens} tokens of KV cache for a max_model_len of {length}; vLLM "
    "may refuse to start."
)
OFFLOADED = (
    "engine_args.cpu_offload_gb leaves about {size:.3g} GiB of each GPU's weights in host memory: every step "
    "reads them over PCIe, which takes {price:,.0f} ms at the link's peak rate and longer in practice."
)
CPU_ONLY = "CPU engine: no GPU memory to prove. It serves the same API, slowly."


@dataclass(frozen=True)
class Sizing:
    """All limits of one replica."""

    max_model_len: Chosen
    max_num_seqs: Chosen
    max_num_batched_tokens: Chosen
    kv_cache_bytes: Chosen
    """0: vLLM takes what is left."""
    graphs: bool
    graphs_reason: str
    memory: MemoryEstimate | None
    notes: tuple[str, ...] = ()


def uses_graphs(spec: ClusterSpec, gpu: Gpu | None) -> bool:
    """Whether CUDA graphs are recorded."""
    return gpu is not None and spec.scheduling.cuda_graphs is not False


def holds(spec: ClusterSpec, profile: ModelProfile, fit: Fit | None, cut: Cut) -> bool:
    """Whether vLLM may be expected to start with this cut at the least limits of the spec."""
    try:
        return fit is None or fit.expects(cut, _least(spec, profile, fit.gpu))
    except SpecError:  # vLLM does not make this cut; where no other holds, `size` says why
        return False


def _least(spec: ClusterSpec, profile: ModelProfile, gpu: Gpu) -> EngineLimits:
    """Limits below which nothing is served: what is `auto` may shrink to them."""
    limits = spec.limits
    seqs = limits.max_num_seqs if limits.max_num_seqs != "auto" else 1
    step = limits.max_num_batched_tokens
    tokens = step if step != "auto" else max(seqs, gpu.step_tokens)
    return EngineLimits(tokens, seqs, _least_len(spec, profile))


def size(
    spec: ClusterSpec,
    profile: ModelProfile,
    fit: Fit | None,
    cut: Cut,
    timing: Timing | None,
    attempt: Try | None = None,
) -> Sizing:
    """Limits that fit; `fit` is None for the CPU engine, `timing` where no latency is known.

    `attempt` plans what notes and refusals tell people to write; None: nobody reads them.

    Raises:
        SpecError: max_model_len is beyond the model's positions.
        DoesNotFitError: not even weights and one sequence fit.
    """
    limits = spec.limits
    if limits.max_model_len != "auto" and limits.max_model_len > longest(spec, profile):
        raise SpecError(
            f"at most {longest(spec, profile)} tokens, the model's own limit",
            found=str(limits.max_model_len),
            do=f"write {longest(spec, profile)}{within(spec, longest(spec, profile))}"
            + stretched(spec, profile),
            where=spec.where("limits", "max_model_len"),
        )
    most = _most_len(spec, profile)
    asked = spec.workload.prompt_tokens + spec.workload.output_tokens
    if asked > most and "workload" in spec.model_fields_set:
        raise SpecError(
            f"prompt_tokens and output_tokens of at most {most} together, the model's own limit",
            found=str(asked),
            do=f"lower them{stretched(spec, profile)}",
            where=spec.where("workload"),
        )
    if fit is None:
        return _size_cpu(spec, profile, cut)
    least = _least(spec, profile, fit.gpu)
    scene = Scene(spec, fit, timing, cut)
    seqs = choose_seqs(scene, least.step_tokens, most)
    if not fit.holds(cut, least):
        raise does_not_fit(spec, fit, cut, least, attempt)
    seqs = _held_seqs(scene, seqs, least)
    step = choose_step(scene, seqs.value, most)
    usual = max(least.length, min(most, sum(expected(spec, most))))
    seqs = within_cache(scene, seqs, EngineLimits(step.value, seqs.value, usual))

    def at(length: int) -> EngineLimits:
        return EngineLimits(_whole_prompt(spec, step, length).value, seqs.value, length)

    length = _length(scene, most, at)
    seqs = within_cache(scene, seqs, at(length.value))
    seqs = _sure_seqs(scene, seqs, at(length.value))
    chosen = at(length.value)
    if not fit.holds(cut, chosen):
        raise does_not_fit(spec, fit, cut, chosen, attempt)
    estimate = fit.estimate(cut, chosen)
    return Sizing(
        max_model_len=length,
        max_num_seqs=seqs,
        max_num_batched_tokens=_whole_prompt(spec, step, length.value),
        kv_cache_bytes=Chosen(fit.pinned_bytes),
        graphs=uses_graphs(spec, fit.gpu),
        graphs_reason=_graphs_reason(scene, chosen),
        memory=estimate,
        notes=_notes(fit, cut, profile, chosen, estimate, attempt),
    )


def _shortened(fit: Fit, cut: Cut, whole: EngineLimits, length: int, attempt: Try) -> str:
    """That a request may be shorter than the model allows, and how long a person may make it."""
    found = possible(fit, cut, whole, attempt, above=length)
    note = f"max_model_len is {length:,} of the model's {whole.length:,} tokens"
    told = found.told(free=fit.spec.limits.max_num_seqs == "auto")
    if not told:
        return f"{note}: no longer request fits."
    return f"{note}, which leaves room for several such requests. For a longer one {told}."


def _held_seqs(scene: Scene, seqs: Chosen, least: EngineLimits) -> Chosen:
    """Fewer sequences where the room that many take to compute leaves no cache at all."""

    def held(count: int) -> bool:
        return scene.fit.holds(scene.cut, replace(least, seqs=count))

    few = max(least.seqs, largest(held, least.seqs, seqs.value))
    return seqs if few == seqs.value else Chosen(few, "more would leave no room for a KV cache")


def _sure_seqs(scene: Scene, seqs: Chosen, limits: EngineLimits) -> Chosen:
    """Fewer sequences where more leave it to chance whether one of full length fits."""
    if scene.spec.limits.max_num_seqs != "auto":
        return seqs

    def sure(count: int) -> bool:
        return scene.fit.sure(scene.cut, replace(limits, seqs=count))

    few = largest(sure, 1, seqs.value)
    if few in (0, seqs.value):
        return seqs
    return Chosen(few, f"with more it is not sure that a request of {limits.length:,} tokens fits")


def _graphs_reason(scene: Scene, limits: EngineLimits) -> str:
    spec = scene.spec
    if spec.scheduling.cuda_graphs != "auto":
        return ""
    if scene.timing is None:
        return "recorded GPU work: faster tokens"
    price = scene.timing.eager_price(scene.cut, limits)
    if price.high < HIDDEN_MS:
        return "recorded GPU work: a fast host would hide here what it saves, a slow one not"
    return (
        f"recorded GPU work: without it a token takes {spread(price)} longer, on a slow host more"
    )


def judged(
    made: Sizing, profile: ModelProfile, measured: Fit, cut: Cut, attempt: Try | None
) -> Sizing:
    """The same limits, with the estimate that real starts narrowed; they choose nothing anew.

    `attempt` plans with the starts what people are told to write; None: nobody reads it.

    Raises:
        DoesNotFitError: the starts show that the limits do not fit.
    """
    limits = EngineLimits(
        made.max_num_batched_tokens.value, made.max_num_seqs.value, made.max_model_len.value
    )
    spec = measured.spec
    if not measured.holds(cut, limits):
        raise does_not_fit(spec, measured, cut, limits, attempt)
    memory = measured.estimate(cut, limits)
    notes = _notes(measured, cut, profile, limits, memory, attempt)
    return replace(made, memory=memory, notes=notes)


def _notes(
    fit: Fit,
    cut: Cut,
    profile: ModelProfile,
    limits: EngineLimits,
    estimate: MemoryEstimate,
    attempt: Try | None,
) -> tuple[str, ...]:
    spec = fit.spec
    measure, length, most = fit.measure(cut, limits), limits.length, _most_len(spec, profile)
    notes = [f"Measure before you rely on it, on one such host: {measure}"] if measure else []
    notes += _offloaded(fit, cut)
    notes += [f"Not counted: {what}." for what in estimate.uncounted]
    if estimate.model == "simple":
        notes.append(SIMPLE)
        if profile.hybrid:
            notes.append(HYBRID)
    if estimate.kv_tokens < length:
        notes.append(TIGHT.format(tokens=estimate.kv_tokens, length=length))
    if length < most and attempt is not None:
        least = _least(spec, profile, fit.gpu)
        step = _whole_prompt(spec, Chosen(least.step_tokens), most).value
        notes.append(_shortened(fit, cut, EngineLimits(step, least.seqs, most), length, attempt))
    return tuple(notes)


def _offloaded(fit: Fit, cut: Cut) -> list[str]:
    if not read_offload(fit.spec.engine_args).most_bytes:
        return []
    size = fit.left_bytes(cut)
    price_ms = size / (fit.gpu.pcie_gb_s * 1e6)
    return [OFFLOADED.format(size=size / GIB, price=price_ms)]


def _least_len(spec: ClusterSpec, profile: ModelProfile) -> int:
    wanted = spec.limits.max_model_len
    return wanted if wanted != "auto" else min(LEAST_LEN, longest(spec, profile))


def _most_len(spec: ClusterSpec, profile: ModelProfile) -> int:
    wanted = spec.limits.max_model_len
    return wanted if wanted != "auto" else longest(spec, profile)


def _whole_prompt(spec: ClusterSpec, step: Chosen, length: int) -> Chosen:
    if spec.scheduling.chunked_prefill or step.value >= length:
        return step
    return Chosen(length, "chunked_prefill is off, so a step holds the longest prompt")


def _length(scene: Scene, limit: int, at: Callable[[int], EngineLimits]) -> Chosen:
    """max_model_len: the model's own, halved until several whole requests fit.

    It stays above the expected request where that fits.
    """
    spec, fit, cut = scene.spec, scene.fit, scene.cut
    if spec.limits.max_model_len != "auto":
        return Chosen(limit)
    asked = spec.workload.prompt_tokens + spec.workload.output_tokens
    length, until = limit, "it was short"
    while length // 2 >= LEAST_LEN:
        if fit.estimate(cut, at(length)).max_concurrency >= FULL_SEQS:
            until = f"{FULL_SEQS} full sequences fit at once"
            break
        if length // 2 < asked <= length and fit.holds(cut, at(length)):
            until = f"it just holds the expected {asked:,}"
            break
        length //= 2
    if length == limit:
        return Chosen(length, "the model's own limit")
    return Chosen(length, f"the model's {limit}, halved until {until}")


def _size_cpu(spec: ClusterSpec, profile: ModelProfile, cut: Cut) -> Sizing:
    limits = spec.limits
    written = limits.max_model_len != "auto"
    length = Chosen(_most_len(spec, profile), "" if written else "the model's own limit")
    step, seqs = _cpu_batch(spec)
    step = _whole_prompt(spec, step, length.value)
    token_bytes = memory.kv_bytes_per_token(profile, cut, spec.precision.kv_cache_dtype)
    if pinned_bytes(spec):
        kv = Chosen(pinned_bytes(spec))
    else:
        one = token_bytes * length.value
        most = max(one, min(one * seqs.value, GIB))
        kv = Chosen(-(-most // CPU_KV_STEP) * CPU_KV_STEP,
                    "each rank: max_num_seqs full sequences, at most 1 GiB")  # fmt: skip
    reason = "no CUDA graphs on a CPU" if spec.scheduling.cuda_graphs == "auto" else ""
    return Sizing(length, seqs, step, kv, False, reason, None, (CPU_ONLY,))


def _cpu_batch(spec: ClusterSpec) -> tuple[Chosen, Chosen]:
    """(tokens of a step, sequences) of the CPU engine."""
    seqs, step = spec.limits.max_num_seqs, spec.limits.max_num_batched_tokens
    most = step if step != "auto" else SEQS
    many = Chosen(seqs) if seqs != "auto" else unknown_speed(spec, min(SEQS, most))
    if step != "auto":
        return Chosen(step), many
    own = Chosen(STEP_TOKENS, "vLLM's own choice for CPU hosts: long prompts do not stall answers")
    return at_least(own, many.value), many
