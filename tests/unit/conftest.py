"""What several modules of unit tests start from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.bad_specs import ROOT
from tests.command import plan_files


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """A copy of the example inventory, with its committed plan."""
    return Path(shutil.copytree(ROOT / "inventories" / "example", tmp_path / "example"))


@pytest.fixture
def env(example: Path) -> Path:
    """A copy of the example inventory, without its generated files."""
    for path in plan_files(example):
        path.unlink(missing_ok=True)
    return example
