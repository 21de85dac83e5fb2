"""Are the files of a plan written whole, all or none, whatever comes between?"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rayserve import inventory
from rayserve.errors import HostError


def test_a_replaced_file_keeps_its_mode_and_a_link_stays_one(tmp_path):
    """Written anew is the content alone, of what the name points to."""
    real, link = tmp_path / "real.yml", tmp_path / "link.yml"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    inventory.write_all({link: "new"})
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert real.stat().st_mode & 0o777 == 0o640


def test_a_failure_half_way_restores_both_files(tmp_path):
    """When the second file cannot be written, the first is as it was."""
    first, second = tmp_path / "plan.yml", tmp_path / "serve.yml"
    first.write_text("old plan")
    second.mkdir()  # a folder cannot be replaced by a file
    with pytest.raises(HostError):
        inventory.write_all({first: "new plan", second: "new"})
    assert first.read_text() == "old plan"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.yml", "serve.yml"]


def test_a_failure_half_way_leaves_no_new_file(tmp_path):
    """When there was no plan before, there is none after a failure."""
    second = tmp_path / "serve.yml"
    second.mkdir()
    with pytest.raises(HostError):
        inventory.write_all({tmp_path / "plan.yml": "new plan", second: "new"})
    assert [path.name for path in tmp_path.iterdir()] == ["serve.yml"]


def test_the_folder_is_held_while_files_are_written(tmp_path, monkeypatch):
    """From the first file to the last nobody else gets the folder, so two specs do not mix; then it is free."""
    folder, real, held = os.open(tmp_path, os.O_RDONLY), Path.replace, []

    def replaced(draft, path):
        with pytest.raises(BlockingIOError):
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held.append(path.name)
        return real(draft, path)

    monkeypatch.setattr(Path, "replace", replaced)
    inventory.write_all({tmp_path / "plan.yml": "new plan", tmp_path / "serve.yml": "new"})
    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(folder)
    assert held == ["plan.yml", "serve.yml"]


@pytest.mark.parametrize("interrupted", [1, 2])
def test_ctrl_c_while_a_file_is_replaced_restores_all(tmp_path, monkeypatch, interrupted):
    """The system has put the new file in place, and the signal comes before the next line: the old ones come back."""
    paths, real = [tmp_path / "plan.yml", tmp_path / "serve.yml"], Path.replace
    for path in paths:
        path.write_text(f"old {path.name}")
    replaced = []

    def replace(draft, path):
        real(draft, path)
        replaced.append(path)
        if len(replaced) == interrupted:
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        inventory.write_all(dict.fromkeys(paths, "new"))
    assert [path.read_text() for path in paths] == ["old plan.yml", "old serve.yml"]
    assert sorted(tmp_path.iterdir()) == paths


TERMINATED = """
import os, signal, sys
from pathlib import Path
from rayserve import inventory
real = Path.replace
def replace(draft, path):
    real(draft, path)
    os.kill(os.getpid(), signal.SIGTERM)
Path.replace = replace
folder = Path(sys.argv[1])
inventory.write_all({folder / "plan.yml": "new", folder / "serve.yml": "new"})
"""


def test_a_writer_that_is_told_to_end_writes_all_first(tmp_path):
    """SIGTERM between two files ends the process after the second, and no draft stays."""
    ended = subprocess.run([sys.executable, "-c", TERMINATED, tmp_path], check=False)
    assert ended.returncode == -signal.SIGTERM
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "plan.yml": "new",
        "serve.yml": "new",
    }


def test_drafts_of_a_killed_writer_go_with_the_next_write(tmp_path):
    """A draft is removed when its writer is gone, and nothing that another one or a person has made."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    left = tmp_path / f".plan.yml.{gone.pid}"
    others = [tmp_path / f".plan.yml.{os.getppid()}", tmp_path / ".plan.yml.orig"]
    for path in (left, *others):
        path.write_text("draft")
    inventory.write_all({tmp_path / "plan.yml": "new"})
    assert not left.exists()
    assert all(path.exists() for path in others)
