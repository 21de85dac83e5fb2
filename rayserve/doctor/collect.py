"""Which lines stand in these files, folders and archives, in which order, and without filling the memory?

A folder is walked, without following links. Logs that were rotated (`x.log.2.gz`, `x.log.1`, `x.log`) come
oldest first. What is compressed (gzip, bzip2, xz) or a tar archive is known by its first bytes, whatever its
name. Files that are no text are passed over.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import re
import stat
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from rayserve.doctor.lines import LONGEST_LINE_BYTES
from rayserve.errors import InputError, Where

STDIN: Final = "-"
MOST_FILES: Final = 20_000
"""Of all folders and archives together."""
MOST_BYTES: Final = 64 * 2**30
"""Of one log, unpacked: an archive may be made to unpack for ever."""
MOST_WRAPPINGS: Final = 4
"""Of a log: a compressed archive of compressed files has three."""
_HEAD_BYTES: Final = 512
_BUFFER_BYTES: Final = 256 * 1024
_TAR_AT: Final = 257
_OPENERS: Final[tuple[tuple[bytes, Callable[[Any], Any]], ...]] = (
    (b"\x1f\x8b", lambda file: gzip.GzipFile(fileobj=file)),
    (b"BZh", bz2.BZ2File),
    (b"\xfd7zXZ\x00", lzma.LZMAFile),
)
_BROKEN = (EOFError, gzip.BadGzipFile, lzma.LZMAError, tarfile.TarError, zlib.error, OSError)
_COMPRESSED = re.compile(r"\.(?:gz|bz2|xz)$")
_ROTATED = re.compile(r"^(.*?)\.(\d{1,4})$")
_DATED = re.compile(r"^(.*?)[-.](\d{8}(?:[-T_]?\d{2,6})?|\d{4}-\d\d-\d\d\S*)$")

Read = Callable[[str, Iterator[bytes]], None]
Say = Callable[[str], None]


def read_all(paths: Sequence[str], read: Read, say: Say) -> int:
    """Give every log under `paths` to `read`, with its name; returns how many there were.

    `say` is told of what was passed over: files that cannot be read, or are no logs.

    Raises:
        InputError: a path that was named is not there, or cannot be read.
    """
    files = _Files(read, say)
    for path in paths:
        if path == STDIN:
            files.take("<stdin>", sys.stdin.buffer)
        else:
            for one in _found(path):
                _open(one, files, say, named=str(one) == path)
    return files.count


def age_key(name: str) -> tuple[str, int, str, int]:
    """Order of logs: those of one name together, and of these the oldest first."""
    folder, _, base = name.rpartition("/")
    base = _COMPRESSED.sub("", base)
    if match := _ROTATED.match(base):
        return f"{folder}/{match[1]}", 1, "", -int(match[2])
    if match := _DATED.match(base):
        return f"{folder}/{match[1]}", 0, match[2], 0
    return f"{folder}/{base}", 2, "", 0


class _Files:
    """What is handed on, and how much of it there was."""

    def __init__(self, read: Read, say: Say) -> None:
        self._read = read
        self._say = say
        self.count = 0

    def take(self, name: str, file: Any) -> None:
        """Read a file that is open: text, compressed, or an archive."""
        buffered = io.BufferedReader(file, _BUFFER_BYTES)
        try:
            self._take(name, buffered, MOST_WRAPPINGS)
        except _BROKEN as error:
            self._say(f"{name}: read up to where it is broken: {error}")
        finally:
            buffered.detach()  # whoever opened the file closes it

    def _take(self, name: str, file: io.BufferedReader[Any], wrappings: int) -> None:
        head = _head(file)
        opener = next((opener for mark, opener in _OPENERS if head.startswith(mark)), None)
        archive = head[_TAR_AT : _TAR_AT + 5] == b"ustar"
        if (opener or archive) and not wrappings:
            self._say(f"{name}: passed over, it is an archive in an archive in an archive")
        elif opener is not None:
            self._take(name, io.BufferedReader(opener(file), _BUFFER_BYTES), wrappings - 1)
        elif archive:
            self._archive(name, file, wrappings - 1)
        elif b"\x00" in head:
            self._say(f"{name}: passed over, it is no text")
        elif self.count >= MOST_FILES:
            self._say(f"{name}: passed over, after {MOST_FILES} files")
        else:
            self.count += 1
            self._read(name, _lines(name, file, self._say))

    def _archive(self, name: str, file: io.BufferedReader[Any], wrappings: int) -> None:
        with tarfile.open(fileobj=file, mode="r|") as archive:
            for member in archive:
                inner = archive.extractfile(member) if member.isreg() else None
                if inner is not None and member.size:
                    self._take(f"{name}:{member.name}", io.BufferedReader(inner), wrappings)


def _head(file: io.BufferedReader[Any]) -> bytes:
    """The first bytes of a file, which stay to be read; a pipe gives them as they come."""
    return file.peek(_HEAD_BYTES)[:_HEAD_BYTES]


def _lines(name: str, file: io.BufferedReader[Any], say: Say) -> Iterator[bytes]:
    """The lines of a log; of a long one its beginning."""
    left, readline = MOST_BYTES, file.readline
    while raw := readline(LONGEST_LINE_BYTES):
        yield raw
        left -= len(raw)
        while len(raw) == LONGEST_LINE_BYTES and not raw.endswith(b"\n"):
            raw = readline(LONGEST_LINE_BYTES)
            left -= len(raw)
            if left < 0:
                break
        if left < 0:
            say(f"{name}: only the first {MOST_BYTES // 2**30} GiB were read")
            return


def _found(path: str) -> Iterator[Path]:
    """The files of a path, in the order in which they are to be read."""
    top = Path(path)
    try:
        mode = top.stat().st_mode
    except (OSError, ValueError) as error:
        raise InputError(
            "a log, a folder or an archive of logs",
            found=getattr(error, "strerror", None) or str(error),
            do="name files or folders that are there, or - for standard input",
            where=Where(path),
        ) from None
    if not stat.S_ISDIR(mode):
        yield top
        return
    names = [
        Path(folder, name)
        for folder, _, files in os.walk(top)
        for name in files
        if stat.S_ISREG(os.lstat(os.path.join(folder, name)).st_mode)  # noqa: PTH118 - os.walk's own terms
    ]
    yield from sorted(names, key=lambda one: age_key(str(one)))


def _open(path: Path, files: _Files, say: Say, *, named: bool) -> None:
    """Read one file; one that was named must be readable."""
    refused = ""
    try:
        kind = path.stat().st_mode
        refused = "it is a socket or a disk" if stat.S_ISSOCK(kind) or stat.S_ISBLK(kind) else ""
        if not refused:
            with path.open("rb", buffering=0) as file:
                files.take(str(path), file)
    except OSError as error:
        refused = error.strerror or str(error)
    if not refused:
        return
    if not named:
        say(f"{path}: passed over: {refused}")
        return
    raise InputError(
        "a log that can be read",
        found=refused,
        do="run as a user who may read it, and name a file or a pipe",
        where=Where(str(path)),
    )
