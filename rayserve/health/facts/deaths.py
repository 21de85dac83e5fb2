"""Where are the deaths of engines remembered, for the replicas that come after?

In a folder below the plan's `state_dir`: one file that all replicas of a host share, and the key of the
fingerprints, so that nobody can tell from a fingerprint what was asked. Each host knows its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rayserve.health.poison import Death, Suspicions, cleared, weigh, with_death

FOLDER: Final = "deaths"
"""Below the plan's `state_dir`."""
FILE: Final = "deaths.json"
KEY: Final = "key"
KEY_BYTES: Final = 32
FINGERPRINT_BYTES: Final = 16
LOCK_S: Final = 2.0
"""Longest wait for a replica that writes: one that is stopped meanwhile must not stop the others."""
LOCK_POLL_S: Final = 0.02


class Deaths:
    """The deaths that this host's engines of one revision died; `clock`: Unix time.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(
        self, folder: Path, revision: str, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._folder = folder
        self._revision = revision
        self.clock = clock
        self._seen: tuple[tuple[int, ...], tuple[Death, ...]] = ((), ())
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked():
            self._key = _key(folder / KEY)

    def fingerprint(self, path: str, body: bytes) -> str:
        """What a request is known by: keyed BLAKE2b of where it went and what it said, in hex."""
        digest = hashlib.blake2b(body, digest_size=FINGERPRINT_BYTES, key=self._key)
        digest.update(path.encode())
        return digest.hexdigest()

    def read(self) -> Suspicions:
        """What is known now; a file that is not ours, or half written, says nothing.

        Raises:
            OSError: it cannot be read.
        """
        return weigh(self._read(), self._revision, self.clock())

    def add(self, running: Collection[str]) -> Suspicions:
        """Remember a death, and what was running.

        Raises:
            OSError: the file cannot be written; the old one stands.
        """
        death = Death(self.clock(), self._revision, frozenset(running))
        with self._locked():
            deaths = with_death(self._read(), death)
            self._write(deaths)
        return weigh(deaths, self._revision, self.clock())

    def clear(self, well: Mapping[str, float]) -> Suspicions:
        """Clear what has ended well, at these Unix times.

        Raises:
            OSError: as `add`.
        """
        with self._locked():
            before = self._read()
            deaths = cleared(before, self._revision, well)
            if deaths != before:
                self._write(deaths)
        return weigh(deaths, self._revision, self.clock())

    def _read(self) -> tuple[Death, ...]:
        path = self._folder / FILE
        try:
            stat = path.stat()
        except FileNotFoundError:
            return ()
        version = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
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
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            deadline = time.monotonic() + LOCK_S
            while not _lock(descriptor):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self._folder} is held for more than {LOCK_S:g} s")
                time.sleep(LOCK_POLL_S)
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
        return tuple(map(_death, json.loads(path.read_bytes())["deaths"]))
    except (FileNotFoundError, ValueError, TypeError, KeyError, ArithmeticError, RecursionError):
        return ()


def _death(entry: Any) -> Death:
    running, clear = (frozenset(map(str, entry[name])) for name in ("running", "clear"))
    return Death(float(entry["at_s"]), str(entry["revision"]), running, clear)


def _key(path: Path) -> bytes:
    """The key, made where there is none that can be used."""
    with contextlib.suppress(FileNotFoundError):
        key = path.read_bytes()
        if len(key) == KEY_BYTES:
            return key
    key = secrets.token_bytes(KEY_BYTES)
    draft = path.with_suffix(".part")
    _create(draft, key)
    draft.replace(path)
    return key


def _create(path: Path, content: bytes) -> None:
    """Write a file that only its owner reads."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
