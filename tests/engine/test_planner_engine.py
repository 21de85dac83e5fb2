"""Does a real engine print the KV tokens and the concurrency that the planner computes?"""

from __future__ import annotations

import pytest

from benchmarks.planner_engine import start
from benchmarks.planner_engine_models import MODELS

TINY = {model.name: model for model in MODELS}


@pytest.mark.parametrize("name", ["gqa", "hybrid"])
def test_the_planner_computes_what_the_engine_prints(name, tmp_path):
    """Tokens and concurrency in vLLM's start log are the planner's, with one group of layers and with several."""
    found = start(TINY[name], tmp_path)
    assert found.printed is not None, found.error
    assert found.planned == found.printed
