"""Which files does a tar archive hold, also where it is damaged, and without remembering them?

The standard library's reader ends silently at a damaged header, loses the end of a file that is cut, and is
led astray by odd extended headers. Here what is wrong is told, and the next whole header is looked for.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from typing import Any, Final

from rayserve.doctor.unpack import Tell

BLOCK: Final = tarfile.BLOCKSIZE
MOST_HEADER_BYTES: Final = 64 * 1024
"""Of a long name or of an extended header; the rest is not looked at."""
_SKIP_BYTES: Final = 256 * 1024
_RECORD = re.compile(rb"(\d{1,7}) ([^=\n]{1,100})=")
_SIZE = re.compile(rb"\d{1,20}")
_EXTENDED: Final = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.XGLTYPE,
)
"""Headers that are no member: they speak of the next, or of all."""


@dataclass(slots=True)
class Member:
    """What an archive holds under one name."""

    name: str
    kind: bytes
    """As tarfile's constants: REGTYPE, SYMTYPE and so on."""
    size: int
    """Bytes."""
    file: RawIOBase
    sparse: bool = False

    @property
    def is_link(self) -> bool:
        """Does it only name another file?"""
        return self.kind in (tarfile.SYMTYPE, tarfile.LNKTYPE)

    @property
    def is_file(self) -> bool:
        """Has it bytes of its own?"""
        return self.kind in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)


class _Part(RawIOBase):
    """So many bytes of an archive."""

    def __init__(self, file: BufferedReader[Any], size: int) -> None:
        self._file = file
        self.left = size
        self.cut = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(min(len(buffer), self.left))
        self.left -= len(data)
        self.cut = self.cut or (not data and self.left > 0)
        buffer[: len(data)] = data
        return len(data)

    def skip(self) -> None:
        """Read what is left and drop it."""
        while self.left and self.readinto(bytearray(min(self.left, _SKIP_BYTES))):
            pass


@dataclass(slots=True)
class _Ahead:
    """What extended headers say of the next member."""

    name: bytes = b""
    size: int | None = None
    sparse: bool = False


def members(file: BufferedReader[Any], tell_why: Tell) -> Iterator[Member]:
    """The members, in order; each is to be read before the next is asked for."""
    ahead, at, damaged = _Ahead(), 0, False
    while True:
        block = file.read(BLOCK)
        if len(block) < BLOCK:
            tell_why(f"it is cut: the archive has no end mark, at byte {at + len(block)}")
            return
        if not block.strip(b"\x00"):
            return
        info = _header(block)
        if info is None:
            if not damaged:
                tell_why(f"a header of the archive is damaged, at byte {at}")
            damaged, at = True, at + BLOCK
            continue
        damaged = False
        extended = info.type in _EXTENDED
        size = info.size if ahead.size is None or extended else ahead.size
        part = _Part(file, size)
        if extended:
            _look_ahead(ahead, info.type, part)
        else:
            name = ahead.name.decode("utf-8", "surrogateescape") or info.name
            sparse = ahead.sparse or info.type == tarfile.GNUTYPE_SPARSE
            ahead = _Ahead()
            if info.type in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE):
                part = _Part(file, size := 0)
            yield Member(name, info.type, size, part, sparse)
        part.skip()
        padding = _Part(file, -size % BLOCK)
        padding.skip()
        at += BLOCK + size + -size % BLOCK
        if part.cut or padding.cut:
            tell_why(f"it is cut: {info.name[:100]!a} in the archive does not end")
            return


def _header(block: bytes) -> tarfile.TarInfo | None:
    """What a header says; None: it is damaged."""
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError):
        return None
    return info if info.size >= 0 else None


def _look_ahead(ahead: _Ahead, kind: bytes, part: _Part) -> None:
    """Take the name and the size that an extended header has for the next member."""
    if kind in (tarfile.GNUTYPE_LONGLINK, tarfile.XGLTYPE):
        return
    data = part.read(MOST_HEADER_BYTES) or b""
    if kind == tarfile.GNUTYPE_LONGNAME:
        ahead.name = data.rstrip(b"\x00")
        return
    at = 0
    while match := _RECORD.match(data, at):
        end = at + int(match[1])
        value = data[match.end() : end - 1]
        if match[2] in (b"path", b"GNU.sparse.name"):
            ahead.name = value
        elif match[2] == b"size" and _SIZE.fullmatch(value):
            ahead.size = int(value)
        ahead.sparse = ahead.sparse or match[2].startswith(b"GNU.sparse")
        if end <= match.end():
            return
        at = end
