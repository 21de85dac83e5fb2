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


def deaths(*running, revision="r1", every_s=60.0):
    """Deaths one after the other, each with the letters of its requests."""
    return tuple(
        Death(NOW + number * every_s, revision, frozenset(letters))
        for number, letters in enumerate(running)
    )


def weighed(*running, well=""):
    """What is suspected, served alone, and refused after these deaths; `well` ended well since."""
    ended = dict.fromkeys(well, NOW + 599)
    found = weigh(cleared(deaths(*running), "r1", ended), "r1", NOW + 600)
    return tuple("".join(sorted(kind)) for kind in (found.suspected, found.alone, found.refused))


@pytest.mark.parametrize(
    "running, well, suspected, alone, refused",
    [
        ((), "", "", "", ""),
        (("p",), "", "p", "", ""),
        (("pab",), "", "abp", "", ""),
        (("pab", "pcd"), "", "abcdp", "", "p"),
        (("pab", "pab"), "", "abp", "abp", ""),
        (("pab", "pab", "pc"), "", "abcp", "ab", "p"),
        (("pab", "pab"), "ab", "p", "p", ""),
        (("pa", "bc"), "", "abcp", "", ""),
        (("p", "p"), "p", "", "", ""),
        (("pa", "pa", "bc", "pb"), "", "abcp", "abp", ""),
    ],
)  # fmt: skip
def test_what_ran_at_two_deaths_is_refused_once_it_is_the_only_one(
    running, well, suspected, alone, refused
):
    """One death refuses nothing; several that ran twice are served alone, also the last that has not ended well."""
    assert weighed(*running, well=well) == (suspected, alone, refused)


def test_who_ends_well_is_clear_of_what_was_before_and_of_its_own_revision():
    """A death after it, or of another engine, still counts."""
    first, second = deaths("p", "p")
    other = deaths("p", revision="r0")
    record = cleared((first, second, *other), "r1", {"p": first.at_s + 1})
    assert weigh(record, "r1", NOW + 600) == Suspicions(suspected=frozenset("p"))
    assert weigh(record, "r0", NOW + 600).suspected == {"p"}


def test_another_revision_is_another_engine():
    """What killed one says nothing of the next."""
    assert weigh(deaths("p", "p", revision="r0"), "r1", NOW) == Suspicions()


@pytest.mark.parametrize("later_s", [EXPIRY_S + 61, -EXPIRY_S - 1])
def test_deaths_expire(later_s):
    """After a day, or when the clock was set back by one, they count no more."""
    assert weigh(deaths("p", "p"), "r1", NOW + later_s) == Suspicions()


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
    """Innocent requests that are sent again after each death are cleared; three deaths find the poison."""
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
            record = cleared(record, "r1", dict.fromkeys(ended, NOW + number - 0.5))
        record = with_death(record, Death(NOW + number, "r1", frozenset(running)))
    known = weigh(record, "r1", NOW + 9)
    assert known.refused == {"p"}
    assert len(record) <= 3
