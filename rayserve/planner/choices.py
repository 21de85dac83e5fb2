"""What did the planner choose beyond engine arguments?

The cut over GPUs and what stays off, each with its reason, for people who read the plan.
"""

from __future__ import annotations

from rayserve.plan import NamedValue
from rayserve.planner.memory.simple import Cut
from rayserve.planner.placement import gangs, sizes_by_heads
from rayserve.planner.settled import Settled
from rayserve.planner.timing import spread
from rayserve.planner.wishes import expected

GIB_MS = 2**30 / 1e6
"""Milliseconds that 1 GiB takes at 1 GB/s."""
KV_OFFLOAD_OFF = (
    "off: unproven without a GPU, and of use only where prompts that left the cache come back"
)


def choices(made: Settled) -> list[NamedValue]:
    """What was chosen that is no engine argument."""
    spec, gpu, cut = made.spec, made.gpu, made.cut
    if gpu is None:
        return []
    found = []
    if spec.parallelism.tensor == "auto":
        reason = _tensor_reason(made)
        found.append(NamedValue(name="parallelism.tensor", value=cut.tensor, reason=reason))
    if spec.parallelism.pipeline == "auto":
        one = "one stage holds it; more would add a hop to each token, and no speed"
        many = f"as few stages as hold the weights and one request: {cut.pipeline}"
        if cut.tensor < max(made.tensor_sizes, default=0) and spec.parallelism.tensor == "auto":
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


def _tensor_reason(made: Settled) -> str:
    pool, cut, timing = made.pool, made.cut, made.timing
    if pool.gpus_per_host == 1:
        return "the host's only GPU"
    most = max(made.tensor_sizes or sizes_by_heads(made.profile, pool.gpus_per_host))
    stages = made.spec.parallelism.pipeline
    if stages != "auto" and cut.tensor < most and not gangs(pool, Cut(most, stages)):
        return f"the most that goes with pipeline: {stages} on hosts of {pool.gpus_per_host} GPUs"
    if cut.tensor < most and cut.pipeline > 1:
        return f"{most} would be faster, but its ranks leave GPUs idle and cannot hold the weights"
    if cut.tensor == pool.gpus_per_host:
        why = "all GPUs of a host share the weights of a token"
    else:
        why = f"the most of {pool.gpus_per_host} GPUs that the model's tensors divide into"
    broken = made.obstacles.broken(pool.gpus_per_host) if made.obstacles is not None else ""
    hindrance = f"; {pool.gpus_per_host} is none that {broken}" if broken else ""
    fewer = [size for size in made.tensor_sizes if size < cut.tensor]
    if timing is None or not fewer:
        return why + hindrance
    prompt, output = expected(made.spec, made.limits.length)
    times = [
        timing.token(Cut(ranks, cut.pipeline), made.limits, 1, prompt + output // 2).total
        for ranks in (cut.tensor, fewer[-1])
    ]
    slower = f"{spread(times[0])} alone, with {fewer[-1]} it would be {spread(times[1])}"
    return f"{why}: {slower}{hindrance}"
