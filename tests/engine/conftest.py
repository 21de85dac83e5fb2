"""What do the tests in this folder share? One running product a module."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.served import Served, make_plan


@pytest.fixture(scope="module")
def served():
    """The product, started as a user would, with tools on; stopped after the module."""
    # Not tmp_path: HAProxy's sockets lie in this folder and take paths of 97 characters.
    with tempfile.TemporaryDirectory(prefix="rse-", dir="/tmp") as name:
        plan = make_plan(Path(name), chat={"tool_parser": "hermes"})
        with Served(plan, Path(name)) as running:
            yield running
