"""What was packed in a compressed file, up to the byte where it is damaged or cut?

The readers of the standard library lose what they had unpacked when they meet damage. These give it, tell what
is wrong, and end. Of gzip every byte is given; of bzip2, which unpacks in blocks, the damaged block is lost, of xz up to 4 KiB.
"""

from __future__ import annotations

import bz2
import contextlib
import lzma
import zlib
from collections.abc import Callable
from io import BufferedReader, RawIOBase
from typing import Any, Final

MOST_XZ_BYTES: Final = 256 * 2**20
"""Memory that unpacking xz may take: a file may ask for 4 GiB."""
_INPUT_BYTES: Final = 16 * 1024
_GZIP_WBITS: Final = 31
_SALVAGE_BYTES: Final = (4096, 1)
_BLIND_BYTES: Final = 4096
"""Asked for at once where a call that fails cannot be asked again: so much may be lost."""
_WRONG = (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError)

Tell = Callable[[str], None]
Spend = Callable[[int], bool]
"""Counts bytes; False: no more may be unpacked."""


class _Gzip:
    """A member of a gzip file, with the interface of bz2's and lzma's decompressors."""

    def __init__(self) -> None:
        self._state: Any = zlib.decompressobj(_GZIP_WBITS)
        self._before: Any = None
        self._data = b""

    @property
    def eof(self) -> bool:
        return bool(self._state.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._state.unused_data)

    @property
    def needs_input(self) -> bool:
        return not self._state.unconsumed_tail and not self._full

    _full = False
    """The last answer was as long as it might be: more may wait inside."""

    def decompress(self, data: bytes, most: int) -> bytes:
        """At most so many bytes; what was not used of `data` is kept."""
        self._data = self._state.unconsumed_tail + data
        self._before = self._state.copy()
        out: bytes = self._state.decompress(self._data, most)
        self._full = len(out) == most and not self.eof
        return out

    def salvage(self, most: int) -> bytes:
        """What the call that failed had unpacked: asked again in small pieces, then fed byte by byte."""
        out, state, data = b"", self._before, self._data
        for size in _SALVAGE_BYTES:
            while len(out) < most:
                before = state.copy()
                try:
                    piece = state.decompress(data, size)
                except zlib.error:
                    state = before
                    break
                if not piece:
                    break
                out, data = out + piece, state.unconsumed_tail
        with contextlib.suppress(zlib.error):
            for at in range(len(data)):
                out += state.decompress(data[at : at + 1])
        return out[:most]


FORMATS: Final[tuple[tuple[bytes, str, Callable[[], Any]], ...]] = (
    (b"\x1f\x8b", "gzip", _Gzip),
    (b"BZh", "bzip2", bz2.BZ2Decompressor),
    (b"\xfd7zXZ\x00", "xz", lambda: lzma.LZMADecompressor(memlimit=MOST_XZ_BYTES)),
)
"""First bytes, name, and what unpacks it."""


def format_of(head: bytes) -> str:
    """The name of the compression that a file has; empty: none that is known."""
    return next((name for mark, name, _ in FORMATS if head.startswith(mark)), "")


class Unpacked(RawIOBase):
    """The bytes of a compressed file. It ends where that is damaged; `tell_why` hears it."""

    def __init__(self, file: BufferedReader[Any], kind: str, tell_why: Tell, spend: Spend) -> None:
        """`file` stands at the beginning of what is compressed by `kind` (see `format_of`)."""
        self._file = file
        self._kind = kind
        self._mark, self._make = next((mark, make) for mark, name, make in FORMATS if name == kind)
        self._tell_why = tell_why
        self._spend = spend
        self._unpacker: Any = self._make()
        self._given = 0
        self._over = False

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer`; fewer bytes only at the end."""
        filled, size = 0, len(buffer)
        while filled < size and not self._over:
            piece = self._piece(size - filled)
            buffer[filled : filled + len(piece)] = piece
            filled += len(piece)
            self._given += len(piece)
            if not self._spend(len(piece)):
                self._end("more is packed in it than is unpacked in all")
        return filled

    def _piece(self, most: int) -> bytes:
        unpacker = self._unpacker
        if unpacker.eof:
            return self._next_member(unpacker.unused_data)
        data = self._file.read(_INPUT_BYTES) if unpacker.needs_input else b""
        if unpacker.needs_input and not data:
            self._end(f"it is cut: its {self._kind} data do not end")
            return b""
        return self._decompress(data, most)

    def _decompress(self, data: bytes, most: int) -> bytes:
        salvage = getattr(self._unpacker, "salvage", None)
        try:
            return bytes(
                self._unpacker.decompress(data, most if salvage else min(most, _BLIND_BYTES))
            )
        except _WRONG as error:
            rest = salvage(most) if salvage else b""
            self._end(f"its {self._kind} data are damaged ({error})", len(rest))
            return bytes(rest)

    def _next_member(self, rest: bytes) -> bytes:
        """Files of one compression may stand one after another, and zeros after the last."""
        while not rest.strip(b"\x00") or len(rest) < len(self._mark):
            more = self._file.read(_INPUT_BYTES)
            rest = rest.lstrip(b"\x00") + more
            if not more:
                break
        rest = rest.lstrip(b"\x00")
        if not rest.startswith(self._mark):
            if rest:
                self._end(f"other bytes stand after its {self._kind} data")
            self._over = True
            return b""
        self._unpacker = self._make()
        return self._decompress(rest, 1)

    def _end(self, why: str, more: int = 0) -> None:
        self._over = True
        self._tell_why(f"{why}, after {self._given + more} bytes unpacked")
