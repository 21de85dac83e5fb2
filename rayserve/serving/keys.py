"""Whose request is it: API keys from a file, and the account of each key.

The ring holds SHA-256 digests only. A key's public name is the first eight hex digits of its digest;
the key itself stands in no log line, message or representation.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from rayserve.errors import HostError
from rayserve.keyfile import Signature, read_keys, signature

logger = logging.getLogger("ray.serve")

Clock = Callable[[], float]

CHECK_INTERVAL_S: Final = 1.0
WINDOW_S: Final = 60


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
        found: Signature | None = None
        with suppress(OSError):  # a missing file has no signature; read_keys() says why
            found = signature(Path(self.path).stat())
        if found == self._signature:
            return
        self._signature = found
        try:
            self._signature, digests = read_keys(self.path)
        except HostError as error:
            # The message alone: a traceback would add nothing but the risk of quoting the file.
            logger.error("API keys left as they were: %s", error)  # noqa: TRY400
            return
        old = self._accounts
        self._accounts = {d: old.get(d) or Account(d.hex()[:8], self._clock) for d in digests}
        logger.info("API keys read again: %d keys", len(digests))
