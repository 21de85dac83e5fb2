"""Which tensors do the weights on a hub hold? The first bytes of each file say it."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Final

import httpx2
from huggingface_hub.utils import hf_raise_for_status, http_stream_backoff

from rayserve.errors import SpecError, Where
from rayserve.files import Tally
from rayserve.hub.bounds import AGAIN, Bounds, RefusedAnswerError
from rayserve.hub.refusals import FAILURES, Asked, UnreadError
from rayserve.planner.weights.checkpoint import Tensor, header_bytes, parse_header

FIRST_BYTES: Final = 100_000
"""Holds the header of 97 of 100 files (huggingface_hub, parse_safetensors_file_metadata)."""
AT_ONCE: Final = 8
TRIES: Final = 2
RANGE: Final = re.compile(r"bytes 0-\d+/(\d{1,18})")


def read_headers(
    files: Sequence[Asked], headers: Mapping[str, str], place: str, bounds: Bounds
) -> dict[str, tuple[Tensor, ...]]:
    """The tensors of each file, by its name and in the order of `files`.

    Counted as they come: of a checkpoint with more than one can have, no further file is read.

    Raises:
        SpecError: a header is broken, or all of them hold more than a checkpoint can.
        UnreadError: a file cannot be read.
    """
    tally = Tally(Where(place))
    found: dict[str, tuple[Tensor, ...]] = {}
    readers = _Readers(files, headers, place)
    try:
        for _ in files:
            asked, result = readers.done.get()
            if isinstance(result, FAILURES):
                raise UnreadError(asked, result) from None
            if isinstance(result, Exception):
                raise result
            found[asked.file] = result
            tally.add(result)
    finally:  # on Ctrl-C too
        readers.stop()
        bounds.stop()
    return {asked.file: found[asked.file] for asked in files}


class _Readers:
    """Threads that read headers, and that keep no process from ending while a server is slow."""

    def __init__(self, files: Sequence[Asked], headers: Mapping[str, str], place: str) -> None:
        self.done: queue.SimpleQueue[tuple[Asked, tuple[Tensor, ...] | Exception]] = (
            queue.SimpleQueue()
        )
        """Each file as it is read, with its tensors or with why they could not be read."""
        self._headers, self._place = headers, place
        self._stopped = threading.Event()
        self._left: queue.SimpleQueue[Asked] = queue.SimpleQueue()
        for asked in files:
            self._left.put(asked)
        for _ in range(min(AT_ONCE, len(files))):
            threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        """Begin no further file; those begun end with their next bytes."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                asked = self._left.get_nowait()
            except queue.Empty:
                return
            try:
                where = Where(f"{self._place}/{asked.file}")
                self.done.put((asked, _header(asked, self._headers, where)))
            except Exception as error:  # noqa: BLE001 - entry of the thread: whoever waits gets it
                self.done.put((asked, error))


def _header(asked: Asked, headers: Mapping[str, str], where: Where) -> tuple[Tensor, ...]:
    url = asked.url
    head, file_bytes = _beginning(url, headers, FIRST_BYTES)
    needed = header_bytes(head, file_bytes, where)
    if len(head) < needed:
        head, file_bytes = _beginning(url, headers, needed)
    tensors = parse_header(head, file_bytes, where)
    if file_bytes == needed and any(tensor.size_bytes for tensor in tensors):
        raise SpecError(  # parse_header allows it, for files that were cut on purpose
            "a file with its tensors behind its header",
            found=f"a header of {needed} bytes, and nothing behind it",
            do="take another revision: this file was cut short",
            where=where,
        )
    return tensors


def _beginning(url: str, headers: Mapping[str, str], most: int) -> tuple[bytes, int]:
    """The first `most` bytes of a file, fewer where it is shorter, and its size in bytes."""
    wanted = {**headers, "Range": f"bytes=0-{most - 1}"}
    data = bytearray()
    with http_stream_backoff(
        "GET",
        url,
        headers=wanted,
        max_retries=TRIES,
        # After a failed connection it closes the client, which other threads use too.
        retry_on_exceptions=(httpx2.TimeoutException, httpx2.RemoteProtocolError, httpx2.ReadError),
    ) as response:
        if response.status_code == httpx2.codes.RANGE_NOT_SATISFIABLE:
            return b"", 0  # an empty file has no first byte
        hf_raise_for_status(response)
        size = _size(response)
        for chunk in response.iter_raw():
            data += chunk
            if len(data) >= most:  # some answer with the whole file
                break
    if len(data) < min(most, size):
        raise RefusedAnswerError("an answer that broke off", do=AGAIN)
    return bytes(data[:most]), size


def _size(response: httpx2.Response) -> int:
    """Of the whole file."""
    told = response.headers.get("Content-Length", "")
    if response.status_code == httpx2.codes.PARTIAL_CONTENT:
        found = RANGE.fullmatch(response.headers.get("Content-Range", ""))
        told = found[1] if found else ""
    if not re.fullmatch(r"\d{1,18}", told):
        raise RefusedAnswerError("an answer that does not say how long the file is")
    return int(told)
