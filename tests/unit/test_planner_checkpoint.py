"""A checkpoint's size is the sum of its tensors, read from headers that may lie."""

from __future__ import annotations

import json

import pytest

from rayserve.errors import SpecError, Where
from rayserve.planner.weights.checkpoint import (
    checkpoint_bytes,
    header_length,
    index_files,
    rank_bounds,
    read_header,
)

FILE = Where("model-00001-of-00002.safetensors")


def header(**tensors):
    """The header of a file, in bytes."""
    return json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()


def entry(dtype, shape, size, start=0):
    """One tensor as a header describes it."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}


def test_sizes_come_from_the_offsets():
    """Every tensor counts with its own bytes, whatever its type, and metadata counts nothing."""
    tensors = read_header(
        header(
            a=entry("BF16", [4, 8], 64),
            b=entry("F8_E4M3", [16], 16, 64),
            c=entry("F4", [3], 2, 80),
            d=entry("F32", [], 4, 82),
        ),
        FILE,
    )
    assert [tensor.size_bytes for tensor in tensors] == [64, 16, 2, 4]
    assert checkpoint_bytes(tensors) == 86


def test_a_tensor_that_two_files_hold_counts_once():
    """A tied tensor repeated in a second file does not count again."""
    first = read_header(header(a=entry("BF16", [4], 8)), FILE)
    assert checkpoint_bytes([*first, *first]) == 8


def test_a_type_that_is_not_known_is_believed():
    """A newer dtype has no size to compare with, so its offsets stand."""
    assert read_header(header(a=entry("F5_NEW", [3], 7)), FILE)[0].size_bytes == 7


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        header(a=entry("BF16", [4, 8], 63)),
        header(a=entry("BF16", [-4, -8], 64)),
        header(a={"dtype": "BF16", "shape": [1]}),
        header(a=None),
        header(a={"dtype": "U8", "shape": [1], "data_offsets": [2, 1]}),
        header(a={"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}),
        header(a={"dtype": 8, "shape": [1], "data_offsets": [0, 1]}),
        header(a={"dtype": "U8", "shape": "1", "data_offsets": [0, 1]}),
    ],
)
def test_a_broken_header_is_refused(content):
    """What is not a header, or contradicts itself, is an error of ours that names the file."""
    with pytest.raises(SpecError) as caught:
        read_header(content, FILE)
    assert FILE.path in str(caught.value)


@pytest.mark.parametrize("prefix", [b"", b"1234567", bytes(8), b"\xff" * 8])
def test_a_length_that_no_header_has_is_refused(prefix):
    """A short file, a length of nothing and one of exabytes are refused before anything is read."""
    with pytest.raises(SpecError):
        header_length(prefix, FILE)


def test_the_length_is_little_endian():
    """The first eight bytes are the header's length."""
    assert header_length((1234).to_bytes(8, "little") + b"{", FILE) == 1234


def test_an_index_names_its_files_once():
    """Each file is listed once, in order; the index's own total is not looked at."""
    index = {"metadata": {"total_size": 1}, "weight_map": {"a": "2.st", "b": "1.st", "c": "2.st"}}
    assert index_files(index, FILE) == ("1.st", "2.st")


@pytest.mark.parametrize(
    "index", [{}, {"weight_map": {}}, {"weight_map": {"a": 3}}, {"weight_map": {"a": "../x"}}]
)
def test_an_index_without_a_usable_map_is_refused(index):
    """No map, no name of a file, or a name that leaves the folder."""
    with pytest.raises(SpecError, match="weight_map"):
        index_files(index, FILE)


def test_an_unknown_model_is_bounded_by_an_even_share_and_everything():
    """The fullest of three ranks holds at least a third, rounded up."""
    assert rank_bounds(100, 3) == (34, 100)
