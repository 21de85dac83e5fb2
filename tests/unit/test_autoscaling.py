"""Does the decision ask for what the load needs, never for what cannot be placed, and not flap?"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rayserve.autoscaling import (
    HEADROOM,
    PLACEMENT_GRACE_S,
    Decision,
    Load,
    ReplicaLoad,
    Replicas,
    State,
    decide,
)
from rayserve.gangs import Capacity
from rayserve.plan import ScalingPlan
from tests.unit.scaling import PLAN, replica

LONG_S = 10_000.0


def settle(
    loads: list[ReplicaLoad | None],
    replicas: Replicas,
    capacity: Capacity = Capacity(9),  # noqa: B008 (frozen)
    plan: ScalingPlan = PLAN,
) -> Decision:
    """The decision once this load has lasted longer than every delay."""
    first = decide(Load(tuple(loads)), capacity, replicas, plan, State(), 0.0)
    if first.target != replicas.target:
        return first
    return decide(Load(tuple(loads)), capacity, replicas, plan, first.state, LONG_S)


@pytest.mark.parametrize(
    "loads, replicas, free, target, reason",
    [
        # one replica at and above its target of ten requests
        ([replica(10)], Replicas(1, 1), 9, 1, "load fits"),
        ([replica(11)], Replicas(1, 1), 9, 2, "requests above target"),
        ([replica(35)], Replicas(1, 1), 9, 4, "requests above target"),
        ([replica(35)], Replicas(1, 1), 2, 3, "requests above target"),
        ([replica(99)], Replicas(1, 1), 9, 4, "requests above target"),
        # no gang, no request for one
        ([replica(99)], Replicas(1, 1), 0, 1, "requests above target, but no gang is free"),
        ([replica(99)] * 4, Replicas(4, 4), 9, 4, "requests above target, but at max_replicas"),
        # load is the sum over replicas, however unevenly it lies
        ([replica(19), replica(1)], Replicas(2, 2), 9, 2, "load fits"),
        ([replica(20), replica(1)], Replicas(2, 2), 9, 3, "requests above target"),
        # KV cache, as a sum too
        ([replica(5, kv_usage=0.8)], Replicas(1, 1), 9, 1, "load fits"),
        ([replica(5, kv_usage=0.81)], Replicas(1, 1), 9, 2, "KV cache above target"),
        ([replica(5, 0.9), replica(5, 0.6)], Replicas(2, 2), 9, 2, "load fits"),
        # time to first token against the objective
        ([replica(5, ttft_ms=500)], Replicas(1, 1), 9, 1, "load fits"),
        ([replica(5, ttft_ms=501)], Replicas(1, 1), 9, 2, "first tokens later than the objective"),
        ([replica(1, ttft_ms=900)], Replicas(1, 1), 9, 1, "load fits"),
        ([replica(5, ttft_ms=900)], Replicas(1, 2), 9, 2, "load fits"),
        # one fewer only where the other stays below 80 % of every target
        ([replica(4), replica(4)], Replicas(2, 2), 9, 1, "load low"),
        ([replica(5), replica(4)], Replicas(2, 2), 9, 2, "load fits"),
        ([replica(1, 0.3), replica(1, 0.3)], Replicas(2, 2), 9, 1, "load low"),
        ([replica(1, 0.4), replica(1, 0.3)], Replicas(2, 2), 9, 2, "load fits"),
        ([replica(1, ttft_ms=450), replica(1)], Replicas(2, 2), 9, 2, "load fits"),
        # one at a time, and never below the minimum
        ([replica(0)] * 4, Replicas(4, 4), 9, 3, "load low"),
        ([replica(0)], Replicas(1, 1), 9, 1, "load fits"),
        # a replica that never becomes ready may be given back
        ([replica(1)], Replicas(1, 2), 9, 1, "load low"),
    ],
)
def test_truth_table(
    loads: list[ReplicaLoad | None], replicas: Replicas, free: int, target: int, reason: str
) -> None:
    """Each load, held for longer than every delay, leads to the stated number of replicas."""
    decision = settle(loads, replicas, Capacity(free))
    assert (decision.target, decision.reason) == (target, reason)


@pytest.mark.parametrize(
    "loads",
    [[], [None], [replica(99)], [replica(99), None]],
    ids=["no report", "unknown", "one report for two replicas", "one of two unknown"],
)
def test_unknown_load_changes_nothing(loads: list[ReplicaLoad | None]) -> None:
    """With two replicas running, anything but two known loads holds, up and down."""
    decision = settle(loads, Replicas(2, 2))
    assert (decision.target, decision.reason) == (2, "load not known")


def test_growth_waits_for_its_delay_without_a_break() -> None:
    """30 s above the target are needed in one piece; a second below it starts the count again."""
    high, low = Load((replica(11),)), Load((replica(10),))
    one = Replicas(1, 1)
    state = State()
    for now_s, load, target in [
        (0, high, 1),
        (29, high, 1),
        (29.5, low, 1),
        (30, high, 1),
        (59.9, high, 1),
        (60, high, 2),
    ]:
        decision = decide(load, Capacity(1), one, PLAN, state, now_s)
        assert decision.target == target, now_s
        state = decision.state


def test_a_gap_in_the_reports_starts_the_delay_again() -> None:
    """A delay counts only time in which the load was known."""
    one = Replicas(1, 1)
    state = decide(Load((replica(11),)), Capacity(1), one, PLAN, State(), 0).state
    state = decide(Load((None,)), Capacity(1), one, PLAN, state, 20).state
    assert decide(Load((replica(11),)), Capacity(1), one, PLAN, state, 40).target == 1


def test_growth_follows_at_once_when_a_gang_becomes_free() -> None:
    """The delay is served while no gang is free, so a freed one is taken without a second delay."""
    load, one = Load((replica(11),)), Replicas(1, 1)
    state = decide(load, Capacity(0), one, PLAN, State(), 0).state
    held = decide(load, Capacity(0), one, PLAN, state, 40)
    assert held.target == 1
    assert decide(load, Capacity(1), one, PLAN, held.state, 41).target == 2


def test_unknown_capacity_is_not_free_capacity() -> None:
    """Without a fresh view of the cluster the load may be high, but nothing is asked for."""
    decision = settle([replica(99)], Replicas(1, 1), Capacity(0, known=False))
    assert decision.target == 1
    assert decision.reason == "requests above target, but free gangs are not known"


def test_a_replica_without_a_gang_is_taken_back() -> None:
    """Somebody else took the gang: after the grace time the pending replica is given up."""
    load, capacity = Load((replica(11),)), Capacity(0, unplaced=1)
    first = decide(load, capacity, Replicas(1, 2), PLAN, State(), 0.0)
    assert first.target == 2
    later = decide(load, capacity, Replicas(1, 2), PLAN, first.state, PLACEMENT_GRACE_S)
    assert (later.target, later.reason) == (1, "taken back: no gang for it")


def test_taking_back_leaves_the_running_and_the_placed() -> None:
    """Of three asked for, one running and one starting on its gang, only the pending one goes."""
    state = State(unplaced_since_s=0.0)
    capacity = Capacity(0, unplaced=1)
    decision = decide(Load((replica(11),)), capacity, Replicas(1, 3), PLAN, state, LONG_S)
    assert decision.target == 2


def test_the_minimum_is_never_taken_back() -> None:
    """A deployment that cannot place its minimum keeps asking: that is the operator's order."""
    state = State(unplaced_since_s=0.0)
    plan = PLAN.model_copy(update={"min_replicas": 2})
    capacity = Capacity(0, unplaced=1)
    decision = decide(Load((replica(11),)), capacity, Replicas(1, 2), plan, state, LONG_S)
    assert decision.target == 2


def test_edited_bounds_apply_at_once() -> None:
    """A target outside new bounds moves to the nearest bound, without a delay."""
    lower = PLAN.model_copy(update={"max_replicas": 2})
    assert decide(Load(()), Capacity(0), Replicas(3, 3), lower, State(), 0).target == 2
    higher = PLAN.model_copy(update={"min_replicas": 2})
    assert decide(Load(()), Capacity(0), Replicas(1, 1), higher, State(), 0).target == 2


def test_only_a_minimum_of_zero_scales_to_zero() -> None:
    """The last replica goes only without a single request, and only if the plan allows none."""
    to_zero = PLAN.model_copy(update={"min_replicas": 0})
    assert settle([replica(0)], Replicas(1, 1), plan=to_zero).target == 0
    assert settle([replica(1)], Replicas(1, 1), plan=to_zero).target == 1
    assert settle([replica(0)], Replicas(1, 1)).target == 1


def test_no_objective_means_no_opinion_on_first_tokens() -> None:
    """With an objective of 0 a slow first token neither grows nor blocks giving back."""
    plan = PLAN.model_copy(update={"ttft_slo_ms": 0})
    assert settle([replica(5, ttft_ms=9e9)], Replicas(1, 1), plan=plan).target == 1
    assert settle([replica(1, ttft_ms=9e9), replica(0)], Replicas(2, 2), plan=plan).target == 1


def test_a_clock_that_steps_back_only_restarts_the_delay() -> None:
    """A time before the remembered one counts as the new beginning."""
    state = State(above_since_s=1000.0)
    decision = decide(Load((replica(11),)), Capacity(1), Replicas(1, 1), PLAN, state, 10.0)
    assert (decision.target, decision.state.above_since_s) == (1, 10.0)


def test_the_engine_counts_where_the_door_does_not() -> None:
    """Requests are those of the door or of the engine, whichever counter shows more."""
    assert ReplicaLoad(3, 2, 4, 0).requests == 6
    assert ReplicaLoad(9, 2, 4, 0).requests == 9


# -- Properties

LOADS = st.lists(
    st.builds(
        replica,
        st.floats(0, 100),
        st.floats(0, 1),
        st.floats(0, 5000),
    ),
    min_size=1,
    max_size=6,
)
PLANS = st.builds(
    lambda low, span, requests, kv, slo: ScalingPlan(
        min_replicas=low,
        max_replicas=max(1, low + span),
        target_in_flight=requests,
        target_kv_usage=kv,
        upscale_delay_s=30,
        downscale_delay_s=300,
        ttft_slo_ms=slo,
    ),
    st.integers(0, 3),
    st.integers(0, 5),
    st.integers(1, 20),
    st.floats(0.1, 1),
    st.sampled_from([0.0, 500.0]),
)
STATES = st.builds(
    State,
    st.none() | st.floats(0, LONG_S),
    st.none() | st.floats(0, LONG_S),
    st.none() | st.floats(0, LONG_S),
)


@given(
    loads=LOADS,
    plan=PLANS,
    state=STATES,
    free=st.integers(0, 5),
    unplaced=st.integers(0, 3),
    asked=st.integers(0, 3),
)
def test_the_target_stays_within_bounds_and_capacity(
    loads: list[ReplicaLoad | None],
    plan: ScalingPlan,
    state: State,
    free: int,
    unplaced: int,
    asked: int,
) -> None:
    """Whatever the load, the state and the clock: within [min, max], and at most `free` more."""
    replicas = Replicas(len(loads), len(loads) + asked)
    capacity = Capacity(free, unplaced)
    target = decide(Load(tuple(loads)), capacity, replicas, plan, state, LONG_S).target
    assert plan.min_replicas <= target <= plan.max_replicas
    assert target <= max(replicas.target + free, plan.min_replicas)
    assert target >= min(replicas.running, plan.max_replicas) - 1


@given(loads=LOADS, plan=PLANS, more=st.floats(0, 50), free=st.integers(0, 5))
def test_more_load_never_means_fewer_replicas(
    loads: list[ReplicaLoad], plan: ScalingPlan, more: float, free: int
) -> None:
    """Adding requests to a replica never lowers the number asked for."""
    replicas = Replicas(len(loads), len(loads))
    heavier = [replace(loads[0], in_flight=loads[0].requests + more), *loads[1:]]
    before = settle([*loads], replicas, Capacity(free), plan).target
    assert settle([*heavier], replicas, Capacity(free), plan).target >= before


@given(loads=LOADS, plan=PLANS, free=st.integers(0, 5))
def test_more_room_never_means_fewer_replicas(
    loads: list[ReplicaLoad], plan: ScalingPlan, free: int
) -> None:
    """One more free gang never lowers the number asked for."""
    replicas = Replicas(len(loads), len(loads))
    before = settle([*loads], replicas, Capacity(free), plan).target
    assert settle([*loads], replicas, Capacity(free + 1), plan).target >= before


@given(loads=LOADS, plan=PLANS)
def test_giving_back_never_overloads_the_others(
    loads: list[ReplicaLoad], plan: ScalingPlan
) -> None:
    """After a replica is given back, the load that it carried fits on the rest with headroom."""
    replicas = Replicas(len(loads), len(loads))
    assume(plan.min_replicas <= replicas.target <= plan.max_replicas)
    target = settle([*loads], replicas, Capacity(0), plan).target
    if target < replicas.target:
        requests = sum(load.requests for load in loads)
        assert requests <= HEADROOM * target * plan.target_in_flight
        kv_usage = sum(load.kv_usage for load in loads)
        assert target == 0 or kv_usage <= HEADROOM * target * plan.target_kv_usage


@given(requests=st.floats(0, 100), kv=st.floats(0, 4), plan=PLANS, start=st.integers(1, 6))
def test_steady_load_does_not_flap(
    requests: float, kv: float, plan: ScalingPlan, start: int
) -> None:
    """Under a load that does not change, replicas move in one direction and then stand still."""
    target, state, seen = start, State(), [start]
    for tick in range(120):
        # The same load, spread over what runs; every replica asked for runs at the next tick.
        share = [replica(requests / target, kv / target)] * target
        current = Replicas(target, target)
        decision = decide(Load(tuple(share)), Capacity(9), current, plan, state, 60.0 * tick)
        if decision.target == 0:
            break
        target, state = decision.target, decision.state
        seen.append(target)
    steps = [after - before for before, after in pairwise(seen) if after != before]
    assert all(step > 0 for step in steps) or all(step < 0 for step in steps)


# -- Reports


# -- Serve's config
