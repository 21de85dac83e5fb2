"""What a refusal says: status, OpenAI or Anthropic error body, headers.

The OpenAI body has the four fields of the engine's own ErrorResponse, whose `code` repeats the HTTP
status, so a client sees one shape whether the door or the engine answers.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

from rayserve.serving.routes import Shape

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_TYPES: Final[dict[Shape, dict[int, str]]] = {
    "openai": {
        401: "authentication_error",
        404: "not_found_error",
        429: "rate_limit_error",
        503: "service_unavailable_error",
    },
    "anthropic": {
        401: "authentication_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
    },
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that the door answers itself."""

    status: int
    reason: str
    """One word for the counters, such as `key` or `queue`."""
    message: str
    param: str | None = None
    """The body field at fault."""
    retry_after_s: int = 0
    """0: no Retry-After header."""
    close: bool = False
    """Ask the server to close the connection after the answer."""
    headers: tuple[tuple[bytes, bytes], ...] = ()


def error_body(refusal: Refusal, shape: Shape) -> bytes:
    """The JSON body of a refusal in the dialect of the path."""
    kind = _TYPES[shape].get(refusal.status, "invalid_request_error")
    if shape == "anthropic":
        content: dict[str, Any] = {
            "type": "error",
            "error": {"type": kind, "message": refusal.message},
        }
    else:
        content = {
            "error": {
                "message": refusal.message,
                "type": kind,
                "param": refusal.param,
                "code": refusal.status,
            }
        }
    return json.dumps(content, ensure_ascii=False).encode()


def error_headers(refusal: Refusal) -> Headers:
    """Headers of a refusal besides Content-Type and Content-Length."""
    headers = list(refusal.headers)
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if refusal.retry_after_s:
        headers.append((b"retry-after", str(refusal.retry_after_s).encode()))
    if refusal.close:
        headers.append((b"connection", b"close"))
    return headers


async def send_json(send: Send, status: int, body: bytes, headers: Headers) -> None:
    """Send one complete JSON response."""
    fixed = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": fixed + headers})
    await send({"type": "http.response.body", "body": body})


async def send_refusal(send: Send, refusal: Refusal, shape: Shape) -> None:
    """Answer a request with a refusal."""
    await send_json(send, refusal.status, error_body(refusal, shape), error_headers(refusal))
