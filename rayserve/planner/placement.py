"""Which GPUs does one replica hold, and how many replicas do the hosts hold?

One host: one bundle with all GPUs of the replica, packed strictly; vLLM starts its ranks as child
processes. Across hosts: one-GPU bundles, since vLLM's Ray executor takes no larger ones, and every
stage stays on one host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rayserve.documents import Loc
from rayserve.errors import SpecError
from rayserve.plan import Placement
from rayserve.planner.memory.simple import Cut
from rayserve.planner.profile import ModelProfile
from rayserve.planner.support.divisibility import CutShape, tensor_sizes
from rayserve.spec import ClusterSpec, NodePool

LABEL_SHARE = 0.001
"""Amount of an accelerator label to ask for; Ray puts 1 of it on each node."""

Works = Callable[[], list[int]]
"""Sizes of tensor parallelism that people may write: those that hold, where any does."""


def choose_cut(
    spec: ClusterSpec,
    pool: NodePool,
    profile: ModelProfile,
    holds: Callable[[Cut], bool],
    sizes: Sequence[int] = (),
) -> Cut:
    """Ranks and stages; `auto` is the first of `cuts` that holds the weights.

    `sizes`: those of tensor parallelism that the model's tensors can be cut into, where known.

    Raises:
        SpecError: the model cannot be cut so, or a stage does not fit on a host.
    """
    wanted = spec.parallelism
    able = list(sizes or sizes_by_heads(profile, pool.gpus_per_host))

    def ways(sizes: Sequence[int]) -> list[Cut]:
        if wanted.pipeline == "auto":
            return list(cuts(pool.hosts, pool.gpus_per_host, sizes, profile.layers))
        return [Cut(one, wanted.pipeline) for one in going(pool, sizes, wanted.pipeline)]

    def works() -> list[int]:
        fit = [size for size in able if any(holds(cut) for cut in ways([size]))]
        return fit or [size for size in able if ways([size])]

    _check_tensor(spec, pool, profile, works)
    ranked = sorted(able, reverse=True) if wanted.tensor == "auto" else [wanted.tensor]
    # Where no size goes with written stages, the fewest ranks tell what they lack.
    tried = ways(ranked) or [Cut(ranked[-1], int(wanted.pipeline))]
    # Where none holds, that of the most GPUs tells what is lacking: what it lacks, all do.
    cut = next((cut for cut in tried if holds(cut)), None) or max(tried, key=_gpus)
    _check_pipeline(spec, pool, profile, cut, works)
    return cut


def going(pool: NodePool, sizes: Sequence[int], stages: int) -> list[int]:
    """Those sizes of tensor parallelism with which the pool's hosts hold so many stages, each whole."""
    return [size for size in sizes if gangs(pool, Cut(size, stages))]


def cuts(hosts: int, gpus: int, sizes: Sequence[int], layers: int) -> Iterator[Cut]:
    """Ways to cut a replica over hosts of so many GPUs, the fastest first.

    On one host before several, more ranks before more stages: a stage adds a hop and no speed. Fewer
    ranks come only where they reach GPUs that more ranks leave idle. `sizes` of tensor parallelism.
    """
    ranked = sorted(sizes, reverse=True)
    reached = 0
    for tensor in ranked:
        stages = gpus // tensor
        for count in range(1, min(stages, layers) + 1):
            if tensor * count > reached:
                yield Cut(tensor, count)
        reached = max(reached, tensor * stages)
    reached = 0
    for tensor in ranked:
        stages = gpus // tensor
        if gpus % tensor:
            continue  # a stage would be split
        for count in range(stages + 1, min(hosts * stages, layers) + 1):
            if tensor * count > reached:
                yield Cut(tensor, count)
        reached = max(reached, tensor * stages * hosts)


def place(pool: NodePool, cut: Cut, label: str) -> Placement:
    """The gang of one replica."""
    gpus = cut.tensor * cut.pipeline
    one_host = gpus <= pool.gpus_per_host
    share = {f"accelerator_type:{label}": LABEL_SHARE} if label else {}
    bundles = [{"GPU": float(gpus), **share}] if one_host else [{"GPU": 1.0, **share}] * gpus
    return Placement(
        tensor_parallel_size=cut.tensor,
        pipeline_parallel_size=cut.pipeline,
        strategy="STRICT_PACK" if one_host else "PACK",
        bundles=bundles,
        executor="mp" if one_host else "ray",
        accelerator_type=label,
    )


def gangs(pool: NodePool, cut: Cut) -> int:
    """How many replicas the pool's GPUs hold; a stage stays on one host."""
    gpus = cut.tensor * cut.pipeline
    if gpus <= pool.gpus_per_host:
        return pool.hosts * (pool.gpus_per_host // gpus)
    if pool.gpus_per_host % cut.tensor:
        return 0  # a stage would be split
    return pool.hosts // -(-cut.pipeline // (pool.gpus_per_host // cut.tensor))


def sizes_by_heads(profile: ModelProfile, gpus: int) -> tuple[int, ...]:
    """Sizes of tensor parallelism on a host by heads and vocabulary alone, ascending."""
    shape = CutShape(
        layers=profile.layers,
        heads=profile.heads,
        kv_heads=profile.kv_heads,
        vocab=profile.vocab,
        hidden=profile.hidden,
        head_dim=profile.head_dim,
        latent=profile.latent_dim > 0,
    )
    return tensor_sizes([shape], gpus)


def _gpus(cut: Cut) -> int:
    return cut.tensor * cut.pipeline


def _check_tensor(spec: ClusterSpec, pool: NodePool, profile: ModelProfile, works: Works) -> None:
    """A written size must be one by heads; what is told instead goes with written stages too."""
    tensor = spec.parallelism.tensor
    if tensor == "auto":
        return
    where = spec.where("parallelism", "tensor")
    if tensor > pool.gpus_per_host:
        raise SpecError(
            "a stage that fits on one host",
            found=f"tensor: {tensor} on hosts of {pool.gpus_per_host} GPUs",
            do=f"write tensor: {max(works(), default=1)}, and `pipeline` for more hosts",
            where=where,
        )
    if tensor not in sizes_by_heads(profile, pool.gpus_per_host):
        told = ", ".join(map(str, works())) or "auto"
        raise SpecError(
            f"tensor that divides {profile.heads} heads, {profile.kv_heads} KV heads and a padded "
            f"vocabulary of {profile.padded_vocab}",
            found=str(tensor),
            do=f"write {'one of: ' if ',' in told else ''}{told}",
            where=where,
        )


def _check_pipeline(
    spec: ClusterSpec, pool: NodePool, profile: ModelProfile, cut: Cut, works: Works
) -> None:
    """The hosts hold so many stages, each whole on one; `works`: ranks to write instead."""
    loc: Loc = ("parallelism", "pipeline")
    if cut.pipeline > profile.layers:
        raise SpecError(
            f"at most a stage for each of {profile.layers} layers",
            found=str(cut.pipeline),
            do="write auto",
            where=spec.where(*loc),
        )
    if gangs(pool, cut):
        return
    told = " or ".join(map(str, works()))
    on_host = pool.gpus_per_host // cut.tensor
    if pool.gpus_per_host % cut.tensor:
        raise SpecError(
            f"tensor that divides the {pool.gpus_per_host} GPUs of a host, for a replica across "
            "hosts: else a stage would be split",
            found=str(cut.tensor),
            do=f"write tensor: {told}" if told else f"write pipeline: {on_host} at most",
            where=spec.where("parallelism", "tensor" if told else "pipeline"),
        )
    hosts = -(-cut.pipeline // on_host)
    fewer = f"write pipeline: {on_host * pool.hosts} at most"
    raise SpecError(
        f"{hosts} hosts for {cut.pipeline} stages of {cut.tensor} GPUs",
        found=f"{pool.hosts} in pool {pool.name}",
        do=f"{fewer}{f', or tensor: {told}' if told else ''}, or add hosts",
        where=spec.where(*loc),
    )
