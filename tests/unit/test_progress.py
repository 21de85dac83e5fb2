"""Does the watch give up a hung engine, and never one that is only slow? On recorded sequences."""

from __future__ import annotations

from itertools import pairwise

import pytest

from rayserve.health.progress import (
    IDLE_PROBE_S,
    Limits,
    Look,
    Progress,
    State,
    follow,
    judge,
    wants_probe,
)

LIMITS = Limits(stall_s=20)


class Watch:
    """Looks once a second at an engine that a test describes, and sends probes as the replica does."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self.now_s = 100.0
        self.steps = 0
        self.probe = 0
        self.sent = 0
        self.states: list[State] = []
        self.progress = Progress(Look(self.now_s, 0, 0))

    def look(
        self,
        seconds: float,
        *,
        pending: int,
        steps_a_second: float = 0,
        answers: bool = False,
        paused: bool = False,
        dead: bool = False,
        every_s: float = 1.0,
    ) -> State:
        """Watch for so many seconds; `answers`: whether the engine answers probes."""
        done = 0.0
        for _ in range(round(seconds / every_s)):
            self.now_s += every_s
            done += steps_a_second * every_s
            whole, done = divmod(done, 1)
            self.steps += int(whole)
            if self.probe and answers:
                self.probe, self.steps = 0, self.steps + 1
            look = Look(self.now_s, self.steps, pending, self.probe, self.sent, paused, dead)
            self.progress = follow(self.progress, look, self.limits)
            self.states.append(judge(self.progress, self.limits))
            if wants_probe(self.progress, self.limits):
                self.sent += 1
                self.probe = self.sent
        return self.states[-1]


def test_a_stopped_worker_is_a_hang_within_the_limit_and_a_few_looks():
    """Requests run, steps stop, the probe stays out: hung once `stall_s` is over, not before."""
    watch = Watch()
    watch.look(30, pending=4, steps_a_second=200)
    watch.look(19, pending=4)
    assert State.HUNG not in watch.states
    watch.look(3, pending=4)
    assert watch.states[-1] is State.HUNG
    assert watch.sent == 1


def test_a_hang_with_nobody_waiting_is_found_by_the_idle_probe():
    """An engine that stopped while idle is given up after its probe has stood for `stall_s`."""
    watch = Watch()
    watch.look(IDLE_PROBE_S + 1, pending=0)
    assert watch.sent == 1
    assert watch.look(LIMITS.stall_s + 2, pending=0) is State.HUNG


def test_a_dead_engine_is_dead_at_once():
    """vLLM's own word is enough: no second signal is waited for."""
    watch = Watch()
    watch.look(5, pending=4, steps_a_second=100)
    assert watch.look(1, pending=4, dead=True) is State.DEAD


@pytest.mark.parametrize(
    "name, pending, steps_a_second, answers",
    [
        ("a long prefill, in chunks of two seconds", 1, 0.5, False),
        ("a full queue, in which the probe waits", 600, 20, False),
        ("one step every 15 seconds", 8, 1 / 15, False),
        ("a request that is tokenised for minutes", 1, 0, True),
        ("an upload of images that are still decoded", 3, 0, True),
        ("idle", 0, 0, True),
    ],
)
def test_a_busy_engine_is_never_given_up(name, pending, steps_a_second, answers):
    """Whatever makes steps, or answers a probe, serves."""
    watch = Watch()
    watch.look(1800, pending=pending, steps_a_second=steps_a_second, answers=answers)
    assert not {State.HUNG, State.DEAD} & set(watch.states), name


def test_a_paused_engine_is_not_hung_and_one_that_goes_on_starts_anew():
    """A pause of ten minutes, for other weights, then work, and only then a hang."""
    watch = Watch()
    watch.look(600, pending=4, paused=True)
    watch.look(19, pending=4)
    assert State.HUNG not in watch.states
    assert watch.look(3, pending=4) is State.HUNG


def test_no_step_alone_and_a_late_probe_alone_are_only_quiet():
    """One signal of two is told, and kills nothing."""
    quiet = Progress(Look(0, 0, 4), quiet_s=500)
    assert judge(quiet, LIMITS) is State.QUIET
    late = Progress(Look(0, 0, 4, probe=1), probe_s=500)
    assert judge(late, LIMITS) is State.QUIET


def test_time_in_which_nobody_watched_counts_for_nothing():
    """A replica that was stopped for a minute, or had no processor, has seen two seconds of it."""
    watch = Watch()
    watch.look(5, pending=4, steps_a_second=100)
    watch.look(12, pending=4)
    watch.look(120, pending=4, every_s=60)
    assert State.HUNG not in watch.states
    assert watch.progress.quiet_s == pytest.approx(12 + 2 * 2)


def test_a_clock_that_goes_back_counts_for_nothing():
    """The two signals need time that has passed."""
    first = Progress(Look(100, 0, 4), quiet_s=3)
    assert follow(first, Look(50, 0, 4), LIMITS).quiet_s == 3


def test_work_that_comes_after_a_long_rest_has_waited_for_nothing():
    """An idle hour is no stall of the request that ends it."""
    watch = Watch()
    watch.look(50, pending=0)
    watch.look(2, pending=1)
    assert watch.progress.quiet_s <= 2


def test_a_step_takes_all_suspicion_away():
    """One step after 19 quiet seconds, and both signals start anew."""
    watch = Watch()
    watch.look(19, pending=4)
    watch.steps += 1
    watch.look(1, pending=4)
    assert watch.progress == Progress(watch.progress.look)


def test_one_probe_is_out_at_a_time_and_none_while_paused_or_dead():
    """A probe that does not come back is not followed by others."""
    watch = Watch()
    watch.look(300, pending=4)
    assert watch.sent == 1
    for look in (Look(0, 0, 4, paused=True), Look(0, 0, 4, dead=True), Look(0, 0, 4, probe=1)):
        assert not wants_probe(Progress(look, quiet_s=500, still_s=500, rest_s=500), LIMITS)
    assert wants_probe(Progress(Look(0, 0, 4), quiet_s=500, rest_s=500), LIMITS)


@pytest.mark.parametrize("pending, most", [(1, 600 / LIMITS.probe_s), (0, 600 / IDLE_PROBE_S)])
def test_probes_that_fail_come_at_the_pace_of_their_deadline_and_kill_nothing(pending, most):
    """A probe that never reached the engine is no signal; the next waits as if it had stood."""
    watch = Watch()
    for _ in range(600):
        watch.look(1, pending=pending)
        watch.probe = 0  # failed before the next look
    assert 2 < watch.sent <= most
    assert State.HUNG not in watch.states


def test_every_limit_finds_a_hang_within_fifteen_seconds_of_it():
    """From the shortest limit to ten minutes, the verdict comes soon after `stall_s`."""
    for stall_s in (0.5, 4, 10, 60, 600):
        watch = Watch(Limits(stall_s))
        watch.look(5, pending=1, steps_a_second=10)
        watch.look(max(0, stall_s - 1), pending=1)
        assert State.HUNG not in watch.states
        assert watch.look(10, pending=1) is State.HUNG


def test_hung_stays_hung_while_nothing_moves():
    """The verdict does not flicker between two looks."""
    watch = Watch()
    watch.look(120, pending=4)
    first = watch.states.index(State.HUNG)
    assert all(a is b for a, b in pairwise(watch.states[first:]))
