"""What follows from this spec? The whole plan, or the reason why there is none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rayserve.errors import SpecError
from rayserve.plan import (
    DoorPlan,
    Endpoint,
    NodePoolPlan,
    Plan,
    ScalingPlan,
    StoredBytes,
    Timeouts,
)
from rayserve.planner.catalogue import CPU, Gpu, find_gpu
from rayserve.planner.cautions import cautions
from rayserve.planner.checkpoint import differences
from rayserve.planner.choices import choices
from rayserve.planner.content import unread
from rayserve.planner.curves import NO_CURVES, Curves, curves
from rayserve.planner.environment import node_environment
from rayserve.planner.evidence import budget_notes, start_estimate
from rayserve.planner.proposals import idle
from rayserve.planner.proven import prove, proven
from rayserve.planner.settled import Attempt, Settled, Weights, judge, settle, tries
from rayserve.planner.sizing import Sizing
from rayserve.planner.subject import (
    known_architecture,
    read_model_profile,
    served_notes,
    unused_keys,
)
from rayserve.planner.weights.architecture import Architecture
from rayserve.planner.weights.tensors import Place, weights_bytes
from rayserve.ports import HAPROXY_METRICS, HAPROXY_STATISTICS
from rayserve.spec import ClusterSpec, serving_pool
from rayserve.starts import Ledger
from rayserve.units import MIB

LOAD_SHARE = 0.75
"""Share of max_num_seqs in use above which another replica is asked for."""
UNPROVEN_OFFLOAD = (
    "KV offload is passed to vLLM but unproven here without a GPU: the CPU engine refuses it."
)
UNTIMED = "No latencies: what these GPUs reach in 32-bit products is not known."
UNBOUNDED_DISK = "vLLM's disk tier has no size limit: give kv_offload.nvme_dir a partition or a quota of its own."
LONG_STREAMS = (
    "At the promised {tpot_ms:g} ms a token, an answer of {tokens} tokens takes {stream_s:.0f} s: "
    "longer than timeouts.drain_s ({drain_s:g}), so a drain may cut it. Raise drain_s, or lower "
    "door.max_tokens."
)
OFFLOAD = "cpu_offload_gb"
NO_STARTS = Ledger()
OPEN_INGRESS = (
    "Serve listens on 0.0.0.0 without TLS: the host firewall and the gateway keep strangers out."
)
OPEN_STATISTICS = (
    f"HAProxy's statistics ({HAPROXY_STATISTICS}) and metrics ({HAPROXY_METRICS}) listen on every "
    "address, whatever endpoint.host says: the host firewall closes them."
)


def build_plan(
    spec: ClusterSpec,
    model_config: Mapping[str, Any] | None,
    sha256: str,
    *,
    draft_config: Mapping[str, Any] | None = None,
    digests: Mapping[str, str] | None = None,
    checkpoint: Mapping[str, int] | None = None,
    ledger: Ledger = NO_STARTS,
) -> Plan:
    """The plan of a spec whose paths are absolute.

    Args:
        spec: what the person wants.
        model_config: content of the model's config.json; None: there is none.
        sha256: of the spec file.
        draft_config: content of the draft model's config.json; None: there is none.
        digests: SHA-256 of the small files of `planner.content`, as far as they can be read here.
        checkpoint: bytes of the checkpoint's tensors by safetensors' name of their type, as the
            headers of its files say, now or when it was planned before; None: nobody read them.
        ledger: real starts that were collected beside the spec.

    Raises:
        SpecError: a value that this hardware or model does not take.
        EngineArgumentError: an argument or variable that vLLM does not take.
        DoesNotFitError: the hardware cannot hold it.
    """
    digests, stored = digests or {}, checkpoint or {}
    served = served_notes(spec, model_config)
    weights = Weights(model_config, draft_config, stored)
    attempt = proven(weights, digests, ledger)
    made, replica, found = prove(
        settle(spec, weights, tries(attempt)), digests, ledger, tries(attempt)
    )
    gpu, architecture, timing, cut = made.gpu, made.architecture, made.timing, made.cut
    sizing = made.sizing
    pool = made.pool
    start = start_estimate(
        replica,
        found.starts,
        read_bytes=_read_bytes(spec, architecture, stored) if pool.disk_gb_s else 0,
        disk_gb_s=pool.disk_gb_s,
    )
    door = _door(spec, sizing)
    return Plan(
        plan_version=1,
        name=spec.name,
        profile=spec.profile,
        spec_sha256=sha256,
        revision=replica.revision,
        node_pools=_pools(spec),
        replica=replica,
        door=door,
        scaling=_scaling(spec, sizing),
        timeouts=_timeouts(spec),
        endpoint=_endpoint(spec),
        environment=node_environment(spec, door.max_tokens),
        memory=sizing.memory,
        latency=timing.table(cut, made.limits) if timing is not None else None,
        choices=choices(made),
        start=start,
        checkpoint=[StoredBytes(name=name, value=value) for name, value in stored.items()],
        notes=[
            *served,
            *unused_keys(spec, architecture),
            *differences(architecture, stored),
            *made.told,
            *idle(made, attempt),
            *_promises(made, attempt),
            *([UNTIMED] if architecture is not None and gpu is not None and not timing else ()),
            *found.notes,
            *budget_notes(start, spec.timeouts.start_s),
            *_notes(spec, gpu, sizing),
            *cautions(spec, made.placement, sizing.max_model_len.value),
            *unread(spec, digests),
        ],
    )


def _promises(made: Settled, attempt: Attempt) -> list[str]:
    """Notes of promises that may not be kept.

    Raises:
        SpecError: one that these GPUs cannot keep; where they hold the weights that `cpu_offload_gb`
            leaves in host memory and keep it then, that is told first.
    """
    if made.timing is None:
        return []
    try:
        return made.timing.promises(made.cut, made.limits)
    except SpecError as error:
        rest = {key: value for key, value in made.spec.engine_args.items() if key != OFFLOAD}
        whole = {"engine_args": rest}
        there = (
            attempt(made.spec.model_copy(update=whole)) if rest != made.spec.engine_args else None
        )
        if there is None or there.timing is None:
            raise
        try:
            there.timing.promises(there.cut, there.limits)
        except SpecError:
            raise error from None
        do = f"remove engine_args.{OFFLOAD}: the GPUs hold all weights, and keep the promise then; or {error.do}"
        raise SpecError(error.needed, found=error.found, do=do, where=error.where) from None


def _read_bytes(
    spec: ClusterSpec, architecture: Architecture | None, stored: Mapping[str, int]
) -> int:
    """About what a host reads at a start: every file of the checkpoint, whatever the cut."""
    told = sum(stored.values()) or spec.model.checkpoint_bytes
    if told or architecture is None:
        return told
    return weights_bytes(architecture, Place(draft=bool(architecture.draft)))


def _pools(spec: ClusterSpec) -> list[NodePoolPlan]:
    return [
        NodePoolPlan(
            name=pool.name,
            hosts=pool.hosts,
            gpus_per_host=pool.gpus_per_host,
            gpu=pool.gpu.replace(CPU, ""),
        )
        for pool in spec.node_pools
    ]


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
    profile = read_model_profile(spec, model_config, draft_config)
    gpu = find_gpu(spec, serving_pool(spec))
    architecture = known_architecture(spec, profile, model_config)
    stored = {item.name: item.value for item in plan.checkpoint}
    fit = judge(spec, profile, architecture, gpu, stored)
    return curves(plan, fit) if fit is not None else NO_CURVES


def _timeouts(spec: ClusterSpec) -> Timeouts:
    return Timeouts(
        drain_s=spec.timeouts.drain_s,
        stall_s=spec.timeouts.stall_s,
        health_check_period_s=spec.timeouts.health_period_s,
        health_check_timeout_s=spec.timeouts.health_timeout_s,
    )
