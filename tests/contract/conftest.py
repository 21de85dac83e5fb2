"""What tests of the hub share: a hub on loopback, and a client of it."""

from __future__ import annotations

import pytest

from tests.contract.hub_client import CONFIG, ID, Client
from tests.contract.hub_server import COMMIT, serving


@pytest.fixture
def hub():
    """A hub with one small model."""
    with serving({ID: {COMMIT: {"config.json": CONFIG}}}) as server:
        yield server


@pytest.fixture
def client(tmp_path, monkeypatch):
    """A client without a token, in a cache of its own."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return Client(tmp_path / "hub", [])
