"""What follows from this spec? The whole plan, or the reason why there is none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rayserve.engine import VLLM_VERSION
from rayserve.errors import SpecError
from rayserve.plan import (
    DoorPlan,
    Endpoint,
    LoraAdapter,
    NodePoolPlan,
    Placement,
    Plan,
    ReplicaPlan,
    ScalingPlan,
    Timeouts,
)
from rayserve.planner.arguments import check_formats, engine_args, frontend_args
from rayserve.planner.catalogue import CPU, Gpu, accelerator_type, find_gpu
from rayserve.planner.choices import choices, limits_of, unused
from rayserve.planner.content import content, unread
from rayserve.planner.curves import NO_CURVES, Curves, curves
from rayserve.planner.environment import node_environment, replica_environment
from rayserve.planner.fit import Fit
from rayserve.planner.obstacles import Obstacles
from rayserve.planner.placement import choose_cut, place
from rayserve.planner.profile import TYPE_BITS, ModelProfile, read_profile, scaled_bits
from rayserve.planner.sizing import Sizing, holds, size
from rayserve.planner.timing import read_timing
from rayserve.planner.weights.architecture import Architecture, read_architecture
from rayserve.planner.weights.facts import UnknownModelError
from rayserve.spec import ClusterSpec, serving_pool

MIB = 2**20
LOAD_SHARE = 0.75
"""Share of max_num_seqs in use above which another replica is asked for."""
WARMUP_TOKENS = 64
"""Prompt of the warm-up: long enough to be a real prefill on every attention kernel."""
UNPROVEN_OFFLOAD = (
    "KV offload is passed to vLLM but unproven here without a GPU: the CPU engine refuses it."
)
UNBOUNDED_DISK = "vLLM's disk tier has no size limit: give kv_offload.nvme_dir a partition or a quota of its own."
LONG_STREAMS = (
    "At the promised {tpot_ms:g} ms a token, an answer of {tokens} tokens takes {stream_s:.0f} s: "
    "longer than timeouts.drain_s ({drain_s:g}), so a drain may cut it. Raise drain_s, or lower "
    "door.max_tokens."
)
OPEN_INGRESS = (
    "Serve listens on 0.0.0.0 without TLS: the host firewall and the gateway keep strangers out."
)
OPEN_STATISTICS = (
    "HAProxy's statistics (8404) and metrics (9101) listen on every address, whatever endpoint.host "
    "says: the host firewall closes them."
)


def build_plan(
    spec: ClusterSpec,
    model_config: Mapping[str, Any] | None,
    sha256: str,
    *,
    draft_config: Mapping[str, Any] | None = None,
    digests: Mapping[str, str] | None = None,
) -> Plan:
    """The plan of a spec whose paths are absolute.

    Args:
        spec: what the person wants.
        model_config: content of the model's config.json; None: there is none.
        sha256: of the spec file.
        draft_config: content of the draft model's config.json; None: there is none.
        digests: SHA-256 of the small files of `planner.content`, as far as they can be read here.

    Raises:
        SpecError: a value that this hardware or model does not take.
        EngineArgumentError: an argument or variable that vLLM does not take.
        DoesNotFitError: the hardware cannot hold it.
    """
    digests = digests or {}
    profile = _profile(spec, model_config, draft_config)
    pool = serving_pool(spec)
    gpu = find_gpu(spec, pool)
    label = accelerator_type(spec, pool, gpu)
    check_formats(spec, gpu)
    architecture = _architecture(spec, profile, model_config)
    fit = Fit(spec, profile, architecture, gpu) if gpu is not None else None
    obstacles = None
    if architecture is not None and gpu is not None:
        obstacles = Obstacles(spec, architecture, model_config or {}, gpu)
    sizes = obstacles.tensor_sizes(pool) if obstacles is not None else ()
    cut = choose_cut(spec, pool, profile, lambda cut: holds(spec, profile, fit, cut), sizes)
    told = obstacles.check(pool, cut) if obstacles is not None else []
    timing = read_timing(fit)
    sizing = size(spec, profile, fit, cut, timing)
    told += unused(spec, pool, cut, sizing, lambda cut: size(spec, profile, fit, cut, timing))
    replica = _replica(spec, profile, gpu, sizing, place(spec, pool, cut, label), digests)
    door = _door(spec, sizing)
    return Plan(
        plan_version=1,
        name=spec.name,
        profile=spec.profile,
        spec_sha256=sha256,
        revision=replica.revision,
        node_pools=[
            NodePoolPlan(
                name=node_pool.name,
                hosts=node_pool.hosts,
                gpus_per_host=node_pool.gpus_per_host,
                gpu=node_pool.gpu.replace(CPU, ""),
            )
            for node_pool in spec.node_pools
        ],
        replica=replica,
        door=door,
        scaling=_scaling(spec, sizing),
        timeouts=Timeouts(
            drain_s=spec.timeouts.drain_s,
            stall_s=spec.timeouts.stall_s,
            health_check_period_s=spec.timeouts.health_period_s,
            health_check_timeout_s=spec.timeouts.health_timeout_s,
        ),
        endpoint=_endpoint(spec),
        environment=node_environment(spec, door.max_tokens),
        memory=sizing.memory,
        latency=timing.table(cut, limits_of(sizing)) if timing is not None else None,
        choices=choices(spec, pool, gpu, cut, sizing, timing=timing, sizes=sizes) if gpu else [],
        notes=[
            *_unused(spec, architecture),
            *told,
            *(timing.promises(cut, limits_of(sizing)) if timing is not None else ()),
            *_notes(spec, gpu, sizing),
            *unread(spec, digests),
        ],
    )


def _replica(
    spec: ClusterSpec,
    profile: ModelProfile,
    gpu: Gpu | None,
    sizing: Sizing,
    placement: Placement,
    digests: Mapping[str, str],
) -> ReplicaPlan:
    return ReplicaPlan(
        device="cpu" if gpu is None else "cuda",
        model=spec.model.path or spec.model.hf_id,
        model_source="path" if spec.model.path else "hub",
        served_model_name=spec.model.served_name,
        vllm_version=VLLM_VERSION,
        engine_args=engine_args(spec, profile, gpu, sizing),
        frontend_args=frontend_args(spec),
        lora_adapters=[LoraAdapter(name=a.name, path=a.path) for a in spec.lora.adapters],
        env=replica_environment(spec, gpu),
        placement=placement,
        start_method=spec.scheduling.start_method,
        start_timeout_s=spec.timeouts.start_s,
        warmup_prompt_tokens=min(WARMUP_TOKENS, max(1, sizing.max_model_len.value // 2)),
        state_dir=spec.state_dir,
        content=content(spec, digests),
    )


def _profile(
    spec: ClusterSpec,
    model_config: Mapping[str, Any] | None,
    draft_config: Mapping[str, Any] | None,
) -> ModelProfile:
    where = spec.where("model", "config")
    if model_config is None:
        raise SpecError(
            "the model's config.json",
            found=f"no file at {spec.model.config}",
            do="copy it from the checkpoint; the path is relative to cluster.yml",
            where=where,
        )
    profile = read_profile(model_config, where)
    changes: dict[str, Any] = {}
    if spec.precision.dtype != "auto":
        changes["dtype_bits"] = TYPE_BITS[spec.precision.dtype]
        if not profile.quantization:
            changes["weight_bits"] = changes["dtype_bits"]
    bits = spec.precision.weight_bits
    if bits != "auto":
        changes["weight_bits"] = scaled_bits(bits, 128 if bits == 4 else 0)
    elif spec.precision.quantization != "auto" and not profile.quantization:
        changes["weight_bits"] = 4 if "4" in spec.precision.quantization else 8
    if spec.speculative is not None and spec.speculative.config:
        changes["draft"] = _draft(spec, draft_config)
    return _replace(profile, changes)


def _architecture(
    spec: ClusterSpec, profile: ModelProfile, model_config: Mapping[str, Any] | None
) -> Architecture | None:
    """The model layer by layer; None where its architecture or weight format is not known."""
    wanted = spec.precision.quantization
    try:
        return read_architecture(
            model_config or {},
            spec.where("model", "config"),
            dtype=spec.precision.dtype,
            quantization=wanted if wanted != "auto" and not profile.quantization else "",
        )
    except UnknownModelError:
        if profile.latent_dim and not spec.model.checkpoint_bytes:
            raise SpecError(
                "`model.checkpoint_bytes`, since this architecture with latent attention (MLA) is "
                "not known",
                found="nothing",
                do="add the sum of the tensor sizes of the checkpoint, in bytes",
                where=spec.where("model"),
            ) from None
        _demand_bits(spec, profile)
        return None


def _demand_bits(spec: ClusterSpec, profile: ModelProfile) -> None:
    """Without a known architecture the size of a quantized weight must be."""
    unknown = profile.quantization and profile.weight_bits == profile.dtype_bits
    if unknown and spec.precision.weight_bits == "auto":
        raise SpecError(
            f"`precision.weight_bits`, since config.json does not say it for {profile.quantization}",
            found="nothing",
            do="add `weight_bits: 8` or `weight_bits: 4` under precision",
            where=spec.where("precision"),
        )


def _draft(spec: ClusterSpec, draft_config: Mapping[str, Any] | None) -> ModelProfile:
    where = spec.where("speculative", "config")
    if draft_config is None:
        raise SpecError(
            "the draft model's config.json",
            found="no such file",
            do="copy it from the draft model; the path is relative to cluster.yml",
            where=where,
        )
    return read_profile(draft_config, where)


def _replace(profile: ModelProfile, changes: Mapping[str, Any]) -> ModelProfile:
    return ModelProfile(**{**vars(profile), **changes})


def _door(spec: ClusterSpec, sizing: Sizing) -> DoorPlan:
    door = spec.door
    most = door.max_tokens if door.max_tokens != "auto" else sizing.max_model_len.value
    return DoorPlan(
        api_key_file=spec.endpoint.api_key_file,
        max_in_flight=sizing.max_num_seqs.value,
        max_queued=door.max_queued,
        max_body_bytes=int(door.max_body_mib * MIB),
        max_tokens=most,
        max_n=door.max_n,
        key_max_in_flight=door.key_concurrency,
        key_tokens_per_minute=door.key_tokens_per_minute,
        retry_after_s=door.retry_after_s,
    )


def _scaling(spec: ClusterSpec, sizing: Sizing) -> ScalingPlan:
    replicas = spec.replicas
    return ScalingPlan(
        min_replicas=replicas.min,
        max_replicas=replicas.max,
        target_in_flight=math.ceil(LOAD_SHARE * sizing.max_num_seqs.value),
        target_kv_usage=replicas.target_kv_usage,
        upscale_delay_s=replicas.upscale_delay_s,
        downscale_delay_s=replicas.downscale_delay_s,
        ttft_slo_ms=spec.slo.ttft_ms,
        tpot_slo_ms=spec.slo.tpot_ms,
    )


def _endpoint(spec: ClusterSpec) -> Endpoint:
    endpoint = spec.endpoint
    host = endpoint.host or "127.0.0.1"
    return Endpoint(host=host, port=endpoint.port, ingress=endpoint.ingress)


def _notes(spec: ClusterSpec, gpu: Gpu | None, sizing: Sizing) -> list[str]:
    notes = list(sizing.notes)
    if gpu is not None and not sizing.graphs:
        notes.append("CUDA graphs are off: each token takes longer; a first token is no sooner.")
    if spec.kv_offload.cpu_gib:
        notes.append(UNPROVEN_OFFLOAD)
    if spec.kv_offload.nvme_dir:
        notes.append(UNBOUNDED_DISK)
    notes += _long_streams(spec, sizing)
    if spec.endpoint.host == "0.0.0.0":
        notes.append(OPEN_INGRESS)
    if spec.endpoint.ingress == "haproxy":
        notes.append(OPEN_STATISTICS)
    return notes


def _unused(spec: ClusterSpec, architecture: Architecture | None) -> list[str]:
    """Keys that only help where the architecture is not known."""
    if architecture is None:
        return []
    given = {
        "model.checkpoint_bytes": bool(spec.model.checkpoint_bytes),
        "precision.weight_bits": spec.precision.weight_bits != "auto",
    }
    return [
        f"{key} is not used: {architecture.name} is known, tensor by tensor."
        for key, is_given in given.items()
        if is_given
    ]


def _long_streams(spec: ClusterSpec, sizing: Sizing) -> list[str]:
    tokens = _door(spec, sizing).max_tokens
    stream_s = tokens * spec.slo.tpot_ms / 1000
    drain_s = spec.timeouts.drain_s
    if stream_s <= drain_s:
        return []
    return [
        LONG_STREAMS.format(
            tpot_ms=spec.slo.tpot_ms, tokens=tokens, stream_s=stream_s, drain_s=drain_s
        )
    ]


def build_curves(
    plan: Plan,
    spec: ClusterSpec,
    model_config: Mapping[str, Any] | None,
    *,
    draft_config: Mapping[str, Any] | None = None,
) -> Curves:
    """What the page of a plan draws; the plan is that of this spec and these files.

    Raises:
        SpecError: as `build_plan`.
    """
    profile = _profile(spec, model_config, draft_config)
    gpu = find_gpu(spec, serving_pool(spec))
    if gpu is None:
        return NO_CURVES
    architecture = _architecture(spec, profile, model_config)
    return curves(plan, Fit(spec, profile, architecture, gpu))
