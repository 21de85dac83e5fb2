"""Is the request that kills the engine found, and is no other refused for it?"""

from __future__ import annotations

import random

import pytest

from rayserve.health.poison import (
    EXPIRY_S,
    MOST_DEATHS,
    Death,
    Suspicions,
    cleared,
    weigh,
    with_death,
)

NOW = 1_800_000_000.0


def deaths(*events, revision="r1", every_s=60.0):
    """The record of deaths, each named by the letters of what ran; `+ab`: these end well in between."""
    record: tuple[Death, ...] = ()
    for number, letters in enumerate(events):
        at_s = NOW + number * every_s
        if letters.startswith("+"):
            record = cleared(record, revision, dict.fromkeys(letters[1:], at_s), at_s)
        else:
            record = with_death(record, Death(at_s, revision, frozenset(letters)))
    return record


def weighed(*events):
    """What is suspected, served alone, and refused after these events."""
    found = weigh(deaths(*events), "r1", NOW + 600)
    return tuple("".join(sorted(kind)) for kind in (found.suspected, found.alone, found.refused))


@pytest.mark.parametrize(
    "events, suspected, alone, refused",
    [
        ((), "", "", ""),
        (("p",), "p", "", ""),
        (("pab",), "abp", "", ""),
        (("pab", "pcd"), "abcdp", "", "p"),
        (("pab", "pab"), "abp", "abp", ""),
        (("pab", "pab", "pc"), "abcp", "ab", "p"),
        (("pab", "pab", "+ab"), "p", "p", ""),
        (("pa", "bc"), "abcp", "", ""),
        (("p", "p", "+p"), "", "", ""),
        (("pa", "pa", "bc", "pb"), "abcp", "abp", ""),
        # who ended well after the first death runs at the second one for the first time
        (("xi", "+i", "ip"), "ipx", "", ""),
        (("xij", "+ij", "ijp"), "ijpx", "", ""),
        (("pm", "+m", "pm"), "mp", "", "p"),
        (("pm", "pm", "+m", "pm"), "mp", "", "p"),
    ],
)  # fmt: skip
def test_what_ran_at_two_deaths_is_refused_once_it_is_the_only_one(
    events, suspected, alone, refused
):
    """One death refuses nothing; several that ran twice are served alone, also the last that has not ended well."""
    assert weighed(*events) == (suspected, alone, refused)


def test_nobody_is_refused_without_one_more_death():
    """Neither because others end well, nor because a death expires, is a request guilty that was not alone."""
    first, *later = deaths("a", "i", "ia")
    ended = {"a": NOW + 500}
    known = weigh(cleared((first, *later), "r1", ended, NOW + 500), "r1", NOW + 600)
    assert (known.alone, known.refused) == ({"i"}, set())
    known = weigh((first, *later), "r1", first.at_s + EXPIRY_S)
    assert (known.alone, known.refused) == ({"i"}, set())


def test_that_one_ended_well_between_two_deaths_may_be_told_after_both():
    """Another replica served it, and tells so only now: it ran at one death alone."""
    record = deaths("i", "ip")
    assert weigh(record, "r1", NOW + 600).refused == {"i"}
    known = weigh(cleared(record, "r1", {"i": NOW + 30}, NOW + 600), "r1", NOW + 600)
    assert (known.suspected, known.refused) == ({"i", "p"}, set())


def test_who_ends_well_is_clear_of_what_was_before_and_of_its_own_revision():
    """A death after it, or of another engine, still counts."""
    (first,) = deaths("pq")
    (other,) = deaths("p", revision="r0")
    record = cleared((first, other), "r1", {"p": first.at_s + 1, "q": first.at_s - 1}, NOW + 600)
    assert weigh(record, "r1", NOW + 600).suspected == {"q"}
    assert weigh(record, "r0", NOW + 600).suspected == {"p"}
    again = cleared((first,), "r1", {"p": first.at_s + 1, "q": first.at_s + 1}, NOW + 600)
    known = weigh(with_death(again, Death(NOW + 60, "r1", frozenset("p"))), "r1", NOW + 600)
    assert (known.suspected, known.refused) == ({"p"}, set())


def test_another_revision_is_another_engine():
    """What killed one says nothing of the next."""
    assert weigh(deaths("p", "p", revision="r0"), "r1", NOW) == Suspicions()


@pytest.mark.parametrize("later_s", [EXPIRY_S + 61, -EXPIRY_S - 1])
def test_deaths_expire(later_s):
    """After a day, or when the clock was set back by one, they count no more."""
    assert weigh(deaths("p", "p"), "r1", NOW + later_s) == Suspicions()


def test_of_two_deaths_that_one_is_left_refuses_nothing():
    """As one death alone never does."""
    first, second = deaths("p", "p")
    known = weigh((first, second), "r1", first.at_s + EXPIRY_S)
    assert (known.suspected, known.refused) == ({"p"}, set())


def test_a_clock_that_was_set_back_keeps_nobody_from_being_cleared():
    """A death that is still to come by the clock was before whatever ends now."""
    record = deaths("ab", "ab")
    back_s = NOW - 3600
    record = cleared(record, "r1", {"a": back_s}, back_s + 1)
    assert weigh(record, "r1", back_s + 2).suspected == {"b"}


def test_a_record_stays_bounded():
    """The newest deaths are kept, and none that has expired."""
    many: tuple[Death, ...] = ()
    for number in range(MOST_DEATHS + 5):
        many = with_death(many, Death(NOW + number, "r1", frozenset({str(number)})))
    assert len(many) == MOST_DEATHS
    assert many[-1].running == {str(MOST_DEATHS + 4)}
    late = Death(NOW + 2 * EXPIRY_S, "r1", frozenset("x"))
    assert with_death(many, late) == (late,)


@pytest.mark.parametrize("seed", range(20))
def test_with_clients_that_repeat_everything_only_the_poison_is_refused(seed):
    """Innocent requests that are sent again after each death are cleared; three deaths find the poison.

    One of them is asked all the time: it is at every death, and ends well after each.
    """
    chance = random.Random(seed)
    record: tuple[Death, ...] = ()
    waiting = {f"i{number}" for number in range(8)} | {"p"}
    for number in range(1, 5):
        known = weigh(record, "r1", NOW + number)
        if "p" in known.refused:
            break
        # Some are on other hosts, or wait for their turn: a part of them runs beside the poison.
        running = set(chance.sample(sorted(waiting - {"p"}), 4)) | {"p"}
        if "p" in known.alone:
            running -= known.suspected - {"p"}
            ended = chance.sample(sorted(waiting - {"p"}), 2)
            record = cleared(record, "r1", dict.fromkeys(ended, NOW + number - 0.5), NOW + number)
        record = with_death(record, Death(NOW + number, "r1", frozenset(running | {"hot"})))
        record = cleared(record, "r1", {"hot": NOW + number + 0.2}, NOW + number + 1)
    known = weigh(record, "r1", NOW + 9)
    assert known.refused == {"p"}
    assert len(record) <= 3
