"""Which skipped tests CI accepts."""

from __future__ import annotations

import pytest

ALLOWED = ["GPU", "own-kernel hosts"]


@pytest.fixture
def refused():
    """The function under test, from tests/conftest.py, which is no importable package."""
    from tests.conftest import refused_skips

    return lambda reason: refused_skips([("tests/a.py::b", reason)], ALLOWED)


@pytest.mark.parametrize("reason", ["GPU: none here", "own-kernel hosts need root"])
def test_a_listed_reason_is_accepted(refused, reason):
    """A reason that begins with a listed word may skip."""
    assert refused(reason) == []


@pytest.mark.parametrize("reason", ["no GPU", "needs root", ""])
def test_any_other_reason_is_refused_and_named(refused, reason):
    """A reason that is not listed is shown with its test."""
    assert refused(reason) == [f"tests/a.py::b: {reason}"]
