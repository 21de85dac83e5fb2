"""With which arguments does vLLM start? Maps the spec to vLLM's own names, and checks every one."""

from __future__ import annotations

from typing import Any

from rayserve.engine import check_value, load_snapshot, validate
from rayserve.errors import EngineArgumentError, SpecError
from rayserve.plan import NamedValue
from rayserve.planner.aims import Chosen
from rayserve.planner.catalogue import Gpu
from rayserve.planner.positions import rope_overrides
from rayserve.planner.profile import ModelProfile
from rayserve.planner.sizing import Sizing
from rayserve.planner.wishes import fine_graphs
from rayserve.spec import ClusterSpec, nearest

NO_MEDIA = "no-media.invalid"
"""A domain that cannot exist: vLLM takes an empty list of domains for all of them."""
FINE_GRAPHS = (
    "latency first: a graph for each step of up to 32 tokens, none padded; more to record at start"
)
OWN_DEFAULT = "vLLM's own default"
"""How a reason begins where neither spec nor planner chose."""
USUAL_SHARE = (
    f"{OWN_DEFAULT}; the rest stays for CUDA's context and what graphs take beyond their estimate"
)
FP8_KV_CAPABILITY = 8.9
"""Below this, vLLM's default attention keeps no fp8 KV cache; FlashInfer does."""


class _Arguments:
    """Collects arguments; each must be in the snapshot of the pinned vLLM."""

    def __init__(self) -> None:
        self.items: list[NamedValue] = []

    def add(self, name: str, value: Any, reason: str = "") -> None:
        argument = load_snapshot().find(name)
        if argument is None:
            raise EngineArgumentError("an argument of the pinned vLLM", found=f"`{name}`")
        check_value(argument, value)
        self.items.append(NamedValue(name=name, value=value, reason=reason))

    def chosen(self, name: str, chosen: Chosen) -> None:
        self.add(name, chosen.value, chosen.reason)


def engine_args(
    spec: ClusterSpec, profile: ModelProfile, gpu: Gpu | None, sizing: Sizing
) -> list[NamedValue]:
    """The engine's arguments but for model, name, parallelism and executor, which the plan has.

    Raises:
        SpecError: a value that this GPU or model does not take.
    """
    args = _Arguments()
    args.add("dtype", spec.precision.dtype)
    if spec.precision.quantization != "auto":
        args.add("quantization", spec.precision.quantization)
    args.add("kv_cache_dtype", spec.precision.kv_cache_dtype, _kv_reason(spec, gpu))
    args.chosen("max_model_len", sizing.max_model_len)
    args.chosen("max_num_seqs", sizing.max_num_seqs)
    args.chosen("max_num_batched_tokens", sizing.max_num_batched_tokens)
    if gpu is not None:
        written = "gpu_memory_utilization" in spec.limits.model_fields_set
        share = spec.limits.gpu_memory_utilization
        args.add("gpu_memory_utilization", share, "" if written else USUAL_SHARE)
    if sizing.kv_cache_bytes.value:
        args.chosen("kv_cache_memory_bytes", sizing.kv_cache_bytes)
    args.add("enable_chunked_prefill", spec.scheduling.chunked_prefill)
    args.add("enable_prefix_caching", spec.scheduling.prefix_caching)
    args.add("enforce_eager", not sizing.graphs, sizing.graphs_reason)
    if sizing.graphs and fine_graphs(spec):
        args.add("performance_mode", "interactivity", FINE_GRAPHS)
    args.add("seed", spec.seed)
    args.add("generation_config", "vllm", "defaults stand here, not in a file of the checkpoint")
    args.add("override_generation_config", _sampling(spec))
    args.add("trust_remote_code", False, "a checkpoint brings weights, not code")
    args.add("disable_log_stats", False, "health checks and autoscaling read them")
    args.add("shutdown_timeout", 0, "the door drains first, within timeouts.drain_s")
    domains = list(spec.chat.allowed_media_domains)
    reason = "" if domains else "none: vLLM takes an empty list for every domain"
    args.add("allowed_media_domains", domains or [NO_MEDIA], reason)
    _features(args, spec, profile)
    _escape_hatch(args, spec, load_snapshot().engine)
    return args.items


def frontend_args(spec: ClusterSpec) -> list[NamedValue]:
    """Arguments of vLLM's OpenAI server.

    Raises:
        SpecError: an unknown parser.
    """
    args = _Arguments()
    args.add("trust_request_chat_template", False, "a template is a program; requests bring none")
    args.add("trust_request_mm_kwargs", False, "they change how much memory a request takes")
    if spec.chat.template_file:
        args.add("chat_template", spec.chat.template_file)
    if spec.chat.tool_parser:
        _check_choice(spec, "tool_call_parser", "chat", "tool_parser")
        args.add("enable_auto_tool_choice", True)
        args.add("tool_call_parser", spec.chat.tool_parser)
    _escape_hatch(args, spec, load_snapshot().frontend)
    return args.items


def _kv_reason(spec: ClusterSpec, gpu: Gpu | None) -> str:
    """Why the cache keeps the compute type: fewer bits cost quality, so a person asks for them."""
    if spec.precision.kv_cache_dtype != "auto" or gpu is None:
        return ""
    kept = "the compute type, for its quality"
    if gpu.compute_capability < FP8_KV_CAPABILITY:
        return f"{kept}: this GPU's default attention keeps no fp8"
    return (
        f"{kept}: fp8 would hold twice as many tokens, without a checkpoint's scales less exactly"
    )


def _sampling(spec: ClusterSpec) -> dict[str, float | int]:
    sampling = spec.sampling
    # vLLM and transformers differ on "all tokens": 0 here, since vLLM takes 0 and -1 alike.
    values = {**sampling.model_dump(), "top_k": max(0, sampling.top_k)}
    neutral = {"min_p": 0, "repetition_penalty": 1}
    chosen = {name: value for name, value in values.items() if neutral.get(name) != value}
    if spec.door.max_tokens != "auto":
        # The door sees only what a request says; vLLM takes this for the cap of every request, and so
        # of one that says nothing.
        chosen["max_new_tokens"] = spec.door.max_tokens
    return chosen


def _features(args: _Arguments, spec: ClusterSpec, profile: ModelProfile) -> None:
    if spec.model.revision:
        args.add("revision", spec.model.revision)
    if spec.rope_scaling is not None:
        args.add("hf_overrides", rope_overrides(spec, profile))
    if spec.chat.reasoning_parser:
        _check_choice(spec, "reasoning_parser", "chat", "reasoning_parser")
        args.add("reasoning_parser", spec.chat.reasoning_parser)
    if spec.speculative is not None:
        guess = spec.speculative
        config: dict[str, Any] = {
            "method": guess.method,
            "num_speculative_tokens": guess.num_tokens,
        }
        if guess.model:
            config["model"] = guess.model
        if guess.revision:
            config["revision"] = guess.revision
        args.add("speculative_config", config)
    if spec.lora.adapters:
        args.add("enable_lora", True)
        args.add("max_lora_rank", spec.lora.max_rank)
        args.add("max_loras", len(spec.lora.adapters), "all adapters in one step")
    check_images(spec, profile)
    if profile.multimodal:
        images = spec.limits.max_images
        args.add("limit_mm_per_prompt", {"image": images, "video": 0, "audio": 0})
    _offload(args, spec)


def check_images(spec: ClusterSpec, profile: ModelProfile) -> None:
    """Can the model take the images that requests may bring?

    Raises:
        SpecError: it is a text model, or `engine_args` turns every image away.
    """
    if spec.limits.max_images and not profile.multimodal:
        raise SpecError(
            "a model that takes images",
            found=f"max_images: {spec.limits.max_images}, and a text model in config.json",
            do="remove max_images",
            where=spec.where("limits", "max_images"),
        )
    if spec.limits.max_images and spec.engine_args.get("language_model_only") is True:
        # vllm/config/multimodal.py, get_limit_per_prompt: 0 for every kind, whatever is written.
        raise SpecError(
            "an engine that takes the images of max_images",
            found=f"max_images: {spec.limits.max_images}, and language_model_only: true, which sets "
            "the limit of images to 0",
            do="remove language_model_only, or max_images",
            where=spec.where("engine_args", "language_model_only"),
        )


def _offload(args: _Arguments, spec: ClusterSpec) -> None:
    offload = spec.kv_offload
    if not offload.cpu_gib:
        return
    args.add("kv_offloading_size", offload.cpu_gib)
    args.add("kv_offloading_backend", "native")
    if offload.nvme_dir:
        # vLLM fills in the size of the host-memory tier from kv_offloading_size.
        tiers = [{"type": "fs", "root_dir": offload.nvme_dir}]
        extra = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": tiers}
        args.add(
            "kv_transfer_config",
            {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            },
        )


def _escape_hatch(args: _Arguments, spec: ClusterSpec, known: dict[str, Any]) -> None:
    """Adds those entries of `engine_args` that `known` has; `check_engine_args` saw them all."""
    for name, value in spec.engine_args.items():
        if name in known:
            args.items.append(NamedValue(name=name, value=value))


def check_engine_args(spec: ClusterSpec) -> None:
    """Does vLLM take each entry of `engine_args`? Asked before any of them is calculated with.

    Raises:
        EngineArgumentError: it does not.
    """
    for name, value in spec.engine_args.items():
        validate(name, value, spec.where("engine_args", name))


def _check_choice(spec: ClusterSpec, argument: str, section: str, key: str) -> None:
    choices = load_snapshot().choices(argument)
    value = getattr(getattr(spec, section), key)
    if value in choices:
        return
    close = nearest(str(value), map(str, choices))
    raise SpecError(
        f"`{section}.{key}` to be a name that vLLM {load_snapshot().version} knows",
        found=repr(value),
        do=f"write {close}" if close else f"one of: {', '.join(map(str, choices))}",
        where=spec.where(section, key),
    )


def check_formats(spec: ClusterSpec, gpu: Gpu | None) -> None:
    """Are the formats of weights and KV cache names that vLLM knows, and kept by this GPU?

    Raises:
        SpecError: one is not.
    """
    if spec.precision.quantization != "auto":
        _check_choice(spec, "quantization", "precision", "quantization")
    _check_choice(spec, "kv_cache_dtype", "precision", "kv_cache_dtype")
    kv_type = spec.precision.kv_cache_dtype
    if (
        gpu is not None
        and kv_type.startswith("fp8")
        and gpu.compute_capability < FP8_KV_CAPABILITY
        and "attention_backend" not in spec.engine_args
    ):
        raise SpecError(
            "an attention backend that keeps an fp8 KV cache on this GPU",
            found=f"kv_cache_dtype: {kv_type} on {gpu.name}, whose default backend keeps 16 bits",
            do="write auto, or `attention_backend: FLASHINFER` under engine_args",
            where=spec.where("precision", "kv_cache_dtype"),
        )
