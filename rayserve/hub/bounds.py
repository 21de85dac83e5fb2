"""How much and how long may a hub answer?

huggingface_hub takes what a server sends, waits as long as a server says, and names files by what a
server calls them. Every request of it passes through here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Final

import httpx2
from huggingface_hub import constants, set_client_factory
from huggingface_hub.utils import logging
from huggingface_hub.utils._http import default_client_factory

from rayserve.planner.support.reading import MAX_INDEX_BYTES

STEP_S: Final = 10.0
"""Longest wait for a connection, or for the next bytes."""
BLOB_NAME: Final = re.compile(r'(W/)?"?[A-Za-z0-9_-]{1,128}"?')
"""An ETag, which huggingface_hub makes a file's name."""


class RefusedAnswerError(Exception):
    """An answer that is not taken; `found` says why."""

    def __init__(self, found: str, *, waiting: bool = False) -> None:
        self.found = found
        self.waiting = waiting
        """Whether it may be otherwise later."""
        super().__init__(found)


class Bounds:
    """Bounds for every request from `start` on, until the next `start`."""

    def __init__(self) -> None:
        self._until = 0.0
        self._seconds = 0.0
        logging.set_verbosity_error()  # it would tell of each try, with signed URLs
        # Else it asks the hub which programs start it, and tells it of them and of torch.
        constants.HF_HUB_DISABLE_TELEMETRY = True
        # Else a client of its own, which knows no bounds, fetches what a hub keeps in Xet.
        constants.HF_HUB_DISABLE_XET = True
        set_client_factory(self._client)

    def start(self, seconds: float) -> None:
        """Allow so many seconds for all that follows."""
        self._seconds, self._until = seconds, time.monotonic() + seconds

    def stop(self) -> None:
        """Allow nothing more, to other threads either."""
        self._until = 0.0

    def left_s(self) -> float:
        """Seconds that are left.

        Raises:
            RefusedAnswerError: none.
        """
        left = self._until - time.monotonic()
        if left <= 0:
            raise RefusedAnswerError(f"no end of it in {self._seconds:.0f} s", waiting=True)
        return left

    def _client(self) -> httpx2.Client:
        client: httpx2.Client = (
            default_client_factory()
        )  # proxies, certificates, and the hook of offline mode
        hooks = client.event_hooks
        client.event_hooks = {
            "request": [*hooks["request"], self._request],
            "response": [*hooks["response"], self._response],
        }
        return client

    def _request(self, request: httpx2.Request) -> None:
        wait_s = min(STEP_S, self.left_s())
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), wait_s)
        # Packed, a few bytes may be any number of them.
        request.headers["Accept-Encoding"] = "identity"

    def _response(self, response: httpx2.Response) -> None:
        status, headers = response.status_code, response.headers
        if status == httpx2.codes.TOO_MANY_REQUESTS:
            # huggingface_hub would sleep as long as it is told to, be it an hour.
            wait = re.sub(r"\D", "", headers.get("Retry-After", ""))[:6]
            told = f", wait {wait} s" if wait else ""
            raise RefusedAnswerError(f"HTTP 429: too many requests{told}", waiting=True)
        headers.pop("Retry-After", None)  # of a server that fails: tried again as soon as always
        packed = headers.get("Content-Encoding", "identity").lower()
        if response.is_success and packed != "identity":
            raise RefusedAnswerError("a packed answer, which was not asked for")
        for name in ("ETag", "X-Linked-ETag"):
            if name in headers and not BLOB_NAME.fullmatch(headers[name]):
                raise RefusedAnswerError(f"an {name} that is no plain name")
        response.stream = _Bounded(response.stream, self)


class _Bounded(httpx2.SyncByteStream):
    """The body of an answer, up to a size and a time."""

    def __init__(self, body: httpx2.SyncByteStream | httpx2.AsyncByteStream, all_: Bounds) -> None:
        assert isinstance(body, httpx2.SyncByteStream)  # the client is no asynchronous one
        self._body, self._bounds = body, all_

    def __iter__(self) -> Iterator[bytes]:
        size = 0
        for chunk in self._body:
            size += len(chunk)
            if size > MAX_INDEX_BYTES:
                raise RefusedAnswerError(f"an answer of more than {MAX_INDEX_BYTES >> 20} MiB")
            self._bounds.left_s()
            yield chunk

    def close(self) -> None:
        self._body.close()
