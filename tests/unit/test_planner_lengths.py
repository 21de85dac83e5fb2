"""Which lengths does a refusal or a note tell, and do they plan with the users that are told?"""

from __future__ import annotations

import re

import pytest

from tests.unit.test_planner_remedies import (
    GEMMA,
    KIMI,
    LARGE,
    PACKED,
    SMALL,
    length,
    plan,
    refusal,
    surely,
    value,
)

LONG = "  limits: {max_model_len: 131072, gpu_memory_utilization: 0.65}\n"
"""A context that leaves no room for it."""


def note(model, *where, **more) -> str:
    """The note of a plan that shortened max_model_len."""
    return next(one for one in plan(model, *where, **more).notes if "For a longer one" in one)


def told(do: str) -> list[tuple[int, int]]:
    """The lengths that a remedy tells, each with the sequences that remain."""
    found = re.findall(r"(\d+) \(max_num_seqs (\d+)\)", do)
    return [(int(tokens), int(users)) for tokens, users in found]


def test_a_refused_length_names_one_that_is_sure_and_one_at_the_very_best():
    """Who writes the first gets "fits"; the second may start, and 1,024 more than it cannot."""
    do = refusal(SMALL, "L4-24GB", 1, add=length(131072))
    sure, best = map(int, re.findall(r"(\d{4,})", do))
    assert "sure to fit" in do
    assert "at the very best" in do
    assert 2048 < sure < best < 131072
    assert surely(plan(SMALL, "L4-24GB", 1, add=length(sure)))
    assert not surely(plan(SMALL, "L4-24GB", 1, add=length(best)))
    assert refusal(SMALL, "L4-24GB", 1, add=length(best + 1024))


def test_the_note_of_a_longer_request_tells_what_is_sure():
    """The first length of the note is one that fits for sure, the second is not."""
    (sure, _), (best, _) = told(note(SMALL, "L4-24GB", 1))
    assert surely(plan(SMALL, "L4-24GB", 1, add=length(sure)))
    assert plan(SMALL, "L4-24GB", 1, add=length(best)).memory.verdict.startswith("within")


def test_a_note_and_a_refusal_tell_the_same_lengths():
    """One judge: who has read the note and writes more is told the same figures again."""
    said = told(note(SMALL, "L4-24GB", 1))
    assert said == told(refusal(SMALL, "L4-24GB", 1, add=length(131072)))


@pytest.mark.parametrize(
    "model, where",
    [
        (SMALL, ("L4-24GB", 1)),
        (KIMI, ("A100-80GB-SXM", 8)),
        (LARGE, ("A100-80GB-SXM", 8, 2)),
        (PACKED, ("A100-80GB-SXM", 4)),
        (GEMMA, ("RTX-3090-24GB", 3)),
    ],
)
@pytest.mark.parametrize("more", ["", "  scheduling: {chunked_prefill: false}\n"])
def test_a_length_that_is_told_plans_with_the_users_that_are_told(model, where, more):
    """Written literally, each leaves as many sequences as was said, on whatever cut is chosen then."""
    for found, users in told(note(model, *where, add=more)):
        made = plan(model, *where, add=more + length(found))
        assert value(made, "max_num_seqs") == users


def test_a_shorter_length_on_more_gpus_of_the_pool_is_told():
    """The first cut holds no weights: what the pool's others hold is told, not another pool."""
    do = refusal(LARGE, "A100-80GB-SXM", 8, 2, add=LONG)
    assert do.startswith("write max_model_len: ")
    for found, users in told(do):
        made = plan(LARGE, "A100-80GB-SXM", 8, 2, add=LONG.replace("131072", str(found)))
        assert value(made, "max_num_seqs") == users


def test_a_length_beside_written_sequences_plans_with_them():
    """The key that somebody wrote stays, and is not told again."""
    limits = "  limits: {max_num_seqs: 64, max_model_len: %d}\n"
    do = refusal(SMALL, "L4-24GB", 1, add=limits % 131072)
    sure, best = map(int, re.findall(r"(\d{4,})", do))
    assert "max_num_seqs" not in do
    assert surely(plan(SMALL, "L4-24GB", 1, add=limits % sure))
    assert plan(SMALL, "L4-24GB", 1, add=limits % best).memory.verdict.startswith("within")


def test_a_length_that_no_end_of_the_range_makes_sure_is_said_to_be_so():
    """Where the low end leaves no cache at all, no length is called sure."""
    assert "sure to fit" not in note(KIMI, "A100-80GB-SXM", 8)
    assert "where only a measurement tells" in note(KIMI, "A100-80GB-SXM", 8)
    assert "where only a measurement tells" in refusal(KIMI, "A100-80GB-SXM", 8, add=length(131072))


def test_sequences_do_not_make_a_sure_length_unsure():
    """A request that fits beside few sequences for sure gets few, with that reason."""
    (sure, users), _ = told(refusal(SMALL, "L4-24GB", 1, add=length(131072)))
    made = plan(SMALL, "L4-24GB", 1, add=length(sure))
    seqs = next(item for item in made.replica.engine_args if item.name == "max_num_seqs")
    assert surely(made)
    assert seqs.value == users
    assert f"not sure that a request of {sure:,} tokens fits" in seqs.reason
