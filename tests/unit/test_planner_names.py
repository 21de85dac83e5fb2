"""Are lists of modules bounded in what matching them costs, and are real ones let through?"""

from __future__ import annotations

import re
import time
from functools import partial

import pytest

from rayserve.errors import SpecError, Where
from rayserve.planner.support.names import check_names, is_slow
from rayserve.planner.weights.module_names import _literal
from rayserve.planner.weights.quantization import EXACT, PART, WILDCARD, Quantization
from rayserve.planner.weights.storage import Storage
from tests.errors_of import error_of

HERE = Where("config.json")


@pytest.mark.parametrize(
    "expression",
    [
        ".*lm_head",
        r".*self_attn\.(q|k|v)_proj.*",
        r"model\.layers\.\d+\.mlp\.experts\.[0-9]+\.(gate|up|down)_proj",
        r"^(?!.*experts).*$",
        ".*block_sparse_moe[.]gate",
        r"(.*\.)?experts\..*",
        "visual.*",
        r"model[.]layers[.](?:[0-9]|[1-9][0-9])[.]self_attn.*",
        r".*model.*layers.*mlp.*down_proj.*",
    ],
)
def test_expressions_of_published_checkpoints_pass(expression):
    """What quantizers write is quick."""
    re.compile(expression)
    assert not is_slow(expression)


@pytest.mark.parametrize(
    "expression",
    ["(a+)+$", "(a|aa)*b", "(.*)*x", ".*.*x", ".*[a-z].*[a-z].*!", ".*a.*a.*!", r"\w+\d*x",
     "(x){9,}", "a" * 501],
)  # fmt: skip
def test_expressions_that_may_take_for_ever_are_told(expression):
    """Repeats of repeats, and repeats with nothing solid between, are slow."""
    assert is_slow(expression)


@pytest.mark.parametrize(
    "raw, layers, expect",
    [
        (
            {"quant_method": "awq", "modules_to_not_convert": ["m"] * 2001},
            125,
            "at most 2000 names",
        ),
        ({"quant_method": "modelopt", "exclude_modules": ["*m*"] * 251}, 1000, "at most 250"),
        ({"quant_method": "compressed-tensors", "ignore": ["re:a"] * 251}, 1000, "at most 250"),
        ({"quant_method": "fp8", "ignored_layers": ["m"] * 200_001}, 2, "200000 names"),
        ({"config_groups": {str(n): {} for n in range(201)}}, 2, "at most 200 groups"),
        ({"config_groups": {"g": {"targets": ["re:(a+)+"]}}}, 2, "config_groups.g.targets"),
    ],
)
def test_what_would_take_long_is_refused(raw, layers, expect):
    """Each bound names its number and the key."""
    with pytest.raises(SpecError) as caught:
        check_names(raw, "quantization_config.", HERE, layers=layers)
    assert expect in caught.value.message()


@pytest.mark.parametrize(
    "raw",
    [
        {"quant_method": "compressed-tensors", "ignore": ["model.layers.0.x"] * 100_000},
        {"quant_method": "awq", "modules_to_not_convert": ["visual"] * 500},
        {"quant_method": "fp8", "ignored_layers": [None, 3]},
        {},
    ],
)
def test_long_lists_of_whole_names_pass(raw):
    """Every matrix of every expert may be named where names are compared whole."""
    assert error_of(partial(check_names, layers=94), raw, "", HERE) is None


@pytest.mark.parametrize(
    "matching, ignored, name, skipped",
    [
        (EXACT, ("model.layers.0",), "model.layers.0.mlp.down_proj", True),
        (EXACT, ("layers.0",), "model.layers.0.mlp.down_proj", False),
        (EXACT, ("re:.*down_proj",), "model.layers.0.mlp.down_proj", True),
        (EXACT, ("re:(", "re:.*up"), "model.layers.0.mlp.down_proj", False),
        (PART, ("mlp.down",), "model.layers.0.mlp.down_proj", True),
        (PART, ("proj.model",), "model.layers.0.mlp.down_proj", False),
        (WILDCARD, ("*.layers.0*",), "model.layers.0.mlp.down_proj", True),
        (WILDCARD, ("*.layers.1*", "lm_head"), "model.layers.0.mlp.down_proj", False),
        (WILDCARD, ("model.layers.0.mlp.down_pro?",), "model.layers.0.mlp.down_proj", True),
        (WILDCARD, ("[", "language_model.*"), "model.layers.0.mlp.down_proj", True),
    ],
)
def test_names_are_matched_as_the_method_does(matching, ignored, name, skipped):
    """Whole, as a part, or by wildcards; modules above a name count, and spellings of other trees."""
    storage = Storage("fp8")
    formats = Quantization("x", ((("Linear",), storage),), ignored, matching)
    assert (formats.storage(name) is None) is skipped
    assert (formats.storage(name) is None) is skipped  # the second time from memory


@pytest.mark.parametrize(
    "pattern, literal",
    [
        ("*mlp.*_proj", "_proj"),
        ("a?b*cd[ef]ghijk", "cd"),
        ("*", ""),
        ("[m]odel.*", ""),
        ("abc", "abc"),
    ],
)
def test_a_wildcard_is_looked_for_by_text_that_it_asks_for(pattern, literal):
    """The longest text outside of wildcards, and none behind a bracket, which may be a set or text."""
    assert _literal(pattern) == literal


def test_the_most_that_is_let_through_is_matched_in_seconds():
    """The names of 125 layers against 2000 wildcards."""
    formats = Quantization(
        "modelopt", ((("Linear",), Storage("fp8")),), tuple(f"*x{n}*y*" for n in range(2000)), WILDCARD
    )  # fmt: skip
    began = time.process_time()
    for layer in range(125):
        for part in ("qkv", "o_proj", "gate_up", "down_proj"):
            assert formats.storage(f"model.layers.{layer}.mlp.{part}") is not None
    assert time.process_time() - began < 10
