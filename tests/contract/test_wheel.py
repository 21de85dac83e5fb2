"""Is rayserve's wheel the same file whenever it is built, so that hosts can tell by its digest?"""

from __future__ import annotations

import zipfile

from scripts.build_wheels import build


def test_the_same_sources_give_the_same_wheel(tmp_path):
    """Two builds are equal byte for byte, and hold the package with its data."""
    first, second = build(tmp_path / "a"), build(tmp_path / "b")
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()
    names = zipfile.ZipFile(first).namelist()
    assert "rayserve/cli.py" in names
    assert "rayserve/data/gpus.yml" in names
