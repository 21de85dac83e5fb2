"""Does the doctor show an error of the toolkit's own with all that it says?"""

from __future__ import annotations

import json

import pytest

from rayserve.doctor.report import render
from rayserve.errors import StartError, Where
from tests.unit.diagnosed import diagnose

REFUSED = str(
    StartError("the weights", found="none", do="stage them", where=Where("/p.yml", 12, "a.b"))
)
RAISED = f"Traceback (most recent call last):\nrayserve.errors.StartError: {REFUSED}"


@pytest.mark.parametrize(
    "head", ["", "(ServeReplica:app:Engine pid=9, ip=10.0.0.1) ", "Oct  1 12:00:00 h1 ray[12]: "]
)
def test_our_own_error_is_shown_with_what_was_found_and_what_to_do(head):
    """A message of three lines is three lines of evidence, also where another process writes between."""
    other = "(raylet) a line of another process"
    lines = RAISED.splitlines()
    log = [*lines[:3], other, *lines[3:], "  do: not a part of it", "  found: nor this"]
    verdict = diagnose("\n".join(f"{'' if line is other else head}{line}" for line in log))
    told = render(verdict, 1)
    assert [cause.tag for cause in verdict.causes] == ["refused-by-rayserve"]
    texts = [one.text.removeprefix(head) for one in verdict.causes[0].evidence]
    assert texts[0] == "rayserve.errors.StartError: /p.yml:12 (a.b): the weights"
    assert [text.strip() for text in texts[1:]] == ["found: none", "do:    stage them"]
    assert [one.line for one in verdict.causes[0].evidence] == [2, 3, 5]
    assert "do:    stage them" in told
    assert "more line" not in told


def test_our_own_error_in_one_record_is_shown_whole():
    """A JSON object that holds the whole traceback shows the three lines, and not where it begins."""
    record = json.dumps(
        {"levelname": "ERROR", "message": "at start: " + "x" * 500, "exc_text": RAISED}
    )
    texts = [one.text for one in diagnose(record).causes[0].evidence]
    assert texts == [
        "rayserve.errors.StartError: /p.yml:12 (a.b): the weights",
        "found: none",
        "do:    stage them",
    ]


def test_a_repeated_error_of_ours_counts_all_its_lines():
    """Of ten times three lines three are shown, and the others are counted."""
    told = render(diagnose("\n".join([RAISED] * 10)), 1)
    assert "stage them" in told
    assert "and 27 more lines" in told


def test_lines_that_only_look_like_ours_belong_to_nothing():
    """Without the error above them, and of another process, `found:` and `do:` are no evidence."""
    assert diagnose("  found: none\n  do:    stage them").word == "nothing"
    mixed = f"(A pid=1) {RAISED.splitlines()[1]}\n(B pid=2)   do:    other things"
    assert [one.line for one in diagnose(mixed).causes[0].evidence] == [1]
