"""What keeps this model from these GPUs, however much memory they have?

The chip's number formats and attention kernels, the numbers that a cut must divide, and what the host
lacks (planner/support), asked with what the spec and config.json say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rayserve.engine import VLLM_VERSION
from rayserve.errors import SpecError
from rayserve.planner.catalogue import Gpu
from rayserve.planner.lengths import Try
from rayserve.planner.memory.simple import Cut
from rayserve.planner.support.blocks import check_block_size
from rayserve.planner.support.divisibility import (
    CutShape,
    broken_rule,
    check_cut,
    tensor_sizes,
)
from rayserve.planner.support.host_limits import (
    HOST_RESERVE_GIB,
    HostFacts,
    check_host,
    weights_room_gib,
)
from rayserve.planner.support.limits import attentions, cut_shapes
from rayserve.planner.support.precision import (
    Attention,
    Finding,
    capability_of,
    check_precision,
    check_scheme,
    check_type,
)
from rayserve.planner.support.schemes import Scheme, schemes_of
from rayserve.planner.weights.architecture import Architecture
from rayserve.planner.weights.families import FAMILIES
from rayserve.planner.weights.formats import FP8_COMPUTE
from rayserve.spec import ClusterSpec, NodePool
from rayserve.units import GIB


class Obstacles:
    """What a chip and a cut refuse of one model."""

    def __init__(
        self, spec: ClusterSpec, architecture: Architecture, config: Mapping[str, Any], gpu: Gpu
    ) -> None:
        self.spec = spec
        self._architecture = architecture
        self._gpu = gpu
        asked = spec.precision.quantization
        inner = config.get("text_config")
        text = {**config, **inner} if isinstance(inner, Mapping) else config
        self._schemes: tuple[Scheme, ...] = schemes_of(text, "" if asked == "auto" else asked)
        self._shapes: tuple[CutShape, ...] = cut_shapes(
            architecture,
            config,
            self._schemes,
            fp8_compute=gpu.compute_capability >= FP8_COMPUTE,
        )
        self._expert_parallel = bool(spec.engine_args.get("enable_expert_parallel"))

    def tensor_sizes(self, pool: NodePool) -> tuple[int, ...]:
        """Sizes of tensor parallelism on a host that the model can be cut into, ascending."""
        return tensor_sizes(self._shapes, pool.gpus_per_host, expert_parallel=self._expert_parallel)

    @property
    def has_experts(self) -> bool:
        """Whether the model has routed experts."""
        return any(shape.experts for shape in self._shapes)

    def broken(self, tensor: int) -> str:
        """The rule that so many ranks break, such as `divides the 8 KV heads`; empty: none."""
        return broken_rule(self._shapes, tensor, expert_parallel=self._expert_parallel)

    def check(self, pool: NodePool, cut: Cut) -> list[str]:
        """What should be known of formats and cut, for the plan's notes.

        Raises:
            SpecError: the chip or the cut refuses.
        """
        self._check_served()
        precision = self.spec.precision
        attention = attentions(self._architecture, images=self.spec.limits.max_images > 0)
        findings = [
            *check_precision(
                self._schemes,
                dtype=self._architecture.dtype,
                kv_cache_dtype=precision.kv_cache_dtype,
                attention=attention,
                compute_capability=self._gpu.compute_capability if self._gpu.nvidia else None,
            ),
            *self._check_blocks(attention),
            *check_cut(
                self._shapes,
                tensor=cut.tensor,
                pipeline=cut.pipeline,
                gpus_per_host=pool.gpus_per_host,
                expert_parallel=self._expert_parallel,
            ),
        ]
        for finding in findings:
            if finding.level == "refuse":
                raise finding.error(self.spec.where(*finding.key))
        return [_sentence(finding) for finding in findings]

    def _check_blocks(self, attention: Sequence[Attention]) -> list[Finding]:
        arguments, gpu = self.spec.engine_args, self._gpu
        size = arguments.get("block_size")
        if not isinstance(size, int) or not gpu.nvidia:
            return []
        return check_block_size(
            size,
            attention,
            dtype=self._architecture.dtype,
            kv_cache_dtype=self.spec.precision.kv_cache_dtype,
            capability=capability_of(gpu.compute_capability),
            backend=str(arguments.get("attention_backend") or ""),
        )

    def _check_served(self) -> None:
        family = FAMILIES.get(self._architecture.name)
        if family is None or family.until == (0, 0):
            return
        last = ".".join(map(str, family.until))
        raise SpecError(
            f"an architecture that vLLM {VLLM_VERSION} serves",
            found=f"{self._architecture.name}, which left it after {last}",
            do="take a model of another family",
            where=self.spec.where("model", "config"),
        )


def check_format(spec: ClusterSpec, config: Mapping[str, Any], gpu: Gpu | None) -> list[str]:
    """What should be known of the checkpoint's number format, where its layers are not known.

    Raises:
        SpecError: vLLM does not load it on this chip.
    """
    if spec.env.get("VLLM_PLUGINS"):
        return []
    inner = config.get("text_config")
    text = {**config, **inner} if isinstance(inner, Mapping) else config
    asked, dtype = spec.precision.quantization, str(spec.precision.dtype)
    if dtype == "auto":
        dtype = str(text.get("dtype") or text.get("torch_dtype") or "").removeprefix("torch.")
        if dtype in {"", "float32", "float"}:
            dtype = "bfloat16"  # vLLM does not compute in 32 bits unless it is told to
    capability = capability_of(gpu.compute_capability) if gpu and gpu.nvidia else None
    told = []
    for scheme in dict.fromkeys(schemes_of(text, "" if asked == "auto" else asked)):
        for finding in _of_scheme(scheme, dtype, capability):
            if finding.level == "refuse":
                raise finding.error(spec.where(*finding.key))
            told.append(_sentence(finding))
    return told


def _of_scheme(scheme: Scheme, dtype: str, capability: int | None) -> list[Finding]:
    """All findings on an NVIDIA GPU; elsewhere that of the method's compute type alone."""
    if capability is not None:
        return check_scheme(scheme, dtype=dtype, capability=capability)
    refused = check_type(scheme, dtype=dtype)
    return [refused] if refused is not None else []


def check_hosts(
    spec: ClusterSpec, pool: NodePool, cut: Cut, left_bytes: int, attempt: Try | None
) -> None:
    """What the spec says of the pool's hosts must be enough for the replicas that each may hold.

    `left_bytes` of weights stay in host memory, of each rank; `attempt` plans what may be told; None:
    nobody reads what to do.

    Raises:
        SpecError: memory or /dev/shm are short, or the GPUs are cut into slices.
    """
    gpus = cut.tensor * cut.pipeline
    replicas = max(1, min(spec.replicas.max, pool.gpus_per_host // gpus))
    facts = HostFacts(
        gpus=pool.gpus_per_host,
        memory_gib=pool.memory_gib or None,
        shm_gib=pool.shm_gib or None,
        mig=pool.mig,
    )
    findings = check_host(
        facts,
        tensor=cut.tensor,
        pipeline=cut.pipeline,
        replicas_on_host=replicas,
        offload_gib=spec.kv_offload.cpu_gib,
        weights_gib=left_bytes / GIB,
    )
    if findings:
        finding, key = findings[0], findings[0].key
        if key == ("engine_args", "cpu_offload_gb") and attempt is not None:
            do = _less_offload(spec, pool, (replicas, gpus), left_bytes, attempt)
            finding = replace(finding, do=do)
        if key == ("node_pools",):
            key = (*key, spec.node_pools.index(pool), "mig")
        raise finding.error(spec.where(*key))


def _less_offload(
    spec: ClusterSpec, pool: NodePool, held: tuple[int, int], left_bytes: int, attempt: Try
) -> str:
    """What to do where a host has no room for the weights of its ranks: the first that plans.

    `held`: replicas on a host, and GPUs of each. Where nothing plans, the memory that weights and KV
    blocks need is told, and that something else is lacking besides.
    """
    name, rest = "cpu_offload_gb", {**spec.engine_args}
    del rest[name]
    replicas, ranks = held[0], held[0] * min(held[1], pool.gpus_per_host)
    if attempt(spec.model_copy(update={"engine_args": rest})) is not None:
        return "remove it: the GPUs hold all weights"
    blocks = replicas * spec.kv_offload.cpu_gib
    room = weights_room_gib(pool.memory_gib - blocks, ranks)
    less = {"engine_args": {**rest, name: room}}
    if room and attempt(spec.model_copy(update=less)) is not None:
        return f"write {name}: {room}"
    need = math.ceil(ranks * left_bytes / GIB + blocks) + HOST_RESERVE_GIB
    larger = pool.model_copy(update={"memory_gib": need})
    pools = [larger if one is pool else one for one in spec.node_pools]
    told = f"take hosts of {need} GiB of memory, and write memory_gib: {need}"
    if attempt(spec.model_copy(update={"node_pools": pools})) is not None:
        return told
    return f"{told}; the plan refuses something else then, and says what"


def _sentence(finding: Finding) -> str:
    text = f"Instead of {finding.needed}: {finding.found}"
    return f"{text}. {finding.do[:1].upper()}{finding.do[1:]}." if finding.do else f"{text}."
