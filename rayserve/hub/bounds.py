"""How much and how long may a hub answer?

huggingface_hub takes what a server sends, waits as long as a server says, and names files by what a
server calls them. Every request of it passes through here.
"""

from __future__ import annotations

import datetime
import email.utils
import re
import time
from collections.abc import Iterator
from typing import Final

import httpx2
from huggingface_hub import constants, set_client_factory
from huggingface_hub.utils import logging
from huggingface_hub.utils._http import default_client_factory

from rayserve.hub.wire import bind
from rayserve.planner.support.reading import MAX_INDEX_BYTES

AGAIN: Final = "try again"
CHECK: Final = "check HF_ENDPOINT and proxies"
STEP_S: Final = 10.0
"""Longest wait for a connection, or for the next bytes."""
BLOB_NAME: Final = re.compile(r'(W/)?"?[A-Za-z0-9_-]{1,128}"?')
"""An ETag, which huggingface_hub makes a file's name."""


class RefusedAnswerError(Exception):
    """An answer that is not taken, or a question that is not sent: why, and what to do."""

    def __init__(self, found: str, *, do: str = CHECK) -> None:
        self.found, self.do = found, do
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
            raise RefusedAnswerError(f"no end of it in {self._seconds:.0f} s", do=AGAIN)
        return left

    def step_s(self) -> float:
        """Seconds for one wait.

        Raises:
            RefusedAnswerError: none are left.
        """
        return min(STEP_S, self.left_s())

    def _client(self) -> httpx2.Client:
        client = _default_client()
        bind(client, self)
        hooks = client.event_hooks
        client.event_hooks = {
            "request": [*hooks["request"], self._request],
            "response": [*hooks["response"], self._response],
        }
        return client

    def _request(self, request: httpx2.Request) -> None:
        wait_s = self.step_s()
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), wait_s)
        # Packed, a few bytes may be any number of them.
        request.headers["Accept-Encoding"] = "identity"

    def _response(self, response: httpx2.Response) -> None:
        status, headers = response.status_code, response.headers
        if status == httpx2.codes.TOO_MANY_REQUESTS:
            # huggingface_hub would sleep as long as it is told to, be it an hour.
            wait = _retry_after_s(headers.get("Retry-After", ""))
            told = "" if wait is None else f", wait {wait} s"
            raise RefusedAnswerError(f"HTTP 429: too many requests{told}", do=AGAIN)
        headers.pop("Retry-After", None)  # of a server that fails: tried again as soon as always
        asked_part = "Range" in response.request.headers
        if status == httpx2.codes.PARTIAL_CONTENT and not asked_part:
            raise RefusedAnswerError("a part of the file, where all of it was asked for")
        packed = headers.get("Content-Encoding", "identity").lower()
        if response.is_success and packed != "identity":
            raise RefusedAnswerError("a packed answer, which was not asked for")
        for name in ("ETag", "X-Linked-ETag"):
            if name in headers and not BLOB_NAME.fullmatch(headers[name]):
                raise RefusedAnswerError(f"an {name} that is no plain name")
        response.stream = _Bounded(response.stream, self)


def _default_client() -> httpx2.Client:
    """With proxies, certificates, and the hook of offline mode, as the environment says."""
    try:
        client: httpx2.Client = default_client_factory()
    except ImportError:
        raise RefusedAnswerError(
            "a SOCKS proxy, and no package for it",
            do="`pip install socksio`, or unset ALL_PROXY, HTTPS_PROXY and HTTP_PROXY",
        ) from None
    except OSError:  # ssl.SSLError too
        raise RefusedAnswerError(
            "certificates that cannot be read", do="correct SSL_CERT_FILE and SSL_CERT_DIR"
        ) from None
    except (ValueError, httpx2.InvalidURL):
        raise RefusedAnswerError(
            "a proxy that is no URL", do="correct ALL_PROXY, HTTPS_PROXY, HTTP_PROXY and NO_PROXY"
        ) from None
    return client


def _retry_after_s(told: str) -> int | None:
    """Seconds of a Retry-After (RFC 9110, 10.2.3: a number of them, or a date); None: it is neither."""
    if re.fullmatch(r"[0-9]{1,9}", told):
        return int(told)
    try:
        date = email.utils.parsedate_to_datetime(told)
        left = date.astimezone(datetime.UTC) - datetime.datetime.now(datetime.UTC)
    except (ValueError, OverflowError):
        return None
    return max(0, int(left.total_seconds()))


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
