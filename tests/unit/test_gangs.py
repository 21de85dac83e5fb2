"""Does the count of free gangs hold against what Ray can really place?"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rayserve.gangs import (
    CLAIM_SETTLE_S,
    SNAPSHOT_MAX_AGE_S,
    Capacity,
    Claim,
    Group,
    Snapshot,
    capacity_of,
    free_gangs,
)
from rayserve.plan import Placement

OWNER = "SERVE_REPLICA::chat-1#Engine#"


def one_host(gpus: int = 8) -> Placement:
    """A gang on one host."""
    return Placement(
        tensor_parallel_size=gpus,
        pipeline_parallel_size=1,
        strategy="STRICT_PACK",
        bundles=[{"GPU": gpus, "CPU": 4}],
        executor="mp",
    )


def two_hosts(tensor: int = 8, pipeline: int = 2) -> Placement:
    """A gang of one-GPU bundles over hosts."""
    return Placement(
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        strategy="PACK",
        bundles=[{"GPU": 1}] * (tensor * pipeline),
        executor="ray",
    )


def host(gpus: float, cpus: float = 64) -> dict[str, float]:
    """What is available on one node."""
    return {"GPU": gpus, "CPU": cpus, "memory": 1e12, "node:10.0.0.1": 1.0}


def group(name: str, *, placed: bool, gpus: float = 8, strategy: str = "STRICT_PACK") -> Group:
    """A placement group of one bundle."""
    return Group(name, placed, ({"GPU": gpus},), strategy)


def own(number: int) -> str:
    """Name of a group of the deployment under test."""
    return f"{OWNER}r{number}"


def room(
    nodes: list[dict[str, float]],
    groups: list[Group],
    *,
    running: int,
    target: int,
    claims: list[Claim] | None = None,
    now_s: float = 100.5,
) -> Capacity:
    """What the deployment under test may ask for, with a view taken at 100 s."""
    return capacity_of(
        Snapshot(100.0, tuple(nodes), tuple(groups)),
        claims or [],
        owner=OWNER,
        running=frozenset(own(number) for number in range(running)),
        target=target,
        placement=one_host(),
        now_s=now_s,
    )


def test_whole_hosts_count_and_halves_of_two_hosts_do_not() -> None:
    """A gang on one host needs its GPUs on one node; two half-free nodes hold none."""
    assert free_gangs([host(8), host(8)], one_host()) == 2
    assert free_gangs([host(4), host(4)], one_host()) == 0
    assert free_gangs([host(16)], one_host()) == 2


def test_every_resource_of_the_bundle_must_be_free() -> None:
    """A node with its GPUs free but too few CPUs, or without the accelerator, holds no gang."""
    assert free_gangs([host(8, cpus=3)], one_host()) == 0
    labelled = one_host().model_copy(
        update={"bundles": [{"GPU": 8, "accelerator_type:A100": 0.001}]}
    )
    assert free_gangs([host(8)], labelled) == 0
    assert free_gangs([host(8) | {"accelerator_type:A100": 1.0}], labelled) == 1


def test_ray_rounding_does_not_hide_a_gang() -> None:
    """Ray reports 7.9999 where eight GPUs are free, and that is a gang."""
    assert free_gangs([host(7.99995)], one_host()) == 1
    assert free_gangs([host(7.9)], one_host()) == 0


def test_nothing_is_free_without_nodes_or_needs() -> None:
    """No node, or a gang that needs nothing, counts as no gang rather than as endless ones."""
    assert free_gangs([], one_host()) == 0
    empty = one_host().model_copy(update={"bundles": [{}]})
    assert free_gangs([host(8)], empty) == 0


def test_a_gang_over_hosts_needs_whole_stages() -> None:
    """Two stages of eight fit on two whole hosts, three hosts hold one gang, four hold two."""
    assert free_gangs([host(8), host(8)], two_hosts()) == 1
    assert free_gangs([host(8)] * 3, two_hosts()) == 1
    assert free_gangs([host(8)] * 4, two_hosts()) == 2
    assert free_gangs([host(8)], two_hosts()) == 0


def test_a_gang_over_hosts_is_refused_where_ray_could_split_a_stage() -> None:
    """A third host with four free GPUs attracts a part of a stage, so no gang is safe."""
    assert free_gangs([host(8), host(8), host(4)], two_hosts()) == 0
    assert free_gangs([host(8), host(8), host(0)], two_hosts()) == 1


def test_waiting_groups_are_served_first() -> None:
    """What another application waits for is not free, even before Ray has placed it."""
    waiting = [group("other", placed=False)]
    assert free_gangs([host(8), host(8)], one_host(), waiting) == 1
    assert free_gangs([host(8)], one_host(), waiting) == 0
    small = [Group("job", False, ({"GPU": 1}, {"GPU": 1}), "PACK")]
    assert free_gangs([host(8), host(8)], one_host(), small) == 0


def test_a_group_that_fits_nowhere_takes_nothing() -> None:
    """A group of 16 GPUs on hosts of eight waits for ever, and must not block all others."""
    assert free_gangs([host(8)], one_host(), [group("huge", placed=False, gpus=16)]) == 1


def test_a_running_replica_holds_what_is_no_longer_available() -> None:
    """With one of two hosts taken by the running replica, one more replica may come."""
    taken = [group(own(0), placed=True)]
    assert room([host(0), host(8)], taken, running=1, target=1) == Capacity(1)


def test_a_starting_replica_is_counted_once() -> None:
    """A replica asked for takes one gang: before Ray shows its group, while it waits, and after."""
    running = group(own(0), placed=True)
    two_free = [host(0), host(8), host(8)]
    assert room(two_free, [running], running=1, target=2).free_gangs == 1
    waiting = [running, group(own(1), placed=False)]
    assert room(two_free, waiting, running=1, target=2) == Capacity(1, unplaced=1)
    placed = [running, group(own(1), placed=True)]
    assert room([host(0), host(0), host(8)], placed, running=1, target=2).free_gangs == 1


def test_a_stopping_replica_still_holds_its_gang() -> None:
    """While a replica drains, its GPUs are not free for the next."""
    stopping = [group(own(0), placed=True), group(own(9), placed=True)]
    assert room([host(0), host(0)], stopping, running=1, target=1) == Capacity(0)


def test_growth_decided_after_the_snapshot_takes_its_gangs() -> None:
    """Two applications that look at the same snapshot do not both take the last gang."""
    claim = Claim("SERVE_REPLICA::other#Engine#", 1, one_host(), made_at_s=100.2)
    taken = [group(own(0), placed=True)]
    assert room([host(0), host(8)], taken, running=1, target=1, claims=[claim]).free_gangs == 0
    settled = Claim(claim.owner, 1, one_host(), made_at_s=100.0 - CLAIM_SETTLE_S - 0.1)
    assert room([host(0), host(8)], taken, running=1, target=1, claims=[settled]).free_gangs == 1


def test_own_growth_counts_even_where_a_draining_replica_hides_it() -> None:
    """A draining replica's group looks like that of the one just asked for, whose claim tells."""
    claim = Claim(OWNER, 1, one_host(), made_at_s=100.2)
    groups = [group(own(0), placed=True), group(own(9), placed=True)]
    assert room(
        [host(0), host(0), host(8)], groups, running=1, target=2, claims=[claim]
    ) == Capacity(0)


def test_an_old_or_missing_view_proves_nothing_free() -> None:
    """Without a fresh view no gang counts as free, and the capacity says that it is not known."""
    now_s = 100.0 + SNAPSHOT_MAX_AGE_S + 0.1
    assert room([host(8)], [], running=0, target=0, now_s=now_s) == Capacity(0, known=False)
    unknown = capacity_of(
        None, [], owner=OWNER, running=frozenset(), target=0, placement=one_host(), now_s=0.0
    )
    assert unknown == Capacity(0, known=False)


NODES = st.lists(st.integers(0, 17).map(host), max_size=5)


@given(nodes=NODES, tensor=st.integers(1, 8))
def test_gangs_never_need_more_than_is_free(nodes: list[dict[str, float]], tensor: int) -> None:
    """The gangs counted free never hold more GPUs than the nodes have, nor more than each has."""
    nodes = [node | {"CPU": 1000} for node in nodes]
    count = free_gangs(nodes, one_host(tensor))
    assert count == sum(int(node["GPU"]) // tensor for node in nodes)
    assert free_gangs(nodes, two_hosts(tensor)) * 2 * tensor <= sum(node["GPU"] for node in nodes)


@given(nodes=NODES, waiting=st.lists(st.integers(1, 16), max_size=4))
def test_a_waiting_group_never_adds_a_gang(
    nodes: list[dict[str, float]], waiting: list[int]
) -> None:
    """The more groups wait, the fewer gangs are free; each that is a whole gang itself takes one."""
    groups = [group("w", placed=False, gpus=gpus) for gpus in waiting]
    counts = [free_gangs(nodes, one_host(), groups[:size]) for size in range(len(groups) + 1)]
    assert counts == sorted(counts, reverse=True)
    gangs = [group("w", placed=False, gpus=8) for _ in waiting]
    assert free_gangs(nodes, one_host(), gangs) == max(0, counts[0] - len(gangs))
