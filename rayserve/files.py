"""Which files is a plan made from, and what if one is not what it should be?

Spec, plan, config.json and the headers of a checkpoint may come from anywhere. Each is looked at
before it is opened, so that a pipe, a device or a gigabyte costs nothing, and read to a bound.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

from rayserve.errors import SpecError, Where
from rayserve.planner.support.modelopt import (
    QUANT_CONFIG,
    wants_quant_config,
    with_quant_config,
)
from rayserve.planner.support.reading import (
    MAX_CONFIG_BYTES,
    MAX_INDEX_BYTES,
    Index,
    check_size,
    parse_config,
    parse_index,
)
from rayserve.planner.weights.checkpoint import (
    LENGTH_BYTES,
    Tensor,
    bytes_by_type,
    check_index,
    header_bytes,
    parse_header,
)

CONFIG: Final = "config.json"
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
SHARD: Final = re.compile(
    r"(?P<stem>.*)-(?P<number>\d{1,6})-of-(?P<of>\d{1,6})(?P<rest>.*)\.safetensors", re.ASCII
)
"""One of several files, which Transformers numbers from 1 (model-00001-of-00002.safetensors)."""
MAX_SHARDS: Final = 4096
MAX_TENSORS: Final = 300_000
"""A trillion parameters in experts have 140 000."""
MAX_CHARACTERS: Final = 2**25
"""Of all their names: 110 each, where those of DeepSeek-V3 have 60."""
POINTER: Final = b"version https://git-lfs"
POINTER_BYTES: Final = 1024
"""A pointer of Git LFS is smaller (its specification)."""
KINDS: Final = (
    (stat.S_ISDIR, "a folder", "name the file in it"),
    (stat.S_ISFIFO, "a pipe", "write its content into a file"),
    (stat.S_ISSOCK, "a socket", "name the right file"),
    (stat.S_ISCHR, "a device", "name the right file"),
    (stat.S_ISBLK, "a device", "name the right file"),
)


def read_bytes(path: Path, most: int, *, shorten: str = "") -> bytes:
    """The bytes of a regular file of at most `most` bytes; `shorten`: what to do about a larger one.

    Raises:
        SpecError: it is none, is larger, or cannot be read.
    """
    where = _where(path)
    with _opened(path) as (file, size_bytes):
        # One byte more, for a file whose size the system does not know: those of /proc.
        data = file.read(most + 1) if size_bytes <= most else b""
    largest = max(size_bytes, len(data))
    if largest > most:
        check_size(largest, most, where, do=shorten)
    return data


def read_config(path: Path, named: Where | None = None) -> Mapping[str, Any] | None:
    """The content of a model's config.json; None: there is no such file.

    Where a file of that name has no quantization, that of hf_quant_config.json beside it counts, as it
    does for vLLM. `named`: where people wrote its name. What cannot be read at all is told there, a
    mistake in the content in the file itself.

    Raises:
        SpecError: it cannot be read, or is not the config.json of a model that answers in text.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # a folder that is not ours, a name that is too long
        raise _named(_unreadable(path, error), named) from None
    try:
        data = read_bytes(path, MAX_CONFIG_BYTES)
    except SpecError as error:
        raise _named(error, named) from None
    config = parse_config(data, _where(path))
    beside = path.with_name(QUANT_CONFIG)
    if path.name == CONFIG and wants_quant_config(config) and beside.exists():
        return with_quant_config(config, read_bytes(beside, MAX_CONFIG_BYTES), _where(beside))
    return config


def read_checkpoint(folder: Path, *, cached: bool = False) -> dict[str, int]:
    """Bytes of all tensors of a folder's safetensors files, by type and from their headers alone.

    Where there is an index, the files that it names count; else model*.safetensors, or all where none
    is named so. Empty: there are none, or not all are known to be at hand: still to be downloaded, a
    link to nothing, or a pointer of Git LFS in place of the file. `cached`: the folder is one of a
    hub's cache, which has what was fetched so far; there, without an index, names must prove it whole.

    Raises:
        SpecError: a header or the index is broken, or they disagree.
    """
    try:
        names = sorted(path.name for path in folder.iterdir() if path.suffix == ".safetensors")
    except (OSError, ValueError):  # not here, or not for us to look into
        return {}
    if not names:
        return {}
    at = folder / INDEX
    index = Index({}, None)
    if at.is_symlink() and not at.exists():
        return {}
    if at.exists():
        index = parse_index(read_bytes(at, MAX_INDEX_BYTES), _where(at))
        names = sorted(set(index.files.values()))
    else:
        # Others beside them hold the same weights again, or an adapter's.
        names = [name for name in names if name.startswith("model")] or names
        if not _all_numbers(names) or (cached and not _self_contained(names)):
            return {}
    if not all(_at_hand(folder / name) for name in names):
        return {}
    check_shards(len(names), _where(folder))
    files: dict[str, tuple[Tensor, ...]] = {}
    tally = Tally(_where(folder))
    for name in names:
        files[name] = read_header(folder / name)
        tally.add(files[name])
    return bytes_by_type(check_index(index, files, _where(at)))


def _all_numbers(names: Sequence[str]) -> bool:
    """Whether, of the files that say how many they are, as many are there."""
    found: dict[tuple[str, str, str], set[int]] = {}
    for shard in filter(None, map(SHARD.fullmatch, names)):
        series = (shard["stem"], shard["of"], shard["rest"])
        found.setdefault(series, set()).add(int(shard["number"]))
    return all(len(numbers) == int(of) for (_, of, _), numbers in found.items())


def _self_contained(names: Sequence[str]) -> bool:
    """Whether no further file can belong to these, by what they are called."""
    return list(names) == [SINGLE] or all(map(SHARD.fullmatch, names))


def check_shards(count: int, where: Where) -> None:
    """Refuse more files than a checkpoint has.

    Raises:
        SpecError: they are more.
    """
    _check_count(count, MAX_SHARDS, "files", where)


class Tally:
    """What the headers of a checkpoint hold together, counted file by file, so that too much ends soon."""

    def __init__(self, where: Where) -> None:
        self._where = where
        self._tensors = self._characters = 0

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Count those of one more file.

        Raises:
            SpecError: they are more than a checkpoint has.
        """
        self._tensors += len(tensors)
        self._characters += sum(len(tensor.name) for tensor in tensors)
        _check_count(self._tensors, MAX_TENSORS, "tensors", self._where)
        _check_count(self._characters, MAX_CHARACTERS, "characters of tensor names", self._where)


def _at_hand(path: Path) -> bool:
    """Whether there is something that claims to be the file itself."""
    if not path.exists():
        return False
    small = path.is_file() and path.stat().st_size < POINTER_BYTES
    return not (small and read_bytes(path, POINTER_BYTES).startswith(POINTER))


def read_header(path: Path) -> tuple[Tensor, ...]:
    """The tensors of a safetensors file; of its data nothing is read.

    Raises:
        SpecError: it is no such file, or its header breaks a rule of the format.
    """
    where = _where(path)
    with _opened(path) as (file, size_bytes):
        head = file.read(LENGTH_BYTES)
        head += file.read(header_bytes(head, size_bytes, where) - LENGTH_BYTES)
    return parse_header(head, size_bytes, where)


def _where(path: Path) -> Where:
    return Where(_short(path))


def _short(path: Path) -> str:
    """As people would name it: without `..`, and from the working folder where it lies below that."""
    plain = os.path.normpath(path)
    with contextlib.suppress(OSError):
        plain = plain.removeprefix(f"{os.getcwd()}{os.sep}")  # noqa: PTH109 - as text
    return plain[:200]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file and its size in bytes; every failure is an error of ours."""
    try:
        # Looked at first: to open a device may already do something.
        _check_kind(path.stat(), path)
        # Without waiting, should it have become a pipe since.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            state = os.fstat(file.fileno())
            _check_kind(state, path)
            yield file, state.st_size
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def _check_kind(state: os.stat_result, path: Path) -> None:
    for is_kind, found, do in KINDS:
        if is_kind(state.st_mode):
            raise SpecError("a regular file", found=found, do=do, where=_where(path))


def _unreadable(path: Path, error: OSError | ValueError) -> SpecError:
    problem = error.strerror if isinstance(error, OSError) else ""
    found, do = problem or str(error), "name the right file"
    if isinstance(error, PermissionError):
        do = "correct the owner and mode of the file and its folders"
    elif isinstance(error, FileNotFoundError) and path.is_symlink():
        found, do = f"a link to {path.readlink()}, which is not there", "copy the file itself"
    return SpecError("a file that can be read", found=found[:200], do=do, where=_where(path))


def _named(error: SpecError, named: Where | None) -> SpecError:
    """The same error at the place that names the file."""
    if named is None:
        return error
    return SpecError(error.needed, found=f"{error.where}: {error.found}", do=error.do, where=named)


def _check_count(count: int, most: int, what: str, where: Where) -> None:
    if count > most:
        raise SpecError(
            f"a checkpoint of at most {most} {what}",
            found=f"{count} and more",
            do="keep the files of one checkpoint in the folder",
            where=where,
        )
