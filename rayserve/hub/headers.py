"""Which tensors do the weights on a hub hold? The first bytes of each file say it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Final

import httpx2
from huggingface_hub.utils import hf_raise_for_status, http_stream_backoff

from rayserve.errors import Where
from rayserve.files import Tally
from rayserve.hub.bounds import Bounds, RefusedAnswerError
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
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        asked_of = {
            pool.submit(_header, asked, headers, Where(f"{place}/{asked.file}")): asked
            for asked in files
        }
        for done in as_completed(asked_of):
            asked = asked_of[done]
            try:
                found[asked.file] = done.result()
            except FAILURES as error:
                raise UnreadError(asked, error) from None
            tally.add(found[asked.file])
    finally:  # on Ctrl-C too, the others end with their next bytes
        bounds.stop()
        pool.shutdown(cancel_futures=True)
    return {asked.file: found[asked.file] for asked in files}


def _header(asked: Asked, headers: Mapping[str, str], where: Where) -> tuple[Tensor, ...]:
    url = asked.url
    head, file_bytes = _beginning(url, headers, FIRST_BYTES)
    needed = header_bytes(head, file_bytes, where)
    if len(head) < needed:
        head, file_bytes = _beginning(url, headers, needed)
    return parse_header(head, file_bytes, where)


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
        raise RefusedAnswerError("an answer that broke off", waiting=True)
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
