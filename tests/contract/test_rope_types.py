"""Are the scalings of positions that the planner lets through those that the installed vLLM knows?"""

from __future__ import annotations

import ast
from pathlib import Path

import vllm

from rayserve.planner.support.rope import ROPE_TYPES

LEGACY = {"su", "mrope", "telechat3-yarn", "xdrope"}
"""Renamed as the config is read (transformers_utils/config.py, patch_legacy_rope_type; xdrope by
Transformers' class of HunYuan VL)."""


def test_the_types_are_those_that_get_rope_compares_with():
    """Every text that `scaling_type` is compared with has a row, and no other has one."""
    file = Path(vllm.__file__).parent / "model_executor/layers/rotary_embedding/__init__.py"
    compared = [
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Compare) and getattr(node.left, "id", "") == "scaling_type"
    ]
    texts = {
        one.value
        for node in compared
        for one in ast.walk(node)
        if isinstance(one, ast.Constant) and isinstance(one.value, str)
    }
    assert texts == set(ROPE_TYPES) - LEGACY
