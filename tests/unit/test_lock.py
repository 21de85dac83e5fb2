"""What goes into a lock file."""

from __future__ import annotations

import pytest

from scripts.lock import (
    CPU_EXCLUDED,
    Distribution,
    LockError,
    check,
    closure,
    parse_report,
    read_lock,
    render,
)
from scripts.setup_venv import STRAYS

RESOLUTION = {
    name: Distribution(name, version, requires)
    for name, version, requires in [
        ("engine", "1.0", ("torch==2", "torchvision", 'old-helper; python_version < "3.12"')),
        ("torch", "2+cpu", ('intel-libs; platform_machine == "x86_64"',)),
        ("intel-libs", "8", ()),
        ("torchvision", "3", ("pillow",)),
        ("pillow", "4", ()),
        ("old-helper", "5", ()),
        ("web", "6", ('Fast_Loop>=1; extra == "standard"',)),
        ("fast-loop", "7", ()),
    ]
}


def test_the_closure_follows_requirements_of_every_python_we_support():
    """A requirement that only one of our Pythons has is locked too."""
    names = closure(RESOLUTION, ["engine"])
    assert set(names) == {"engine", "torch", "intel-libs", "torchvision", "pillow", "old-helper"}


def test_what_is_excluded_takes_its_own_requirements_along():
    """Nothing is locked that only an excluded distribution needs."""
    names = closure(RESOLUTION, ["engine"], excluded=frozenset({"torchvision"}))
    assert set(names) == {"engine", "torch", "intel-libs", "old-helper"}


def test_extras_are_followed_only_where_they_are_asked_for():
    """`web[standard]` brings what `web` alone does not."""
    assert set(closure(RESOLUTION, ["web"])) == {"web"}
    assert set(closure(RESOLUTION, ["web[standard]"])) == {"web", "fast-loop"}


def test_a_hole_in_the_resolution_is_an_error_that_names_it():
    """A lock that would break `--no-deps` is never written."""
    with pytest.raises(LockError) as raised:
        closure(RESOLUTION, ["absent"])
    assert "absent is needed on Python 3.11 x86_64" in str(raised.value)


def test_a_report_of_pip_becomes_distributions_by_canonical_name():
    """Names are compared as package indexes compare them."""
    metadata = {"name": "Fast_Loop", "version": "7", "requires_dist": ["web"]}
    assert parse_report({"install": [{"metadata": metadata}, {"metadata": {**metadata}}]}) == {
        "fast-loop": Distribution("fast-loop", "7", ("web",))
    }


def test_a_lock_is_sorted_exact_and_says_how_to_use_it():
    """The text of a lock is the same for the same resolution."""
    both = frozenset({"aarch64", "x86_64"})
    text = render("title", RESOLUTION, {"web": both, "torch": both})
    assert text.splitlines()[0] == "# title"
    assert "--no-deps" in text
    assert text.splitlines()[-2:] == ["torch==2+cpu", "web==6"]


def test_what_one_architecture_needs_is_marked_and_read_back(tmp_path):
    """Intel's libraries are installed on x86_64 only, and the marker is no part of the version."""
    text = render("title", RESOLUTION, closure(RESOLUTION, ["torch"]))
    assert text.splitlines()[-2:] == [
        'intel-libs==8 ; platform_machine == "x86_64"',
        "torch==2+cpu",
    ]
    (tmp_path / "a.lock").write_text(text)
    assert read_lock(tmp_path / "a.lock") == {"intel-libs": "8", "torch": "2+cpu"}


def test_the_committed_locks_cover_the_package():
    """Each requirement of pyproject.toml is met by the locks, and what breaks torch is absent."""
    assert check() == []


def test_the_setup_removes_what_the_locks_leave_out():
    """The set-up, which cannot import scripts/lock.py, names the same distributions."""
    assert set(STRAYS) == CPU_EXCLUDED
