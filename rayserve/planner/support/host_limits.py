"""What must a host have beyond its GPUs: memory, shared memory, and GPUs that are whole?

Facts that nobody knows are None, and nothing is said of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rayserve.planner.support.precision import Finding
from rayserve.units import GIB, MIB

QUEUE_BYTES = 240 * MIB
"""What must be free in /dev/shm when a rank makes its queue of answers: 10 chunks of 24 MiB
(distributed/device_communicators/shm_broadcast.py:336 and 492). Its pages are taken only as it fills,
so this counts once, however many ranks there are."""
HOST_RESERVE_GIB = 8
"""Host memory of the engine's own processes, Ray and the system: an estimate, to be generous."""


@dataclass(frozen=True)
class HostFacts:
    """What is known of each host of a pool."""

    gpus: int
    memory_gib: float | None = None
    shm_gib: float | None = None
    """Size of /dev/shm. Linux makes it half of the memory, Docker 64 MiB."""
    mig: bool | None = None
    """Whether a GPU is cut into MIG slices."""


def check_host(
    host: HostFacts,
    *,
    tensor: int,
    pipeline: int,
    replicas_on_host: int,
    offload_gib: float,
    weights_gib: float = 0,
) -> tuple[Finding, ...]:
    """What a host of the pool lacks.

    `offload_gib` is `kv_offload.cpu_gib`, for each replica; `weights_gib` is what each rank leaves in
    host memory, as far as `cpu_offload_gb` says.
    """
    ranks = min(tensor * pipeline, host.gpus)
    weights = ranks * replicas_on_host * weights_gib
    room = _room_gib(host, ranks=ranks, replicas=replicas_on_host, weights=weights)
    return (
        *_check_mig(host),
        *_check_shm(host, room, ranks=ranks, replicas=replicas_on_host, offload_gib=offload_gib),
        *_check_weights(host, ranks=ranks * replicas_on_host, each_gib=weights_gib),
        *_check_memory(
            host, room, replicas=replicas_on_host, offload_gib=offload_gib, weights=weights
        ),
    )


def shm_bytes(*, ranks: int, replicas: int, offload_gib: float) -> int:
    """What replicas need of /dev/shm on one host, in bytes; Ray's object store comes on top.

    KV blocks in host memory are one file for the whole replica, on each of its hosts
    (v1/kv_offload/cpu/shared_offload_region.py:110).
    """
    queue = QUEUE_BYTES if ranks > 1 else 0
    return queue + replicas * int(offload_gib * GIB)


def weights_room_gib(memory_gib: float, ranks: int) -> int:
    """The largest `cpu_offload_gb` of which so many ranks find room in a host's memory; 0: none."""
    return int(max(0, memory_gib - HOST_RESERVE_GIB) / ranks)


def _room_gib(host: HostFacts, *, ranks: int, replicas: int, weights: float) -> int:
    """The largest `cpu_gib` that memory and shared memory both allow; 0: none."""
    limits = []
    if host.memory_gib is not None:
        limits.append(host.memory_gib - HOST_RESERVE_GIB - weights)
    if host.shm_gib is not None:
        limits.append(host.shm_gib - shm_bytes(ranks=ranks, replicas=1, offload_gib=0) / GIB)
    return max(0, int(min(limits, default=0) / replicas))


def _check_mig(host: HostFacts) -> Iterator[Finding]:
    if host.mig:
        yield Finding(
            "refuse",
            ("node_pools",),
            "whole GPUs: a process sees one MIG slice alone, so ranks cannot reach each other "
            "(vllm issue 7211), and a slice's memory is not the catalogue's",
            "MIG mode is on",
            "turn it off on each host: nvidia-smi -mig 0",
        )


def _check_shm(
    host: HostFacts, room: int, *, ranks: int, replicas: int, offload_gib: float
) -> Iterator[Finding]:
    need = shm_bytes(ranks=ranks, replicas=replicas, offload_gib=offload_gib)
    if host.shm_gib is None or need <= host.shm_gib * GIB:
        return
    size = -(-need // GIB)
    grow = f"mount -o remount,size={size}G /dev/shm, or start the container with --shm-size={size}g"
    lower = f"write cpu_gib: {room}, or " if offload_gib and room else ""
    yield Finding(
        "refuse",
        ("kv_offload", "cpu_gib") if offload_gib else ("parallelism", "tensor"),
        f"{need / GIB:.1f} GiB of /dev/shm for {replicas} x ({ranks} ranks"
        + (f" and {offload_gib:g} GiB of KV blocks)" if offload_gib else ")"),
        f"{host.shm_gib:.2f} GiB",
        lower + grow,
        "v1/kv_offload/cpu/shared_offload_region.py:137" if offload_gib else "",
    )


def _check_weights(host: HostFacts, *, ranks: int, each_gib: float) -> Iterator[Finding]:
    need = ranks * each_gib + HOST_RESERVE_GIB
    if not each_gib or host.memory_gib is None or need <= host.memory_gib:
        return
    room = weights_room_gib(host.memory_gib, ranks)
    yield Finding(
        "refuse",
        ("engine_args", "cpu_offload_gb"),
        f"{need:.0f} GiB of host memory: {ranks} GPUs x {each_gib:.3g} of weights that "
        f"cpu_offload_gb leaves there, {HOST_RESERVE_GIB} for the rest",
        f"{host.memory_gib:.0f} GiB",
        f"write cpu_offload_gb: {room}" if room else "remove it",
    )


def _check_memory(
    host: HostFacts, room: int, *, replicas: int, offload_gib: float, weights: float
) -> Iterator[Finding]:
    need = replicas * offload_gib + weights + HOST_RESERVE_GIB
    if not offload_gib or host.memory_gib is None or need <= host.memory_gib:
        return
    yield Finding(
        "refuse",
        ("kv_offload", "cpu_gib"),
        f"{need:.0f} GiB of host memory: {replicas} x {offload_gib:g} for KV blocks, "
        + (f"{weights:.0f} for weights, " if weights else "")
        + f"{HOST_RESERVE_GIB} for the rest",
        f"{host.memory_gib:.0f} GiB",
        f"write cpu_gib: {room}" if room else "leave kv_offload out",
    )
