"""What do the tests in this folder share? One running product a module."""

from __future__ import annotations

import tempfile
from pathlib import Path

import anthropic
import openai
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


@pytest.fixture(scope="module")
def client(served):
    """The openai client, which does not repeat refused requests."""
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=served.key, max_retries=0) as one:
        yield one


@pytest.fixture(scope="module")
def claude(served):
    """The anthropic client, which sends the key as x-api-key."""
    with anthropic.Anthropic(base_url=served.url, api_key=served.key, max_retries=0) as one:
        yield one


@pytest.fixture
def door(served):
    """Changes the door's limits, and puts them back."""
    yield served.change_door
    served.change_door()
