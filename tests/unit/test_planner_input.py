"""Is the planner a function of its input, and does it take any config.json or refuse it?"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayserve.errors import RayserveError
from rayserve.planner import build_plan
from rayserve.spec import parse_spec
from tests.bad_specs import ROOT
from tests.unit.plan_of import BASE, MODEL, plan


def test_the_plan_is_a_function_of_its_input():
    """The same spec gives the same plan; another seed gives another revision."""
    anew = build_plan(parse_spec(BASE, "cluster.yml"), MODEL, "0" * 64)
    assert anew is not plan()
    assert anew == plan()
    assert plan("  seed: 1\n").revision != plan().revision


def test_the_planner_is_pure():
    """No module that decides imports a clock, a process, a socket, or a heavy library."""
    banned = ("import time", "import os", "subprocess", "socket", "import ray", "import vllm",
              "import torch", "datetime", "requests")  # fmt: skip
    folder = ROOT / "rayserve"
    paths = [*(folder / "planner").rglob("*.py"), *(folder / "spec").glob("*.py"),
             folder / "documents.py", folder / "engine" / "arguments.py",
             folder / "owned.py"]  # fmt: skip
    assert len(paths) > 12
    for path in paths:
        imports = [line for line in _imports(path) if line.startswith(("import ", "from "))]
        assert not [line for line in imports if any(word in line for word in banned)], path


def _imports(path: Path) -> list[str]:
    return [line.strip() for line in path.read_text().splitlines()]


WILD = st.one_of(st.none(), st.booleans(), st.integers(-5, 10**9), st.text(max_size=5),
                 st.lists(st.integers(), max_size=2), st.floats(allow_nan=False))  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"quantization_config": {"config_groups": {"a": 3}}},
        {"quantization_config": {"config_groups": {"a": {"weights": [1]}}}},
        {"quantization_config": {"quant_method": "gptq", "bits": "four"}},
        {"head_dim": None, "num_attention_heads": 10**9},
        {"text_config": 3},
        {"rope_parameters": [1]},
        {"layer_types": 3},
    ],
)
def test_odd_config_json_is_refused_or_read(change):
    """Shapes that no checkpoint has end in a message, never in a traceback."""
    with contextlib.suppress(RayserveError):
        assert plan(model={**MODEL, **change}).memory is not None


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(MODEL)), WILD)
def test_any_config_json_gives_a_plan_or_an_error_of_ours(key, value):
    """A broken config.json ends in a message, never in a traceback."""
    with contextlib.suppress(RayserveError):
        assert plan(model={**MODEL, key: value}).memory is not None
