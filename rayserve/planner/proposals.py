"""Which GPUs of the pool does no replica ever hold, and what would use them?

Each way is tried before it is told: a plan of the spec with it must come out, by the same rules.
"""

from __future__ import annotations

from rayserve.planner.placement import gangs
from rayserve.planner.settled import Attempt, Settled
from rayserve.planner.timing import spread
from rayserve.planner.wishes import expected
from rayserve.spec import ClusterSpec

ARGUMENT = "enable_expert_parallel"


def idle(made: Settled, attempt: Attempt) -> list[str]:
    """A sentence about GPUs that stay unused, with what would use them; empty: there are none."""
    pool, most = made.pool, made.spec.replicas.max
    total = pool.hosts * pool.gpus_per_host
    left = total - most * made.gpus
    if left <= 0:
        return []
    ways = []
    if more := _more_replicas(made, attempt):
        ways.append(f"`replicas.max: {more}` for more requests at once")
    stages, longer = _longer(made, attempt)
    if longer:
        ways.append(f"`parallelism.pipeline: {stages}` for max_model_len {longer:,}")
    if told := _whole_experts(made, attempt):
        ways.append(told)
    use = f": write {', or '.join(ways)}" if ways else ""
    return [f"{left} of {total} GPUs of pool {pool.name} stay unused{use}."]


def _more_replicas(made: Settled, attempt: Attempt) -> int:
    """The most replicas that the pool's GPUs and each host's memory hold; 0: no more than now."""
    spec, pool = made.spec, made.pool
    most = gangs(pool, made.cut)
    # What a host may lack depends on how many of them it holds, so fewer than that may do.
    fewer = min(most, pool.gpus_per_host // made.gpus) - 1
    counts: list[int] = [most, *range(fewer, spec.replicas.max, -1)]
    for count in counts:
        replicas = spec.replicas.model_copy(update={"max": count})
        more = spec.model_copy(update={"replicas": replicas})
        if count > spec.replicas.max and attempt(more) is not None:
            return count
    return 0


def _longer(made: Settled, attempt: Attempt) -> tuple[int, int]:
    """(stages, max_model_len) of the fewest stages that allow a longer one, where both are auto."""
    spec, pool = made.spec, made.pool
    free = spec.limits.max_model_len == "auto" and spec.parallelism.pipeline == "auto"
    most = pool.hosts * (pool.gpus_per_host // made.cut.tensor)
    stages = 2 * made.cut.pipeline
    while free and stages <= most:
        parallelism = spec.parallelism.model_copy(update={"pipeline": stages})
        there = attempt(spec.model_copy(update={"parallelism": parallelism}))
        if there is None:
            return 0, 0
        longer = there.sizing.max_model_len.value
        if longer > made.sizing.max_model_len.value:
            return stages, longer
        stages *= 2
    return 0, 0


def _whole_experts(made: Settled, attempt: Attempt) -> str:
    """How to use more GPUs with experts that are not cut, and what comes of it; empty: not so.

    Slices of an expert may be too narrow for a format's blocks or groups. Only told and never chosen: no
    logged start with expert parallelism was at hand to check its memory.
    """
    spec, experts = made.spec, made.obstacles is not None and made.obstacles.has_experts
    chosen = spec.parallelism.tensor == "auto" and ARGUMENT not in spec.engine_args
    if not experts or not chosen or made.cut.tensor == made.pool.gpus_per_host:
        return ""
    whole = {"engine_args": {**spec.engine_args, ARGUMENT: True}}
    there = attempt(spec.model_copy(update=whole))
    if there is None or there.cut.tensor <= made.cut.tensor or there.gpus <= made.gpus:
        return ""
    old = _figures(spec, made)
    better = ", ".join(
        f"{name} {value} in place of {old.get(name, 'an unknown one')}"
        for name, value in _figures(spec, there).items()
    )
    return (
        f"`engine_args: {{{ARGUMENT}: true}}`, which keeps experts whole and so allows tensor "
        f"{there.cut.tensor}: {better}; calculated, and not checked against any real start"
    )


def _figures(spec: ClusterSpec, made: Settled) -> dict[str, str]:
    """Tokens of its KV cache, and how soon the next token of a lone request comes."""
    memory, limits = made.sizing.memory, made.limits
    told = {"KV cache": f"{memory.kv_tokens:,} tokens"} if memory is not None else {}
    if made.timing is not None:
        prompt, output = expected(spec, limits.length)
        token = made.timing.token(made.cut, limits, 1, prompt + output // 2)
        told["a token alone"] = spread(token.total)
    return told
