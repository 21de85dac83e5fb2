"""Which small files has an id, and which commit is planned?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from huggingface_hub import (
    constants,
    errors,
    get_hf_file_metadata,
    hf_hub_download,
    try_to_load_from_cache,
)
from huggingface_hub.utils import build_hf_headers, disable_progress_bars

from rayserve.errors import SpecError, Where
from rayserve.files import CONFIG, INDEX, SINGLE, check_shards, read_bytes
from rayserve.hub.bounds import STEP_S, Bounds, RefusedAnswerError
from rayserve.hub.cache import bound_locks, ended_cleanly
from rayserve.hub.headers import read_headers
from rayserve.hub.refusals import FAILURES, Asked, UnreadError, check_token_file, refusal
from rayserve.planner.support.modelopt import QUANT_CONFIG
from rayserve.planner.support.reading import (
    MAX_CONFIG_BYTES,
    MAX_INDEX_BYTES,
    Index,
    check_size,
    parse_index,
)
from rayserve.planner.weights.checkpoint import bytes_by_type, check_index
from rayserve.spec import COMMIT

MOST_BYTES: Final = {
    CONFIG: MAX_CONFIG_BYTES,
    QUANT_CONFIG: MAX_CONFIG_BYTES,
    INDEX: MAX_INDEX_BYTES,
}
FILES_S: Final = 60.0
"""Longest time for the small files of one id."""
HEADERS_S: Final = 300.0
"""Longest time for the headers of its weights."""


@dataclass(frozen=True)
class Snapshot:
    """An id at a commit."""

    hf_id: str
    commit: str
    folder: Path
    """Folder of the cache with the files of this commit that are at hand."""
    where: Where
    """The place in the spec that names the id."""


class Hub:
    """The hub that HF_ENDPOINT names, and this machine's cache of it."""

    def __init__(
        self, say: Callable[[str], None], *, endpoint: str | None = None, cache: Path | None = None
    ) -> None:
        """`say` takes a line of progress; endpoint and cache: else what the environment says."""
        self._say = say
        self._endpoint = endpoint or constants.ENDPOINT
        self._cache = cache or Path(constants.HF_HUB_CACHE)
        disable_progress_bars()
        self._bounds = Bounds()
        bound_locks(self._bounds, say)

    def snapshot(self, hf_id: str, revision: str, where: Where) -> Snapshot:
        """The commit of a revision (empty: `main`), with config.json in its folder.

        The cache is asked first where the revision is a commit, and last where it may have moved.

        Raises:
            SpecError: there is no such id, revision or file.
            HostError: it cannot be reached or read, nor is it in the cache.
        """
        asked = self._asked(hf_id, revision or constants.DEFAULT_REVISION, CONFIG, where)
        self._bounds.start(FILES_S)
        if COMMIT.fullmatch(revision):
            path = self._cached(asked)
            commit = revision
            if path is None:
                self._say_unless_offline(f"{hf_id}: fetching {CONFIG} from {asked.host}")
                path = self._downloaded(asked)
        else:
            path, commit = self._resolved(asked)
        return Snapshot(hf_id, commit, Path(path).parent, where)

    def optional(self, snapshot: Snapshot, name: str) -> Path | None:
        """A further small file of a snapshot; None: it has none, or offline, none is at hand.

        Raises:
            HostError: it cannot be reached or read, nor is it in the cache.
        """
        asked = self._asked(snapshot.hf_id, snapshot.commit, name, snapshot.where)
        self._bounds.start(FILES_S)
        try:
            found = try_to_load_from_cache(
                asked.hf_id, name, cache_dir=self._cache, revision=asked.revision
            )
            if isinstance(found, str):
                return Path(found)
            if found is not None or constants.is_offline_mode():
                return None  # known not to be there; or all that is there is at hand, as for vLLM
            return self._fetch_optional(asked)
        except FAILURES as error:
            raise refusal(error, asked) from None

    def stored(self, snapshot: Snapshot) -> dict[str, int]:
        """Bytes of all tensors by type, from the headers of its safetensors files; empty: it has none.

        Of each file the first bytes are read, in ranges.

        Raises:
            SpecError: a header or the index is broken, or they disagree.
            HostError: a file cannot be reached or read.
        """
        index, names = Index({}, None), [SINGLE]
        path = self.optional(snapshot, INDEX)
        if constants.is_offline_mode():
            return {}
        place = f"{snapshot.hf_id}@{snapshot.commit[:12]}"
        where = Where(f"{place}/{INDEX}")
        if path is not None:
            index = parse_index(read_bytes(path, MAX_INDEX_BYTES), where)
            names = sorted(set(index.files.values()))
            check_shards(len(names), where)
        self._say(f"{snapshot.hf_id}: reading the headers of {len(names)} files of weights")
        wanted = [
            self._asked(snapshot.hf_id, snapshot.commit, name, snapshot.where) for name in names
        ]
        self._bounds.start(HEADERS_S)
        try:
            check_token_file()
            files = read_headers(wanted, build_hf_headers(), place, self._bounds)
        except UnreadError as failed:
            if path is None and isinstance(failed.error, errors.RemoteEntryNotFoundError):
                return {}  # pickled weights, or adapters
            raise refusal(failed.error, failed.asked) from None
        return bytes_by_type(check_index(index, files, where))

    def _fetch_optional(self, asked: Asked) -> Path | None:
        try:
            return Path(self._fetch(asked))
        except errors.RemoteEntryNotFoundError:
            # Asked by the library itself, the cache keeps in mind that there is none.
            with contextlib.suppress(errors.RemoteEntryNotFoundError):
                self._download(asked)
            return None

    # ── one file ──────────────────────────────────────────────────────────────────────────────────
    def _asked(self, hf_id: str, revision: str, file: str, where: Where) -> Asked:
        return Asked(hf_id, revision, file, self._endpoint, where)

    def _cached(self, asked: Asked) -> str | None:
        with contextlib.suppress(OSError, ValueError):  # a cache that is not for us is none
            found = try_to_load_from_cache(
                asked.hf_id, asked.file, cache_dir=self._cache, revision=asked.revision
            )
            return found if isinstance(found, str) else None
        return None

    def _resolved(self, asked: Asked) -> tuple[str, str]:
        """The file, and the commit that a branch or tag is; from the cache where no hub answers."""
        path = self._cached(asked) if constants.is_offline_mode() else None
        if path is None:
            self._say_unless_offline(
                f"{asked.hf_id}: asking {asked.host} for {asked.file} at {asked.revision}"
            )
            try:
                path = self._fetch(asked)
            except FAILURES as error:
                known = refusal(error, asked)
                path = self._cached(asked)
                if path is None or isinstance(known, SpecError):
                    raise known from None
                self._say(f"{asked.hf_id}: {known.found}; taking what the cache has")
        commit = Path(path).parent.name
        if not COMMIT.fullmatch(commit):  # of a cache that is none, or of a second answer
            raise refusal(errors.FileMetadataError(), asked)
        return path, commit

    def _say_unless_offline(self, line: str) -> None:
        if not constants.is_offline_mode():
            self._say(line)

    def _downloaded(self, asked: Asked) -> str:
        try:
            return self._fetch(asked)
        except FAILURES as error:
            raise refusal(error, asked) from None

    def _fetch(self, asked: Asked) -> str:
        """Fetch a file into the cache, whole or not at all, once it is known to be small."""
        check_token_file()
        head = get_hf_file_metadata(asked.url, timeout=STEP_S, endpoint=self._endpoint)
        if head.commit_hash is None or not COMMIT.fullmatch(head.commit_hash):
            raise errors.FileMetadataError
        if head.size is None:
            raise RefusedAnswerError("an answer that does not say how long the file is")
        where = Where(f"{asked.hf_id}@{head.commit_hash[:12]}/{asked.file}")
        check_size(head.size, MOST_BYTES[asked.file], where)
        return self._download(asked)

    def _download(self, asked: Asked) -> str:
        with ended_cleanly():
            return str(
                hf_hub_download(
                    asked.hf_id,
                    asked.file,
                    revision=asked.revision,  # of a branch, the cache keeps what it was
                    cache_dir=self._cache,
                    endpoint=self._endpoint,
                )
            )
