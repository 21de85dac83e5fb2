"""Is every damaged or hostile model file refused with one of our errors, at once?"""

from __future__ import annotations

import contextlib
import copy
import json
import time
import traceback
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.hostile_files import config_bytes
from benchmarks.hostile_files import safetensors as header_file
from rayserve.errors import SpecError, Where
from rayserve.planner.support.figures import text_parts
from rayserve.planner.support.reading import (
    MAX_CONFIG_BYTES,
    MAX_INDEX_BYTES,
    check_size,
    parse_config,
    parse_index,
    parse_object,
)
from rayserve.planner.weights.checkpoint import check_index, header_bytes, parse_header
from tests.yaml_text import load_yaml

FOLDER = Path(__file__).parent.parent / "cases" / "hostile_configs"
CONFIGS = load_yaml((FOLDER / "configs.yml").read_text(encoding="utf-8"))
TENSORS = load_yaml((FOLDER / "tensors.yml").read_text(encoding="utf-8"))
BASE = CONFIGS["base"]
WHERE = Where("model/config.json")


def read(case: dict, kind: str) -> None:
    """Read the file of a case as what it claims to be."""
    if kind == "config":
        parse_config(config_bytes(case, BASE), WHERE)
    elif kind == "index":
        text = case.get("text") or json.dumps(case["json"])
        parse_index(text.encode(), WHERE)
    elif "hex" in case:
        file = bytes.fromhex(case["hex"])
        parse_header(file, len(file), WHERE)
    else:
        file = header_file(case["rows"], case.get("data", 0), case.get("length"))
        parse_header(file, len(file), WHERE)


def refusal(case: dict, kind: str) -> SpecError:
    """The error that a case ends with."""
    with pytest.raises(SpecError) as caught:
        read(case, kind)
    return caught.value


CASES = [
    *(pytest.param(case, "config", id=case["name"]) for case in CONFIGS["cases"]),
    *(pytest.param(case, "index", id=f"index: {case['name']}") for case in TENSORS["index"]),
    *(pytest.param(case, "header", id=f"header: {case['name']}") for case in TENSORS["header"]),
]


@pytest.mark.parametrize("case, kind", CASES)
def test_a_hostile_file_is_refused_in_our_words(case, kind):
    """Each file ends with one of our errors that names the fault, the place and what to do."""
    error = refusal(case, kind)
    assert case["expect"] in error.message()
    assert error.found
    assert error.do
    assert error.where is not None
    assert error.where.path == WHERE.path
    assert len(error.message()) < 700


def test_the_cases_reach_many_different_errors():
    """Forty files and more end at twenty different places of the code and more."""
    places = set()
    for parameter in CASES:
        error = refusal(*parameter.values)
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "rayserve" in f.filename]
        places.add(tuple((frame.name, frame.lineno) for frame in frames[-2:]))
    assert len(CASES) >= 100
    assert len(places) >= 40


def test_the_base_of_the_cases_passes():
    """The file that the cases damage is sound, so each fails for its own fault."""
    config = parse_config(BASE.encode(), WHERE)
    assert config["hidden_size"] == 4096
    assert "text_config" not in config


@pytest.mark.parametrize(
    "extra",
    [
        {"time_step_limit": [0.0, float("inf")]},
        {"head_dim": None, "sliding_window": None, "n_routed_experts": None},
        {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": -1}},
        {"quantization_config": {"quant_method": "auto-round", "bits": 8, "group_size": 0}},
        {"quantization_config": {"config_groups": {"g": {"weights": {"block_structure": "8x8"}}}}},
        {"intermediate_size": [14336] * 32},
        {"num_key_value_heads": [8] * 31 + [None]},
        {"layer_types": ["full_attention"] * 33, "num_nextn_predict_layers": 1},
        {"num_attention_heads": 24, "num_key_value_heads": 24, "head_dim": 128},
        {"torch_dtype": None, "dtype": "torch.bfloat16"},
        {"architectures": ["SomethingNewForCausalLM"], "model_type": "something_new"},
    ],
)
def test_unusual_but_real_figures_pass(extra):
    """What published configs write is let through: nulls, lists a layer, Infinity in other keys."""
    text = json.dumps({**json.loads(BASE), **extra})
    config = parse_config(text.encode(), WHERE)
    assert all(config[key] == value for key, value in extra.items() if value is not None)
    assert all(key not in config for key, value in extra.items() if value is None)


def test_a_multimodal_config_may_keep_its_figures_in_the_text_part():
    """Figures are found in text_config, and in the one of a thinker."""
    inner = json.loads(BASE)
    names = {"architectures": inner.pop("architectures"), "model_type": "some"}
    for data in (
        {**names, "text_config": inner, "vision_config": {"hidden_size": 1024}},
        {**names, "thinker_config": {"text_config": inner}},
    ):
        config = parse_config(json.dumps(data).encode(), WHERE)
        assert any("hidden_size" in part for _, part in text_parts(config))


def test_the_same_key_twice_with_one_value_is_harmless():
    """A repeated key is refused only where the two values differ."""
    assert parse_object(b'{"a": 1, "a": 1}', WHERE) == {"a": 1}


@pytest.mark.parametrize(
    "size, limit, found",
    [
        (2**30, MAX_CONFIG_BYTES, "1024 MiB"),
        (2**40, MAX_INDEX_BYTES, "1048576 MiB"),
        (0, MAX_CONFIG_BYTES, "an empty file"),
    ],
)
def test_size_is_judged_before_a_file_is_read(size, limit, found):
    """A file of 1 GB is refused by its size alone."""
    with pytest.raises(SpecError) as caught:
        check_size(size, limit, WHERE)
    assert caught.value.found == found


@pytest.mark.parametrize(
    "data",
    [
        b"[" * MAX_CONFIG_BYTES,
        b'{"a":' * (MAX_CONFIG_BYTES // 5),
        b'{"a": ' + b"9" * (MAX_CONFIG_BYTES - 7) + b"}",
        b'{"a": 1.' + b"1" * (MAX_CONFIG_BYTES - 9) + b"}",
        b'{"a": "' + b"\\u00e4" * (MAX_CONFIG_BYTES // 6 - 3),
        b"\xff" * MAX_CONFIG_BYTES,
        b"{" + b'"a": 1, ' * (MAX_CONFIG_BYTES // 8 - 1) + b'"a": 2}',
        b'{"num_hidden_layers": [' + b"1," * (MAX_CONFIG_BYTES // 2 - 20) + b"1]}",
    ],
    ids=["brackets", "braces", "digits", "fraction", "text", "bytes", "keys", "list"],
)
def test_the_largest_files_cost_little(data):
    """Whatever four megabytes hold, they are refused in two seconds and 200 MiB."""
    assert len(data) <= MAX_CONFIG_BYTES
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(SpecError):
            parse_config(data, WHERE)
        seconds = time.process_time() - began
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seconds < 10  # tracing costs several times the work itself
    assert peak < 200 * 2**20


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)
KEYS = sorted({*json.loads(BASE), "layer_types", "quantization_config", "text_config",
               "vision_config", "rope_scaling", "head_dim", "num_experts_per_tok"})  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=4))
def test_no_value_of_any_key_ends_in_a_traceback(changes):
    """Arbitrary values of the known keys either pass or end with one of our errors."""
    data = copy.deepcopy(json.loads(BASE)) | changes
    with contextlib.suppress(SpecError):
        assert parse_config(json.dumps(data).encode(), WHERE)["vocab_size"] > 0


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=64), st.integers(0, 2**64 - 1))
def test_no_bytes_end_in_a_traceback(data, length):
    """Arbitrary bytes as config, index or header end with one of our errors."""
    for parse in (parse_config, parse_index):
        with pytest.raises(SpecError):
            parse(data, WHERE)
    file = length.to_bytes(8, "little") + data
    with pytest.raises(SpecError):
        parse_header(file, len(file), WHERE)


# ── sound files ───────────────────────────────────────────────────────────────────────────────────
def test_a_sound_header_is_read_in_the_order_of_its_data():
    """Tensors come with their bytes; metadata is none; half-byte types and empty tensors count."""
    rows = {
        "__metadata__": {"format": "pt"},
        "b": {"dtype": "F4", "shape": [6], "data_offsets": [8, 11]},
        "a": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]},
        "none": {"dtype": "F32", "shape": [0, 7], "data_offsets": [11, 11]},
    }
    file = header_file(rows, 11)
    size = header_bytes(file[:8], len(file), WHERE)
    tensors = parse_header(file[:size], len(file), WHERE)
    assert [(t.name, t.size_bytes, t.shape) for t in tensors] == [
        ("a", 8, (2, 2)),
        ("b", 3, (6,)),
        ("none", 0, (0, 7)),
    ]


def test_a_header_that_was_read_in_part_is_refused():
    """Fewer bytes than the header has are no header."""
    file = header_file({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, 1)
    with pytest.raises(SpecError, match="the first"):
        parse_header(file[:20], len(file), WHERE)


def two_files():
    """The tensors of two files: a in the first, b in the second."""
    row = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    files = {name: header_file({key: row}, 1) for name, key in
             (("1.safetensors", "a"), ("2.safetensors", "b"))}  # fmt: skip
    return {name: parse_header(file, len(file), WHERE) for name, file in files.items()}


def index_of(**files: str):
    """An index that names the file of each tensor."""
    return parse_index(json.dumps({"weight_map": files}).encode(), WHERE)


def test_index_and_files_that_agree_give_all_tensors():
    """Each tensor comes once; a file that was not read is not missed."""
    index = index_of(a="1.safetensors", b="2.safetensors", c="3.safetensors")
    assert [t.name for t in check_index(index, two_files(), WHERE)] == ["a", "b"]


@pytest.mark.parametrize(
    "index, twice, expect",
    [
        ({"a": "1.safetensors", "b": "1.safetensors"}, False, "it is in 2.safetensors"),
        ({"a": "1.safetensors", "c": "2.safetensors"}, False, "it is not there"),
        ({"a": "1.safetensors"}, True, "in 1.safetensors and 2.safetensors"),
    ],
)
def test_index_and_files_that_disagree_are_refused(index, twice, expect):
    """A tensor elsewhere than the index says, missing, or in two files is named."""
    files = two_files()
    if twice:
        files["2.safetensors"] += files["1.safetensors"]
    with pytest.raises(SpecError) as caught:
        list(check_index(index_of(**index), files, WHERE))
    assert expect in caught.value.found


@pytest.mark.parametrize("total, kept", [(5, 5), (5.0, 5), ("5", None), (True, None), (-1, None)])
def test_the_claimed_size_of_an_index_is_kept_only_where_it_is_one(total, kept):
    """A total that is no number is dropped, since nothing may depend on it."""
    data = {"weight_map": {"a": "1.safetensors"}, "metadata": {"total_size": total}}
    assert parse_index(json.dumps(data).encode(), WHERE).total_size == kept


def test_a_header_of_many_tensors_is_read_quickly():
    """A hundred thousand tensors, the most of any known checkpoint, take seconds at most."""
    rows = {
        f"model.layers.{n}.weight": {"dtype": "U8", "shape": [1], "data_offsets": [n, n + 1]}
        for n in range(100_000)
    }
    file = header_file(rows, 100_000)
    began = time.process_time()
    assert len(parse_header(file, len(file), WHERE)) == 100_000
    assert time.process_time() - began < 10
