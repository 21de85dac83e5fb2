"""What did the planner choose beyond engine arguments, and what does it leave unused?

The cut over GPUs and what stays off, each with its reason, for people who read the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rayserve.errors import RayserveError
from rayserve.plan import NamedValue
from rayserve.planner.catalogue import Gpu
from rayserve.planner.fit import EngineLimits
from rayserve.planner.memory.simple import Cut
from rayserve.planner.placement import gangs
from rayserve.planner.sizing import Sizing
from rayserve.planner.timing import Timing, spread
from rayserve.planner.wishes import expected
from rayserve.spec import ClusterSpec, NodePool

GIB_MS = 2**30 / 1e6
"""Milliseconds that 1 GiB takes at 1 GB/s."""
KV_OFFLOAD_OFF = (
    "off: unproven without a GPU, and of use only where prompts that left the cache come back"
)


def choices(
    spec: ClusterSpec,
    pool: NodePool,
    gpu: Gpu,
    cut: Cut,
    sizing: Sizing,
    *,
    timing: Timing | None,
    sizes: Sequence[int],
    refusal: str = "",
) -> list[NamedValue]:
    """What was chosen that is no engine argument.

    `sizes`: tensor sizes that the model allows; `refusal`: what keeps it from a whole host.
    """
    found = []
    if spec.parallelism.tensor == "auto":
        reason = _tensor_reason(spec, pool, cut, limits_of(sizing), timing, sizes)
        if refusal:
            reason += f"; {pool.gpus_per_host} is none that {refusal.removeprefix('tensor that ')}"
        found.append(NamedValue(name="parallelism.tensor", value=cut.tensor, reason=reason))
    if spec.parallelism.pipeline == "auto":
        one = "one stage holds it; more would add a hop to each token, and no speed"
        many = f"as few stages as hold the weights and one request: {cut.pipeline}"
        if cut.tensor < max(sizes, default=0) and spec.parallelism.tensor == "auto":
            many = f"{cut.tensor * cut.pipeline} GPUs hold the weights so; more ranks in fewer stages do not"
        reason = one if cut.pipeline == 1 else many
        found.append(NamedValue(name="parallelism.pipeline", value=cut.pipeline, reason=reason))
    if not spec.kv_offload.cpu_gib:
        found.append(NamedValue(name="kv_offload.cpu_gib", value=0, reason=KV_OFFLOAD_OFF))
    if "cpu_offload_gb" not in spec.engine_args:
        price = GIB_MS / gpu.pcie_gb_s
        reason = f"each GiB of weights left in host memory would cost a token {price:.0f} ms (PCIe)"
        found.append(NamedValue(name="engine_args.cpu_offload_gb", value=0, reason=reason))
    return found


def limits_of(sizing: Sizing) -> EngineLimits:
    """The limits of a replica, as estimates take them."""
    return EngineLimits(
        sizing.max_num_batched_tokens.value, sizing.max_num_seqs.value, sizing.max_model_len.value
    )


def _tensor_reason(
    spec: ClusterSpec,
    pool: NodePool,
    cut: Cut,
    limits: EngineLimits,
    timing: Timing | None,
    sizes: Sequence[int],
) -> str:
    if pool.gpus_per_host == 1:
        return "the host's only GPU"
    most = max(sizes, default=cut.tensor)
    if cut.tensor < most and cut.pipeline > 1:
        return f"{most} would be faster, but its ranks leave GPUs idle and cannot hold the weights"
    if cut.tensor == pool.gpus_per_host:
        why = "all GPUs of a host share the weights of a token"
    else:
        why = f"the most of {pool.gpus_per_host} GPUs that the model's tensors divide into"
    fewer = [size for size in sizes if size < cut.tensor]
    if timing is None or not fewer:
        return why
    prompt, output = expected(spec, limits.length)
    times = [
        timing.token(Cut(ranks, cut.pipeline), limits, 1, prompt + output // 2).total
        for ranks in (cut.tensor, fewer[-1])
    ]
    return f"{why}: {spread(times[0])} alone, with {fewer[-1]} it would be {spread(times[1])}"


def unused(
    spec: ClusterSpec,
    pool: NodePool,
    cut: Cut,
    sizing: Sizing,
    resize: Callable[[Cut], Sizing],
    more: Callable[[], str] = str,
) -> list[str]:
    """Which GPUs of the pool no replica ever holds, and what would use them.

    `resize`: the limits that another cut allows; it may raise what `size` raises. `more`: another way.
    """
    total = pool.hosts * pool.gpus_per_host
    idle = total - spec.replicas.max * cut.tensor * cut.pipeline
    if idle <= 0:
        return []
    ways = []
    if gangs(pool, cut) > spec.replicas.max:
        ways.append(f"`replicas.max: {gangs(pool, cut)}` for more requests at once")
    stages, longer = _longer(spec, pool, cut, sizing, resize)
    if longer:
        ways.append(f"`parallelism.pipeline: {stages}` for max_model_len {longer:,}")
    if told := more():
        ways.append(told)
    use = f": write {', or '.join(ways)}" if ways else ""
    return [f"{idle} of {total} GPUs of pool {pool.name} stay unused{use}."]


def _longer(
    spec: ClusterSpec, pool: NodePool, cut: Cut, sizing: Sizing, resize: Callable[[Cut], Sizing]
) -> tuple[int, int]:
    """(stages, max_model_len) of the fewest stages that allow a longer one, where both are auto."""
    free = spec.limits.max_model_len == "auto" and spec.parallelism.pipeline == "auto"
    most = pool.hosts * (pool.gpus_per_host // cut.tensor)
    stages = 2 * cut.pipeline
    while free and stages <= most:
        try:
            longer = resize(Cut(cut.tensor, stages)).max_model_len.value
        except RayserveError:
            return 0, 0
        if longer > sizing.max_model_len.value:
            return stages, longer
        stages *= 2
    return 0, 0
