"""Where are the deaths of engines remembered, for the replicas that come after?

In a folder below the plan's `state_dir`: one file that all replicas of a host share, and the key of the
fingerprints, so that nobody can tell from a fingerprint what was asked. Each host knows its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rayserve.health.poison import Death, Suspicions, cleared, weigh, with_death
from rayserve.units import MIB

FOLDER: Final = "deaths"
"""Below the plan's `state_dir`."""
FILE: Final = "deaths.json"
KEY: Final = "key"
KEY_BYTES: Final = 32
FINGERPRINT_BYTES: Final = 16
MOST_RUNNING: Final = 4096
"""Requests that are remembered of one death."""
MOST_RECORD: Final = 16 * MIB
"""Bytes of the file: more than `MOST_DEATHS` of so many take, each named three times."""
LOCK_S: Final = 2.0
"""Longest wait for a replica that writes: one that is stopped meanwhile must not stop the others."""
ADD_LOCK_S: Final = 5.0
"""The same with a death to tell: it is told once, and the replica is given up meanwhile in any case."""
LOCK_POLL_S: Final = 0.02


class Deaths:
    """The deaths that this host's engines of one revision died; `clock`: Unix time.

    Nothing is read before it is asked for, and what could not be read is tried again the next time.
    """

    def __init__(
        self, folder: Path, revision: str, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._folder = folder
        self._revision = revision
        self.clock = clock
        self._key = b""
        self._seen: tuple[tuple[int, ...], tuple[Death, ...]] = ((), ())

    def fingerprint(self, path: str, body: bytes) -> str:
        """What a request is known by: keyed BLAKE2b of where it went and what it said, in hex.

        Empty while there is no key: nothing was read yet.
        """
        if not self._key:
            return ""
        digest = hashlib.blake2b(body, digest_size=FINGERPRINT_BYTES, key=self._key)
        digest.update(path.encode())
        return digest.hexdigest()

    def read(self) -> Suspicions:
        """What is known now; a file that is not ours, or half written, says nothing.

        Raises:
            OSError: it cannot be read, or no key can be written.
        """
        if not self._key:
            with self._locked(LOCK_S):
                pass
        return self._weighed(self._read())

    def add(self, running: Collection[str], well: Mapping[str, float]) -> Suspicions:
        """Remember a death and what was running, the first `MOST_RUNNING` of it; and who had ended well before.

        `well`: when, in Unix time.

        Raises:
            OSError: the file cannot be written; the old one stands.
        """
        named = frozenset(itertools.islice(running, MOST_RUNNING))
        with self._locked(ADD_LOCK_S):
            now_s = self.clock()
            death = Death(now_s, self._revision, named)
            before = cleared(self._read_anew(), self._revision, well, now_s)
            deaths = with_death(before, death)
            self._write(deaths)
        return self._weighed(deaths)

    def clear(self, well: Mapping[str, float]) -> Suspicions:
        """Clear what has ended well, at these Unix times.

        Raises:
            OSError: as `add`.
        """
        with self._locked(LOCK_S):
            before = self._read_anew()
            deaths = cleared(before, self._revision, well, self.clock())
            if deaths != before:
                self._write(deaths)
        return self._weighed(deaths)

    def _weighed(self, deaths: tuple[Death, ...]) -> Suspicions:
        return weigh(deaths, self._revision, self.clock())

    def _read_anew(self) -> tuple[Death, ...]:
        """Before something is written over it: two writes within a tick of the clock may look the same."""
        self._seen = ((), ())
        return self._read()

    def _read(self) -> tuple[Death, ...]:
        path = self._folder / FILE
        try:
            state = path.stat()
        except FileNotFoundError:
            return ()
        version = (state.st_ino, state.st_mtime_ns, state.st_size)
        seen = self._seen
        if seen[0] != version:
            seen = self._seen = (version, _deaths(path))
        return seen[1]

    def _write(self, deaths: tuple[Death, ...]) -> None:
        text = json.dumps(
            {
                "deaths": [
                    {
                        "at_s": death.at_s,
                        "revision": death.revision,
                        "running": sorted(death.running),
                        "again": sorted(death.again),
                        "clear": sorted(death.clear),
                    }
                    for death in deaths
                ]
            },
            indent=1,
        )
        draft = self._folder / f"{FILE}.part"  # of one writer: the folder is locked
        try:
            _create(draft, f"{text}\n".encode())
            draft.replace(self._folder / FILE)
        except OSError:
            draft.unlink(missing_ok=True)
            raise

    @contextlib.contextmanager
    def _locked(self, wait_s: float) -> Iterator[None]:
        """Alone with the folder and its key, both made where they are missing."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            deadline = time.monotonic() + wait_s
            while not _lock(descriptor):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self._folder} is held for more than {wait_s:g} s")
                time.sleep(LOCK_POLL_S)
            self._key = _key(self._folder / KEY, self._key)
            yield
        finally:
            os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _deaths(path: Path) -> tuple[Death, ...]:
    try:
        return tuple(map(_death, json.loads(_content(path, MOST_RECORD))["deaths"]))
    except (FileNotFoundError, ValueError, TypeError, KeyError, ArithmeticError, RecursionError):
        return ()


def _death(entry: Any) -> Death:
    names = (frozenset(map(str, entry[name])) for name in ("running", "again", "clear"))
    return Death(float(entry["at_s"]), str(entry["revision"]), *names)


def _key(path: Path, known: bytes) -> bytes:
    """The key that lies there; where none does that can be used, the known one or a new one is put there.

    A replica keeps its own, by which it has named what is inside.
    """
    with contextlib.suppress(FileNotFoundError):
        found = _content(path, KEY_BYTES)
        if len(found) == KEY_BYTES:
            return known or found
    key = known or secrets.token_bytes(KEY_BYTES)
    draft = path.with_suffix(".part")
    _create(draft, key)
    draft.replace(path)
    return key


def _content(path: Path, most: int) -> bytes:
    """What is in a regular file; nothing where it is larger, or is a pipe or a device, which may never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return b""
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(most + 1)
    finally:
        os.close(descriptor)
    return content if len(content) <= most else b""


def _create(path: Path, content: bytes) -> None:
    """Write a file that only its owner reads."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
