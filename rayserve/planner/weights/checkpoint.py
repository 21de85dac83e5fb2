"""Which tensors does a checkpoint hold, by the headers of its files, and how much must a rank hold?

A safetensors file begins with its header's length (8 bytes, little-endian) and the header, a JSON
object: name → dtype, shape and the byte range behind the header. The format's own rules are held here
(safetensors README): ranges in order, without gap or overlap, to the file's last byte. The sum of
tensor sizes is the truth: an index's `metadata.total_size` counts for nothing, since published ones
are wrong (DeepSeek-V3's says 1.369e12, about twice the real 688,586,727,753 bytes).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from rayserve.documents import brief
from rayserve.errors import SpecError, Where
from rayserve.planner.support.reading import Index, parse_object
from rayserve.spec import nearest
from rayserve.units import MIB

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 12 * MIB
"""The format allows 100 MB; a shard's header of 10 000 tensors has 1.5 MB."""
MAX_DIMENSIONS = 16
# Bits of an element (safetensors, Dtype).
DTYPE_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
COMPUTED = frozenset({"F16", "BF16", "F32", "F64"})
"""Types that vLLM turns into the compute type as it loads weights that are not quantized."""
_WHOLE_FILE = "fetch the file again: it was cut short or damaged"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file."""

    name: str
    dtype: str
    """safetensors' name, such as `BF16`."""
    shape: tuple[int, ...]
    begin: int
    """First byte, counted from the end of the header."""
    end: int

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        return self.end - self.begin


def header_bytes(head: bytes, file_bytes: int, where: Where) -> int:
    """How many bytes to read for length and header; `head` is the file's first 8 bytes or more.

    Raises:
        SpecError: the length is impossible.
    """
    if len(head) < LENGTH_BYTES or file_bytes < LENGTH_BYTES + 2:
        raise _error("a safetensors file", f"{file_bytes} bytes in all", where)
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        needed = f"a safetensors header of at most {MAX_HEADER_BYTES // MIB} MiB"
        raise _error(needed, f"a length of {length}", where)
    if LENGTH_BYTES + length > file_bytes:
        needed = f"a file that holds its header of {length} bytes"
        raise _error(needed, f"{file_bytes} bytes in all", where)
    return LENGTH_BYTES + length


def parse_header(data: bytes, file_bytes: int, where: Where) -> tuple[Tensor, ...]:
    """The tensors of a file by its first bytes, in the order of their place in it.

    `data` has at least the bytes that `header_bytes` tells; `file_bytes` is the file's size. A file may
    end with its header: then that alone was kept.

    Raises:
        SpecError: the header breaks a rule of the format.
    """
    end = header_bytes(data, file_bytes, where)
    if len(data) < end:
        raise _error(f"the first {end} bytes of the file", f"{len(data)}", where)
    if data[LENGTH_BYTES : LENGTH_BYTES + 1] != b"{":
        raise _error("a header that begins with {", brief(data[LENGTH_BYTES:12]), where)
    raw = parse_object(data[LENGTH_BYTES:end], where)
    raw.pop("__metadata__", None)
    tensors = sorted(
        (_tensor(name, row, where) for name, row in raw.items()),
        key=lambda tensor: (tensor.begin, tensor.end),
    )
    _check_ranges(tensors, file_bytes - end, where)
    return tuple(tensors)


def check_index(
    index: Index, files: Mapping[str, tuple[Tensor, ...]], where: Where
) -> Iterator[Tensor]:
    """All tensors of a checkpoint: each once, and each where the index says.

    `files` has the tensors of each file that was read. Raises while it is iterated.

    Raises:
        SpecError: index and files disagree, or two files hold the same tensor.
    """
    places: dict[str, str] = {}
    for file, tensors in files.items():
        for tensor in tensors:
            other = places.setdefault(tensor.name, file)
            if other != file:
                found = f"{brief(tensor.name)} in {other} and {file}"
                raise _error("each tensor in one file", found, where)
            yield tensor
    for name, file in index.files.items():
        if file in files and places.get(name) != file:
            found = f"it is in {places[name]}" if name in places else "it is not there"
            raise _error(f"{brief(name)} in {file}, as the index says", found, where)


def bytes_by_type(tensors: Iterable[Tensor]) -> dict[str, int]:
    """Bytes of all tensors of each type, the types in alphabetical order."""
    sums: dict[str, int] = {}
    for tensor in tensors:
        sums[tensor.dtype] = sums.get(tensor.dtype, 0) + tensor.size_bytes
    return dict(sorted(sums.items()))


def held_bytes(stored: Mapping[str, int], *, element_bytes: int, quantized: bool) -> int:
    """Bytes of a checkpoint once it is loaded whole, from its bytes by type.

    Without quantization vLLM makes every weight in the compute type of `element_bytes`, so a
    checkpoint stored in 32 bits takes half. Of a quantized one each tensor keeps its type.
    """
    if quantized:
        return sum(stored.values())
    return sum(
        size * 8 // DTYPE_BITS[dtype] * element_bytes if dtype in COMPUTED else size
        for dtype, size in stored.items()
    )


def rank_bounds(total_bytes: int, ranks: int) -> tuple[int, int]:
    """Least and most bytes of weights on the fullest of `ranks`, for a model of unknown architecture.

    The fullest rank holds at least an even share, and at most everything, where nothing is cut.
    """
    return -(-total_bytes // ranks), total_bytes


def _error(needed: str, found: str, where: Where) -> SpecError:
    return SpecError(needed, found=found[:200], do=_WHOLE_FILE, where=where)


def _tensor(name: str, row: Any, where: Where) -> Tensor:
    # Messages are made where a rule is broken: a header may have a hundred thousand rows.
    if not isinstance(row, dict):
        raise _error(f"dtype, shape and data_offsets of {brief(name)}", brief(row), where)
    dtype = row.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        close = nearest(dtype, DTYPE_BITS) if isinstance(dtype, str) else ""
        hint = f", alike {close}" if close else ""
        raise _error(f"a known dtype of {brief(name)}", f"{brief(dtype)}{hint}", where)
    shape = row.get("shape")
    if not _whole_numbers(shape) or len(shape) > MAX_DIMENSIONS:
        needed = f"a shape of {brief(name)} in whole numbers from 0 on"
        raise _error(needed, brief(shape), where)
    offsets = row.get("data_offsets")
    if not _whole_numbers(offsets) or len(offsets) != 2:
        needed = f"two data_offsets of {brief(name)} in whole numbers from 0 on"
        raise _error(needed, brief(offsets), where)
    begin, end = offsets
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if (end - begin) * 8 != bits:
        needed = f"{brief(bits // 8)} bytes for {brief(name)}, {dtype} {brief(shape)}"
        raise _error(needed, f"data_offsets of {end - begin}", where)
    return Tensor(name, dtype, tuple(shape), begin, end)


def _whole_numbers(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _check_ranges(tensors: list[Tensor], data_bytes: int, where: Where) -> None:
    at = 0
    for tensor in tensors:
        if tensor.begin != at:
            what = "overlap" if tensor.begin < at else "leave a gap"
            needed = f"the data of {brief(tensor.name)} at byte {at}"
            raise _error(needed, f"{tensor.begin}: tensors {what}", where)
        at = tensor.end
    if data_bytes not in {0, at}:
        raise _error(f"{at} bytes of tensors in the file", f"{data_bytes}", where)
