"""Which lines stand in these files, folders and archives, in which order, and without filling the memory?

A folder is walked, without following links. Logs that were rotated (`x.log.2.gz`, `x.log.1`, `x.log`) come
oldest first. What is compressed (gzip, bzip2, xz) or a tar archive is known by its first bytes, whatever its
name. Files that are no text are passed over. What cannot be read, or not to its end, is told as a gap.
"""

from __future__ import annotations

import io
import os
import re
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rayserve.doctor.lines import LONGEST_LINE_BYTES, shown_name
from rayserve.doctor.tars import members
from rayserve.doctor.unpack import Unpacked, format_of
from rayserve.doctor.verdicts import Gap
from rayserve.errors import InputError, Where

STDIN: Final = "-"
MOST_FILES: Final = 20_000
"""Of all folders and archives together."""
MOST_BYTES: Final = 64 * 2**30
"""Of one log: a device may give them for ever."""
MOST_UNPACKED_BYTES: Final = 16 * 2**30
"""In all, at every depth: an archive may be made to unpack for ever."""
MOST_WRAPPINGS: Final = 4
"""Of a log: a compressed archive of compressed files has three."""
MOST_GAPS: Final = 100
"""That are told; the rest is counted."""
PROGRESS_S: Final = 5.0
"""Between two lines that say how far the reading is."""
_HEAD_BYTES: Final = 512
_BUFFER_BYTES: Final = 256 * 1024
_TAR_AT: Final = 257
_COMPRESSED = re.compile(r"\.(?:gz|bz2|xz)$")
_ROTATED = re.compile(r"^(.*?)\.(\d{1,4})$")
_DATED = re.compile(r"^(.*?)[-.](\d{8}(?:[-T_]?\d{2,6})?|\d{4}-\d\d-\d\d\S*)$")

Read = Callable[[str, Iterator[bytes]], None]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read, and what could not be."""

    logs: int
    """With at least one byte of text."""
    gaps: tuple[Gap, ...]


def read_all(paths: Sequence[str], read: Read, say: Say) -> Reading:
    """Give every log under `paths` to `read`, with its name as it is to be shown.

    `say` is told of what was passed over, or is damaged, and every few seconds how far the reading is.

    Raises:
        InputError: a path that was named is empty, is not there, or cannot be read.
    """
    files = _Files(read, say)
    if "" in paths:
        raise InputError(
            "paths of logs",
            found="an empty path",
            do="name a file or a folder, `.` for the working folder; a variable may be unset",
        )
    for path in paths:
        if path == STDIN:
            files.take("<stdin>", sys.stdin.buffer)
        else:
            for one in _found(path, files):
                _open(one, files, named=str(one) == path)
    return files.reading()


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
    """What is handed on, how much of it there was, and what was not."""

    def __init__(self, read: Read, say: Say) -> None:
        self._read = read
        self.say = say
        self._count = 0
        self._gaps: list[Gap] = []
        self._more_gaps = 0
        self._unpacked = 0
        self._bytes = 0
        self._next_s = time.monotonic() + PROGRESS_S
        self._name = ""

    def reading(self) -> Reading:
        """What became of all that was taken."""
        gaps = self._gaps
        if self._more_gaps:
            gaps = [*gaps, Gap("others", f"{self._more_gaps} more could not be read to their end")]
        return Reading(self._count, tuple(gaps))

    def gap(self, name: str, why: str) -> None:
        """Something that was to be read was not; of one input, what was seen first."""
        if self._gaps and self._gaps[-1].file == name:
            return
        if len(self._gaps) >= MOST_GAPS:
            self._more_gaps += 1
            return
        self._gaps.append(Gap(name, why))
        self.say(f"{name}: {why}")

    def spend(self, count: int) -> bool:
        """Count bytes that were unpacked; may there be more?"""
        self._unpacked += count
        self.tick(count)
        return self._unpacked < MOST_UNPACKED_BYTES

    def tick(self, count: int) -> None:
        """Count bytes that were read or unpacked, and say now and then how many."""
        self._bytes += count
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + PROGRESS_S
            self.say(f"{self._name}: reading; {self._bytes / 2**20:.0f} MiB so far")

    def take(self, name: str, file: Any) -> None:
        """Read a file that is open: text, compressed, or an archive."""
        name = shown_name(name)
        self._take(name, _buffered(_Metered(file, name, self)), MOST_WRAPPINGS)

    def _take(self, name: str, file: io.BufferedReader[Any], wrappings: int) -> None:
        self._name = name
        head = _head(file)
        kind = format_of(head)
        archive = head[_TAR_AT : _TAR_AT + 5] == b"ustar"
        if not head:
            return
        if (kind or archive) and not wrappings:
            self.gap(name, "passed over, it is an archive in an archive in an archive")
        elif kind:
            inner = Unpacked(file, kind, lambda why: self.gap(name, why), self.spend)
            self._take(name, _buffered(inner), wrappings - 1)
        elif archive:
            self._archive(name, file, wrappings - 1)
        elif b"\x00" in head:
            self.say(f"{name}: passed over, it is no text")
        elif self._count >= MOST_FILES:
            self.gap(name, f"passed over, after {MOST_FILES} files")
        else:
            self._count += 1
            self._read(name, _lines(name, file, self.gap))

    def _archive(self, name: str, file: io.BufferedReader[Any], wrappings: int) -> None:
        links = 0
        for member in members(file, lambda why: self.gap(name, why)):
            self.tick(0)
            inner = f"{name}:{shown_name(member.name)}"
            links += member.is_link
            if member.sparse:
                self.gap(inner, "passed over, it is stored as a sparse file")
            elif member.is_file and member.size:
                self._take(inner, _buffered(member.file), wrappings)
                self._name = name
        if links:
            self.say(f"{name}: {_counted(links, 'link')} passed over")


class _Metered(io.RawIOBase):
    """A file whose bytes are counted; it ends where it cannot be read further."""

    def __init__(self, file: Any, name: str, files: _Files) -> None:
        self._file = file
        self._file_name = name
        self._files = files
        self._begun = False

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """The first time enough to know what the file is, though a pipe gives it in pieces."""
        got = 0
        least = 1 if self._begun else min(_HEAD_BYTES, len(buffer))
        self._begun = True
        while got < least:
            try:
                more = self._file.readinto(memoryview(buffer)[got:]) or 0
            except OSError as error:
                self._files.gap(self._file_name, f"reading it failed: {error.strerror or error}")
                break
            if not more:
                break
            got += more
        self._files.tick(got)
        return got


def _buffered(raw: io.RawIOBase) -> io.BufferedReader[Any]:
    return io.BufferedReader(raw, _BUFFER_BYTES)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("s" if count != 1 else "")


def _head(file: io.BufferedReader[Any]) -> bytes:
    """The first bytes of a file, which stay to be read."""
    return file.peek(_HEAD_BYTES)[:_HEAD_BYTES]


def _lines(
    name: str, file: io.BufferedReader[Any], gap: Callable[[str, str], None]
) -> Iterator[bytes]:
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
            gap(name, f"only the first {MOST_BYTES // 2**30} GiB were read")
            return


def _found(path: str, files: _Files) -> Iterator[Path]:
    """The files of a path, in the order in which they are to be read."""
    top = Path(path)
    try:
        mode = top.stat().st_mode
    except (OSError, ValueError) as error:
        raise InputError(
            "a log, a folder or an archive of logs",
            found=getattr(error, "strerror", None) or str(error),
            do="name files or folders that are there, or - for standard input",
            where=Where(shown_name(path)),
        ) from None
    if not stat.S_ISDIR(mode):
        yield top
        return
    passed: Counter[str] = Counter()
    names = list(_walked(top, files, passed))
    for what, count in (+passed).items():
        files.say(f"{shown_name(path)}: {_counted(count, what)} passed over")
    yield from sorted(names, key=lambda one: age_key(str(one)))


def _walked(top: Path, files: _Files, passed: Counter[str]) -> Iterator[Path]:
    """The regular files of a folder; counted by kind in `passed`: what is neither file nor folder."""

    def unread(error: OSError) -> None:
        name = os.fsdecode(error.filename or top)
        files.gap(shown_name(name), f"passed over: {error.strerror or error}")

    for folder, folders, names in os.walk(top, onerror=unread):
        passed["link"] += sum(Path(folder, name).is_symlink() for name in folders)
        for one in (Path(folder, name) for name in names):
            try:
                mode = one.lstat().st_mode
            except OSError as error:
                unread(error)
                continue
            if stat.S_ISREG(mode):
                yield one
            else:
                passed["link" if stat.S_ISLNK(mode) else "special file"] += 1


def _open(path: Path, files: _Files, *, named: bool) -> None:
    """Read one file; one that was named must be readable."""
    name = shown_name(str(path))
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
        files.gap(name, f"passed over: {refused}")
        return
    raise InputError(
        "a log that can be read",
        found=refused,
        do="run as a user who may read it, and name a file or a pipe",
        where=Where(name),
    )
