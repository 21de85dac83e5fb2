"""What stands in a file of API keys? Digests of them, if nobody but the service can read the file.

The replica reads its keys with this, and a host's checks ask with it whether a replica could. The file
is never quoted: a line that is no key may be one with a typing error.
"""

from __future__ import annotations

import hashlib
import os
import stat
from typing import Final

from rayserve.errors import HostError, Where
from rayserve.veil import MIN_KEY_CHARACTERS

MAX_FILE_BYTES: Final = 1 << 20

Signature = tuple[int, int, int, int]


def read_keys(path: str) -> tuple[Signature | None, list[bytes]]:
    """Signature of the file and SHA-256 digests of its keys: one a line, `#` starts a comment line.

    Raises:
        HostError: unreadable, open to others, no key, or a line that cannot be a key.
    """
    try:
        status, content = _read_private(path)
    except OSError as error:
        raise HostError(
            "a readable file of API keys",
            found=error.strerror or type(error).__name__,
            do="create it with mode 0600, owned by the user of the service",
            where=Where(path),
        ) from None
    if len(content) > MAX_FILE_BYTES:
        raise HostError(
            f"a file of API keys of at most {MAX_FILE_BYTES} bytes",
            found="a larger one",
            do="keep one key a line",
            where=Where(path),
        )
    return signature(status), _digests(path, content)


def signature(status: os.stat_result) -> Signature:
    """What changes when the file does."""
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _read_private(path: str) -> tuple[os.stat_result, bytes]:
    # The open file is checked, not the path, which could be another file by then; without
    # O_NONBLOCK a named pipe would hang the replica.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        _check_private(path, status)
        return status, os.read(descriptor, MAX_FILE_BYTES + 1)
    finally:
        os.close(descriptor)


def _check_private(path: str, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        found = "something that is not a regular file"
    elif mode & 0o077:
        found = f"mode {mode:04o}"
    elif status.st_uid not in (0, os.geteuid()):
        found = f"owner uid {status.st_uid}"
    else:
        return
    raise HostError(
        "a file of API keys that only the service can read",
        found=found,
        do="chmod 0600 it and chown it to the user of the service",
        where=Where(path),
    )


def _digests(path: str, content: bytes) -> list[bytes]:
    digests: dict[bytes, None] = {}
    for number, raw in enumerate(content.split(b"\n"), start=1):
        line = raw.strip()
        if not line or line.startswith(b"#"):
            continue
        # The line is never quoted: it may be a key with a typing error.
        if len(line) < MIN_KEY_CHARACTERS:
            found = f"{len(line)} characters"
        elif any(not 0x21 <= byte <= 0x7E for byte in line):
            found = "a character that is not visible ASCII"
        else:
            digests[hashlib.sha256(line).digest()] = None
            continue
        raise HostError(
            f"one API key a line, of at least {MIN_KEY_CHARACTERS} visible ASCII characters",
            found=found,
            do="make one with `openssl rand -hex 32`",
            where=Where(path, line=number),
        )
    if not digests:
        raise HostError(
            "at least one API key",
            found="none",
            do="add one: `openssl rand -hex 32`",
            where=Where(path),
        )
    return list(digests)
