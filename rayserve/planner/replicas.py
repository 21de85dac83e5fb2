"""Do the hosts hold as many replicas as are wanted, and what would hold where they do not?

What is told is planned first, by the same rules: whoever writes it gets a plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rayserve.errors import DoesNotFitError
from rayserve.planner.lengths import MEASURE, Try
from rayserve.planner.memory.simple import Cut
from rayserve.planner.placement import cuts, gangs
from rayserve.spec import ClusterSpec, NodePool


def check_replicas(
    spec: ClusterSpec,
    pool: NodePool,
    cut: Cut,
    ways: tuple[Sequence[int], int],
    attempt: Try | None,
) -> None:
    """The pool has a gang of GPUs for each of `replicas.max`.

    `ways`: sizes of tensor parallelism and layers, the ways to cut a smaller replica; `attempt` plans
    what may be told, None: nobody reads what to do.

    Raises:
        DoesNotFitError: it has fewer.
    """
    most, wanted = gangs(pool, cut), spec.replicas
    if wanted.max <= most:
        return
    do = ", or ".join(_remedies(spec, pool, cut, ways, attempt)) if attempt else ""
    raise DoesNotFitError(
        f"{wanted.max} gangs of {cut.tensor * cut.pipeline} GPUs for replicas.max",
        found=f"{most}, on {pool.hosts} x {pool.gpus_per_host} GPUs",
        do=do or "add hosts",
        where=spec.where("replicas", "max"),
    )


def _remedies(
    spec: ClusterSpec, pool: NodePool, cut: Cut, ways: tuple[Sequence[int], int], attempt: Try
) -> Iterator[str]:
    most, wanted = gangs(pool, cut), spec.replicas
    fewer = wanted.model_copy(update={"min": min(wanted.min, most), "max": most})
    if most and attempt(spec.model_copy(update={"replicas": fewer})) is not None:
        both = f"replicas: {{min: {most}, max: {most}}}"
        yield f"write {both if wanted.min > most else f'max: {most}'}"
    yield from _smaller(spec, pool, ways, attempt)
    yield from _more_hosts(spec, pool, cut, attempt)


def _smaller(
    spec: ClusterSpec, pool: NodePool, ways: tuple[Sequence[int], int], attempt: Try
) -> Iterator[str]:
    """The fastest cut into fewer GPUs of which the pool holds as many replicas, where one plans."""
    sizes, layers = ways
    most = spec.replicas.max
    on_host = pool.gpus_per_host // -(-most // pool.hosts)
    if not on_host:
        return
    hosts = max(1, pool.hosts // most)
    maybe = ""
    for one in cuts(hosts, on_host, [size for size in sizes if size <= on_host], layers):
        parts = {"tensor": one.tensor, "pipeline": one.pipeline}
        parallelism = spec.parallelism.model_copy(update=parts)
        made = attempt(spec.model_copy(update={"parallelism": parallelism}))
        if made is None:
            continue
        told = f"parallelism: {{tensor: {one.tensor}, pipeline: {one.pipeline}}}"
        if made.sure:
            yield told
            return
        maybe = maybe or f"{told}, {MEASURE}"
    if maybe:
        yield maybe


def _more_hosts(spec: ClusterSpec, pool: NodePool, cut: Cut, attempt: Try) -> Iterator[str]:
    """As many hosts as hold the replicas with this cut, where they plan."""
    most, gpus = spec.replicas.max, cut.tensor * cut.pipeline
    hosts = -(-most // max(1, pool.gpus_per_host // gpus))
    if gpus > pool.gpus_per_host:
        hosts = most * -(-cut.pipeline // (pool.gpus_per_host // cut.tensor))
    resized = pool.model_copy(update={"hosts": hosts})
    pools = [resized if one is pool else one for one in spec.node_pools]
    if attempt(spec.model_copy(update={"node_pools": pools})) is not None:
        yield f"take {hosts} such hosts (`hosts: {hosts}`)"
