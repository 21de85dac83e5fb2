"""How does a request's body come in: whole, bounded, in time, and with the disconnect after it?"""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from typing import Final

from rayserve.serving.replies import Headers, Message, Receive, Refusal

BODY_TIMEOUT_S: Final = 60.0
"""Longest time a body may take to arrive; a slot is held meanwhile."""

DISCARD_TIMEOUT_S: Final = 5.0
"""Longest time that a body is read for nothing before a draining replica's 503."""

MAX_ID_CHARACTERS: Final = 128
"""Longest name that a client may give its request: it reaches the logs."""
_ID: Final = re.compile(rb"[\x21-\x7e]{1,%d}" % MAX_ID_CHARACTERS)

GONE: Final = Refusal(499, "disconnect", "the client went away before its body was complete")


async def read(headers: Headers, receive: Receive, limit_bytes: int) -> bytes | Refusal:
    """The whole body, or why it is refused."""
    refusal = _check_headers(headers, limit_bytes)
    if refusal is not None:
        return refusal
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await collect(receive, limit_bytes)
    except TimeoutError:
        message = f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s"
        return Refusal(408, "body_timeout", message, close=True)


async def collect(receive: Receive, limit: int) -> bytes | Refusal:
    """All chunks of the body, as long as they stay within `limit` bytes."""
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return GONE
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            return _too_large(limit)
        if chunk:
            chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def discard(receive: Receive, limit: int) -> None:
    """Read a body to its end: to close a connection with unread bytes would reset it, and the
    client would never see why. Without closing, the server discards them itself.
    """
    size = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_TIMEOUT_S):
            while size <= limit:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
                size += len(message.get("body", b""))


class Replay:
    """A `receive` that gives the buffered body once, then whatever the client sends: a disconnect.

    That the client's own `receive` comes after it is what lets the engine abort a generation.
    """

    __slots__ = ("_body", "_pending", "_receive", "hung_up")

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive
        self._pending: asyncio.Future[Message] | None = None
        self.hung_up = False
        """Whether the app was told that the client is gone."""

    async def __call__(self) -> Message:
        """The next message: the body, then what the client sends."""
        body = self._body
        if body is not None:
            self._body = None
            return {"type": "http.request", "body": body, "more_body": False}
        if self._gone():
            return {"type": "http.disconnect"}
        self._pending = asyncio.ensure_future(self._receive())
        try:
            message = await self._pending
        except asyncio.CancelledError:
            if self._gone():
                return {"type": "http.disconnect"}
            raise
        self.hung_up = message["type"] == "http.disconnect"
        return message

    def _gone(self) -> bool:
        return self.hung_up

    def hang_up(self) -> None:
        """Tell the app, now or when it next asks, that the client is gone."""
        self.hung_up = True
        if self._pending is not None:
            self._pending.cancel()


def _check_headers(headers: Headers, limit: int) -> Refusal | None:
    media_type = b""
    length = b""
    for name, value in headers:
        lowered = name.lower()
        if lowered == b"content-type":
            media_type = value.partition(b";")[0].strip().lower()
        elif lowered == b"content-length":
            length = value.strip()
        elif lowered == b"x-request-disconnect-disabled" and value.strip() != b"?0":
            # Ray Serve would obey it and let the engine generate for nobody.
            message = "a request cannot outlive its client: drop X-Request-Disconnect-Disabled"
            return Refusal(400, "request", message)
        elif lowered == b"x-request-id" and not _ID.fullmatch(value):
            message = f"X-Request-Id must be 1 to {MAX_ID_CHARACTERS} visible ASCII characters"
            return Refusal(400, "request", message)
    if media_type != b"application/json":
        return Refusal(415, "media_type", "the body must be application/json")
    # More digits than any limit has are too many, and need no conversion.
    if length.isdigit() and (len(length) > 18 or int(length) > limit):
        return _too_large(limit)
    return None


def _too_large(limit: int) -> Refusal:
    return Refusal(413, "body", f"the body must be at most {limit} bytes")
