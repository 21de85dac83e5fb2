"""Is a reader told what a plan neither checked nor counted, and only where that is so?"""

from __future__ import annotations

import pytest

from tests.unit.plan_of import plan

OFFLOAD = "  kv_offload:\n    cpu_gib: 8\n"
TOLD = {
    "guesses": ({"add": "  speculative:\n    method: ngram\n    num_tokens: 3\n"}, "ngram saves"),
    "hosts": (
        {"add": "  parallelism:\n    tensor: 8\n    pipeline: 2\n"},
        "No engine has run across",
    ),
    "memory": ({"add": OFFLOAD}, "not checked against memory_gib and shm_gib"),
    "answers": (
        {"add": "  door:\n    max_tokens: 400000\n", "16384": "auto"},
        "door.max_tokens (400,000) is above max_model_len",
    ),
    "workload": ({"16384": "1000"}, "longer than max_model_len (1,000)"),
}


def notes(changes):
    """All notes of the plan of the base spec with changes."""
    changed = dict(changes)
    return " ".join(plan(changed.pop("add", ""), **changed).notes)


@pytest.mark.parametrize("changes, text", TOLD.values(), ids=TOLD)
def test_what_was_not_checked_or_counted_is_a_note(changes, text):
    """Each such key of the spec has its note in the plan."""
    assert text in notes(changes)


@pytest.mark.parametrize(
    "changes",
    [
        {
            "add": OFFLOAD,
            "gpus_per_host: 8": "gpus_per_host: 8\n    memory_gib: 1024\n    shm_gib: 512",
        },
        {"add": "  door:\n    max_tokens: 4096\n"},
    ],
    ids=["memory that is given", "answers that fit"],
)
def test_what_was_checked_has_no_such_note(changes):
    """Where the pool gives its memory, or the answer fits, nothing is said of it."""
    said = notes(changes)
    assert not [text for _, text in TOLD.values() if text in said and text != TOLD["hosts"][1]]
