"""How many more gangs of GPUs can be placed now?

A gang is the placement group of one replica. Whoever wants to start a replica asks here first,
because Ray lets one that cannot be placed wait without limit. Everything here is a pure function of
a view of the cluster; `rayserve.serving.capacity` takes the view.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayserve.plan import Placement

SNAPSHOT_MAX_AGE_S = 5.0
"""A view of the cluster older than this proves no gang free."""
CLAIM_SETTLE_S = 2.0
"""Time from a decision to grow until Ray's own tables must show the gang that it takes."""

_EPSILON = 1e-4  # Ray counts resources in ten-thousandths


@dataclass(frozen=True, slots=True)
class Capacity:
    """What may be asked for."""

    free_gangs: int
    """Further replicas that can be placed now, beyond those already asked for."""
    unplaced: int = 0
    """Replicas of this deployment that were asked for and wait for a gang."""
    known: bool = True
    """False: the view of the cluster is missing or too old, and `free_gangs` is 0."""


@dataclass(frozen=True, slots=True)
class Group:
    """A placement group: resources that are held together, or wait to be."""

    name: str
    placed: bool
    bundles: tuple[Mapping[str, float], ...]
    strategy: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The cluster at one moment."""

    taken_at_s: float
    nodes: tuple[Mapping[str, float], ...]
    """Resources available on each node that takes new work."""
    groups: tuple[Group, ...]
    """Placement groups that hold or wait for resources."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Gangs that a decision just took, and that a snapshot may not show yet."""

    owner: str
    gangs: int
    placement: Placement
    made_at_s: float


def capacity_of(
    snapshot: Snapshot | None,
    claims: Sequence[Claim],
    *,
    owner: str,
    running: frozenset[str],
    target: int,
    placement: Placement,
    now_s: float,
) -> Capacity:
    """Gangs that `owner` may still ask for.

    Args:
        snapshot: the newest view of the cluster.
        claims: growth decided lately, by any deployment.
        owner: what the names of this deployment's placement groups begin with.
        running: names of the groups of its running replicas.
        target: replicas asked for so far.
        placement: the gang of one replica.
        now_s: the time, on the clock of the snapshot and the claims.
    """
    if snapshot is None or now_s - snapshot.taken_at_s > SNAPSHOT_MAX_AGE_S:
        return Capacity(0, known=False)
    unseen = [claim for claim in claims if claim.made_at_s > snapshot.taken_at_s - CLAIM_SETTLE_S]
    waiting = [group for group in snapshot.groups if not group.placed]
    own = [group for group in snapshot.groups if group.name.startswith(owner)]
    others = [claim for claim in unseen if claim.owner != owner]
    claimed = [_gang(claim.placement) for claim in others for _ in range(claim.gangs)]
    free = free_gangs(snapshot.nodes, placement, [*waiting, *claimed])
    # Asked for, but neither running nor seen with a group: each will take a gang.
    starting = sum(group.name not in running for group in own)
    unseen_own = sum(claim.gangs for claim in unseen if claim.owner == owner)
    missing = max(target - len(running) - starting, unseen_own, 0)
    unplaced = sum(not group.placed and group.name not in running for group in own)
    return Capacity(max(0, free - missing), unplaced)


def free_gangs(
    nodes: Sequence[Mapping[str, float]], placement: Placement, waiting: Sequence[Group] = ()
) -> int:
    """Gangs of `placement` that fit at once on what `nodes` have available.

    `waiting` groups are served first, from the emptiest nodes, where they harm most. A gang over
    several hosts counts only where Ray cannot split a stage: while any node has room for a part
    of a stage, Ray may put that part there, and the count is 0.
    """
    free = [dict(node) for node in nodes]
    for group in waiting:
        _reserve(free, group)
    if placement.strategy == "STRICT_PACK":
        gang = _total(placement.bundles)
        return sum(_fits(node, gang) for node in free)
    size = placement.tensor_parallel_size
    bundle = _largest(placement.bundles)
    if any(_fits(node, bundle) % size for node in free):
        return 0
    stages = sum(_fits(node, bundle) // size for node in free)
    return stages // placement.pipeline_parallel_size


def _gang(placement: Placement) -> Group:
    return Group("", False, tuple(placement.bundles), placement.strategy)


def _reserve(free: list[dict[str, float]], group: Group) -> None:
    """Take what `group` waits for out of `free`; nothing where it does not fit."""
    parts = [_total(group.bundles)] if group.strategy == "STRICT_PACK" else group.bundles
    for part in parts:
        room = [node for node in free if _fits(node, part)]
        if not room:
            continue
        node = max(room, key=lambda candidate: _fits(candidate, part))
        for name, amount in part.items():
            node[name] = node.get(name, 0.0) - amount


def _total(bundles: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for bundle in bundles for name in bundle}
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names}


def _largest(bundles: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for bundle in bundles for name in bundle}
    return {name: max(bundle.get(name, 0.0) for bundle in bundles) for name in names}


def _fits(node: Mapping[str, float], need: Mapping[str, float]) -> int:
    """How many times `need` fits into `node`; 0 where nothing is needed."""
    times = [
        math.floor((node.get(name, 0.0) + _EPSILON) / amount)
        for name, amount in need.items()
        if amount > 0
    ]
    return max(0, min(times, default=0))
