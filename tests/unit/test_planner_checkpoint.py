"""A checkpoint's size is the sum of its tensors, read from headers that may lie."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.hostile_files import safetensors
from rayserve.errors import SpecError, Where
from rayserve.files import INDEX, read_checkpoint, read_header
from rayserve.planner.weights.checkpoint import (
    bytes_by_type,
    held_bytes,
    parse_header,
    rank_bounds,
)

FILE = Where("model-00001-of-00002.safetensors")


def entry(dtype, shape, size, start=0):
    """One tensor as a header describes it."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}


def one(name: str, size: int = 4) -> bytes:
    """A file of one tensor of bytes."""
    return safetensors({name: entry("U8", [size], size)}, size)


def write_index(folder: Path, **files: str) -> None:
    """An index that names the file of each tensor, and lies about their size."""
    data = {"metadata": {"total_size": 10**15}, "weight_map": files}
    (folder / INDEX).write_text(json.dumps(data))


def test_bytes_are_summed_by_type():
    """Every tensor counts with its own bytes, whatever its type, and metadata counts nothing."""
    rows = {
        "__metadata__": {"format": "pt"},
        "a": entry("BF16", [4, 8], 64),
        "b": entry("F8_E4M3", [16], 16, 64),
        "c": entry("F4", [4], 2, 80),
        "d": entry("BF16", [], 2, 82),
    }
    file = safetensors(rows, 84)
    tensors = parse_header(file, len(file), FILE)
    assert bytes_by_type(tensors) == {"BF16": 66, "F4": 2, "F8_E4M3": 16}


def test_what_is_stored_in_another_type_is_held_in_the_compute_type():
    """Weights that are not quantized are computed in one type; quantized ones keep theirs."""
    stored = {"BF16": 100, "F32": 40, "I64": 8}
    assert held_bytes(stored, element_bytes=2, quantized=False) == 100 + 20 + 8
    assert held_bytes(stored, element_bytes=4, quantized=False) == 200 + 40 + 8
    assert held_bytes(stored, element_bytes=2, quantized=True) == 148


def test_an_unknown_model_is_bounded_by_an_even_share_and_everything():
    """The fullest of three ranks holds at least a third, rounded up."""
    assert rank_bounds(100, 3) == (34, 100)


def test_all_files_of_a_folder_count_where_there_is_no_index(tmp_path):
    """Other files are not looked at."""
    (tmp_path / "a.safetensors").write_bytes(one("a"))
    (tmp_path / "b.safetensors").write_bytes(one("b", 7))
    (tmp_path / "pytorch_model.bin").write_bytes(b"no header")
    assert read_checkpoint(tmp_path) == {"U8": 11}


def test_an_index_chooses_the_files_and_its_total_counts_for_nothing(tmp_path):
    """A second checkpoint in the folder, such as a consolidated one, is not counted twice."""
    for name, tensor in (("1", "a"), ("2", "b"), ("consolidated", "z")):
        (tmp_path / f"{name}.safetensors").write_bytes(one(tensor))
    write_index(tmp_path, a="1.safetensors", b="2.safetensors")
    assert read_checkpoint(tmp_path) == {"U8": 8}


def test_a_folder_that_is_half_downloaded_has_no_sum(tmp_path):
    """A file that the index names and that is not there leaves the size unknown."""
    (tmp_path / "1.safetensors").write_bytes(one("a"))
    write_index(tmp_path, a="1.safetensors", b="2.safetensors")
    assert read_checkpoint(tmp_path) == {}


def shard(number: int, of: int, stem: str = "model") -> str:
    """The name of one of several files."""
    return f"{stem}-{number:05}-of-{of:05}.safetensors"


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("stem", ["model", "consolidated"])
def test_numbered_files_are_a_checkpoint_only_where_all_numbers_are_there(tmp_path, stem, cached):
    """A download that ended before the index came is not taken for the whole."""
    for number in (1, 2, 4):
        (tmp_path / shard(number, 4, stem)).write_bytes(one(f"t{number}"))
    assert read_checkpoint(tmp_path, cached=cached) == {}
    (tmp_path / shard(3, 4, stem)).write_bytes(one("t3"))
    assert read_checkpoint(tmp_path, cached=cached) == {"U8": 16}


def test_files_of_two_counts_are_each_to_be_whole(tmp_path):
    """What is left of an older set of files does not make a newer one whole, nor the other way round."""
    for number in (1, 2):
        (tmp_path / shard(number, 3)).write_bytes(one(f"t{number}"))
    (tmp_path / shard(2, 2)).write_bytes(one("t3"))
    assert read_checkpoint(tmp_path) == {}


def test_files_of_a_cache_that_do_not_say_how_many_they_are_have_no_sum(tmp_path):
    """Of a folder that a person filled they are the checkpoint; of a cache there may be more to come."""
    for name in "ab":
        (tmp_path / f"{name}.safetensors").write_bytes(one(name))
    assert read_checkpoint(tmp_path) == {"U8": 8}
    assert read_checkpoint(tmp_path, cached=True) == {}
    (tmp_path / "model.safetensors").write_bytes(one("c", 7))
    assert read_checkpoint(tmp_path, cached=True) == {"U8": 7}


def test_without_an_index_the_models_own_files_count(tmp_path):
    """An adapter or a second copy in another format beside them is not counted."""
    for name in ("model", "adapter_model", "consolidated"):
        (tmp_path / f"{name}.safetensors").write_bytes(one(name))
    assert read_checkpoint(tmp_path) == {"U8": 4}


@pytest.mark.parametrize("kind", ["pointer", "link", "index"])
def test_what_only_points_to_the_weights_is_not_at_hand(tmp_path, kind):
    """A clone without Git LFS, or a copied link, does not keep anybody from planning."""
    path = tmp_path / "model.safetensors"
    if kind == "index":
        path.write_bytes(one("a"))
        path = tmp_path / INDEX
    if kind == "pointer":
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n")
    else:
        path.symlink_to("../blobs/0123")
    assert read_checkpoint(tmp_path) == {}


def test_a_header_alone_is_enough(tmp_path):
    """The data of a file may be missing altogether, though not in part."""
    row = {"a": entry("BF16", [4, 8], 64)}
    (tmp_path / "model.safetensors").write_bytes(safetensors(row))
    assert read_checkpoint(tmp_path) == {"BF16": 64}
    (tmp_path / "model.safetensors").write_bytes(safetensors(row, 63))
    with pytest.raises(SpecError, match="64 bytes of tensors"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["nowhere", "file"])
def test_a_folder_that_is_none_has_no_sum(tmp_path, name):
    """Where the checkpoint is not at hand, nothing is said."""
    (tmp_path / "file").touch()
    assert read_checkpoint(tmp_path / name) == {}


def test_index_and_files_that_disagree_are_refused(tmp_path):
    """A tensor elsewhere than the index says is an error that names the index."""
    (tmp_path / "1.safetensors").write_bytes(one("a"))
    (tmp_path / "2.safetensors").write_bytes(one("b"))
    write_index(tmp_path, a="2.safetensors", b="1.safetensors")
    with pytest.raises(SpecError, match="as the index says") as caught:
        read_checkpoint(tmp_path)
    assert caught.value.where.path.endswith(INDEX)


def test_of_the_weights_nothing_is_read(tmp_path):
    """A file of a terabyte costs its header: its data may even be a hole."""
    size = 2**40
    path = tmp_path / "model.safetensors"
    header = safetensors({"a": entry("U8", [size], size)})
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + size)
    assert read_checkpoint(tmp_path) == {"U8": size}


def test_a_pipe_for_weights_is_refused_without_waiting(tmp_path):
    """Nobody writes to it, and nobody waits."""
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(SpecError, match="a regular file"):
        read_header(tmp_path / "model.safetensors")
