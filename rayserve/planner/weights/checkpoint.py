"""How many bytes of tensors does a checkpoint hold, by the headers of its files?

A safetensors file begins with the length of its header (8 bytes, little endian) and the header, JSON:
name -> dtype, shape, data_offsets. The sum of tensor sizes is the truth; `metadata.total_size` of an
index is not read, because published ones are wrong (DeepSeek-V3's says 1.369e12, about twice the real
688,586,727,753 bytes).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rayserve.errors import SpecError, Where

PREFIX_BYTES = 8
LONGEST_HEADER = 100_000_000
"""The format's own limit."""
DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
AGAIN = "download the file again: it is cut short or not a safetensors file"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


def header_length(prefix: bytes, where: Where) -> int:
    """Bytes of the header that follows the first eight.

    Raises:
        SpecError: fewer than eight bytes, or a length that no file of this format has.
    """
    if len(prefix) < PREFIX_BYTES:
        raise SpecError(
            "a safetensors file of at least 8 bytes",
            found=f"{len(prefix)} bytes",
            do=AGAIN,
            where=where,
        )
    length = int.from_bytes(prefix[:PREFIX_BYTES], "little")
    if not 2 <= length <= LONGEST_HEADER:
        raise SpecError(
            f"a header of 2 to {LONGEST_HEADER} bytes",
            found=f"a length of {length}",
            do=AGAIN,
            where=where,
        )
    return length


def read_header(header: bytes, where: Where) -> tuple[StoredTensor, ...]:
    """The tensors of one file, by its header without the eight bytes before it.

    Raises:
        SpecError: not JSON, or a tensor whose offsets contradict its shape.
    """
    try:
        content = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise SpecError(
            "a header in JSON", found=str(error)[:120], do=AGAIN, where=where
        ) from error
    if not isinstance(content, Mapping):
        raise SpecError(
            "a header that names tensors", found=type(content).__name__, do=AGAIN, where=where
        )
    entries = ((name, entry) for name, entry in content.items() if name != "__metadata__")
    return tuple(_tensor(name, entry, where) for name, entry in entries)


def _tensor(name: str, entry: Any, where: Where) -> StoredTensor:
    fields: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {}
    dtype: Any = fields.get("dtype")
    shape: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    good = _naturals(shape) and _naturals(offsets) and len(offsets) == 2
    if not good or not isinstance(dtype, str):
        raise SpecError(
            f"dtype, shape and data_offsets of `{name[:80]}`",
            found=repr(entry)[:80],
            do=AGAIN,
            where=where,
        )
    size: int = offsets[1] - offsets[0]
    bits = DTYPE_BITS.get(dtype)
    if size < 0 or (bits is not None and -(-math.prod(shape) * bits // 8) != size):
        raise SpecError(
            f"as many bytes of `{name[:80]}` as its shape asks for",
            found=f"{size} bytes for {dtype} {list(shape)}"[:120],
            do=AGAIN,
            where=where,
        )
    return StoredTensor(name, dtype, tuple(shape), size)


def _naturals(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    )


def index_files(index: Mapping[str, Any], where: Where) -> tuple[str, ...]:
    """The files that an index (model.safetensors.index.json) names, sorted.

    Raises:
        SpecError: no usable `weight_map`.
    """
    names = index.get("weight_map")
    if not isinstance(names, Mapping) or not names:
        raise _no_map(names, where)
    files = set(names.values())
    if not all(isinstance(name, str) and name and "/" not in name for name in files):
        raise _no_map(names, where)
    return tuple(sorted(files))


def _no_map(found: object, where: Where) -> SpecError:
    return SpecError(
        "`weight_map`, which names the file of each tensor",
        found=repr(found)[:80],
        do="copy the index from the checkpoint, unchanged",
        where=where,
    )


def checkpoint_bytes(tensors: Iterable[StoredTensor]) -> int:
    """Bytes of all tensors; one that several files repeat counts once."""
    return sum({tensor.name: tensor.size_bytes for tensor in tensors}.values())


def rank_bounds(total_bytes: int, ranks: int) -> tuple[int, int]:
    """Least and most bytes of weights on the fullest of `ranks`, for a model of unknown architecture.

    The fullest rank holds at least an even share, and at most everything, where nothing is cut.
    """
    return -(-total_bytes // ranks), total_bytes
