"""Whose request is it: API keys from a file, and the account of each key.

The ring holds SHA-256 digests only. A key's public name is the first eight hex digits of its digest;
the key itself stands in no log line, message or representation.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from rayserve.errors import HostError, Where

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

MIN_KEY_CHARACTERS: Final = 16
MAX_FILE_BYTES: Final = 1 << 20
CHECK_INTERVAL_S: Final = 1.0
WINDOW_S: Final = 60

_Signature = tuple[int, int, int, int]


class Account:
    """What one key uses: sequences in flight, and tokens during the last minute."""

    __slots__ = ("_clock", "_seconds", "_window_tokens", "in_flight", "name")

    def __init__(self, name: str, clock: Clock) -> None:
        self.name = name
        self.in_flight = 0
        self._clock = clock
        self._seconds: deque[list[int]] = deque()
        self._window_tokens = 0

    def __repr__(self) -> str:
        return f"Account({self.name})"

    def charge(self, tokens: int) -> None:
        """Count tokens, prompt or generated, as used now."""
        second = int(self._clock())
        seconds = self._seconds
        if seconds and seconds[-1][0] == second:
            seconds[-1][1] += tokens
        else:
            seconds.append([second, tokens])
            self._expire(second)
        self._window_tokens += tokens

    def tokens(self) -> int:
        """Tokens used during the last WINDOW_S seconds, to the second."""
        self._expire(int(self._clock()))
        return self._window_tokens

    def wait_s(self, budget: int) -> int:
        """Seconds until fewer than `budget` tokens lie in the window; 0: there is room now."""
        now = int(self._clock())
        self._expire(now)
        left = self._window_tokens
        if left < budget:
            return 0
        for second, tokens in self._seconds:
            left -= tokens
            if left < budget:
                return second + WINDOW_S - now
        return WINDOW_S

    def _expire(self, now: int) -> None:
        seconds = self._seconds
        while seconds and seconds[0][0] <= now - WINDOW_S:
            self._window_tokens -= seconds.popleft()[1]


class KeyRing:
    """The accepted keys of one file, read again when the file changes.

    Raises:
        HostError: the file cannot be used. Only the constructor raises; a broken file that turns up
            later leaves the keys as they were and is logged.
    """

    def __init__(self, path: str, clock: Clock) -> None:
        self.path = path
        self._clock = clock
        self._checked_at = clock()
        self._signature, digests = read_keys(path)
        self._accounts = {digest: Account(digest.hex()[:8], clock) for digest in digests}

    def __repr__(self) -> str:
        return f"KeyRing({self.path}, {len(self._accounts)} keys)"

    def __len__(self) -> int:
        return len(self._accounts)

    def account(self, presented: bytes) -> Account | None:
        """The account of a key, or None. Takes the same time whichever key matches."""
        self._refresh()
        digest = hashlib.sha256(presented).digest()
        found = None
        for known, account in self._accounts.items():
            if hmac.compare_digest(known, digest):
                found = account  # no early exit: the position of a key is not to be timed
        return found

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._checked_at < CHECK_INTERVAL_S:
            return
        self._checked_at = now
        signature: _Signature | None = None
        with suppress(OSError):  # a missing file has no signature; read_keys() says why
            signature = _signature(Path(self.path).stat())
        if signature == self._signature:
            return
        self._signature = signature
        try:
            self._signature, digests = read_keys(self.path)
        except HostError as error:
            # The message alone: a traceback would add nothing but the risk of quoting the file.
            logger.error("API keys left as they were: %s", error)  # noqa: TRY400
            return
        old = self._accounts
        self._accounts = {d: old.get(d) or Account(d.hex()[:8], self._clock) for d in digests}
        logger.info("API keys read again: %d keys", len(digests))


def read_keys(path: str) -> tuple[_Signature | None, list[bytes]]:
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
    return _signature(status), _digests(path, content)


def _signature(status: os.stat_result) -> _Signature:
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
