"""Which bad conversations need a raw connection?"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

from benchmarks.wire import Reply
from tests.bad_requests import BadRequest
from tests.served import Served

TIMEOUT_S = 20.0
HEADER_BOMB = 200_000


def _connect(served: Served) -> socket.socket:
    url = urlsplit(served.url)
    return socket.create_connection((url.hostname or "", url.port or 80), timeout=TIMEOUT_S)


def _head(served: Served, case: BadRequest, *lines: str, method: str = "POST") -> bytes:
    path = urlsplit(served.url).path + case.path_for(served.key)
    headers = [f"{k}: {v}" for k, v in case.headers_for(served.key).items()]
    text = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers, *lines, "", ""]
    return "\r\n".join(text).encode()


def _reply(connection: socket.socket) -> Reply:
    """The first answer on a connection, as far as it arrives before a pause or the end."""
    data = b""
    try:
        while b"\r\n\r\n" not in data and (chunk := connection.recv(65536)):
            data += chunk
        connection.settimeout(0.5)
        while chunk := connection.recv(65536):
            data += chunk
    except (TimeoutError, ConnectionResetError):
        pass  # what has come by now is the answer
    head, _, body = data.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
    if b"transfer-encoding: chunked" in head.lower():
        body = _dechunk(body)
    return Reply(status, body.decode(errors="replace"), {})


def _dechunk(body: bytes) -> bytes:
    out = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        count = int(size or b"0", 16)
        if count == 0:
            return out
        out, body = out + rest[:count], rest[count + 2 :]
    return out


def _talk(served: Served, *parts: bytes) -> Reply:
    with _connect(served) as connection:
        try:
            for part in parts:
                connection.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass  # answered before it was all sent
        return _reply(connection)


def _good(case: BadRequest) -> bytes:
    return json.dumps(case.good()).encode()


def _large_chunks(served: Served, case: BadRequest) -> Reply:
    chunk = b"x" * 65536
    piece = f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n"
    count = served.plan.door.max_body_bytes // len(chunk) + 2
    return _talk(served, _head(served, case, "Transfer-Encoding: chunked"), piece * count)


def _websocket(served: Served, case: BadRequest) -> Reply:
    lines = (
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    )
    return _talk(served, _head(served, case, *lines, method="GET"))


def _header_bomb(served: Served, case: BadRequest) -> Reply:
    return _talk(served, _head(served, case, f"X-Bomb: {'b' * HEADER_BOMB}", method="GET"))


def _garbage(served: Served, _: BadRequest) -> Reply:
    return _talk(served, b"\x16\x03\x01\x02\x00 this is no HTTP\r\n\r\n")


def _half_body(served: Served, case: BadRequest) -> Reply:
    body = _good(case)
    with _connect(served) as connection:
        connection.sendall(_head(served, case, f"Content-Length: {len(body)}") + body[:20])
    return Reply(0, "the client left", {})


def _leave(served: Served, case: BadRequest) -> Reply:
    body = json.dumps({**case.good(), "max_tokens": 1000, "ignore_eos": True}).encode()
    with _connect(served) as connection:
        connection.sendall(_head(served, case, f"Content-Length: {len(body)}") + body)
    return Reply(0, "the client left", {})


def _pipelined_junk(served: Served, case: BadRequest) -> Reply:
    return _talk(served, _head(served, case, method="GET") + b"\x00\xff junk \r\n\r\n")


def _two_lengths(served: Served, case: BadRequest) -> Reply:
    body = _good(case)
    lines = (f"Content-Length: {len(body)}", "Content-Length: 5")
    return _talk(served, _head(served, case, *lines) + body)


def _length_and_chunks(served: Served, case: BadRequest) -> Reply:
    smuggled = b"0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
    lines = (f"Content-Length: {len(smuggled)}", "Transfer-Encoding: chunked")
    return _talk(served, _head(served, case, *lines) + smuggled)


def _negative_length(served: Served, case: BadRequest) -> Reply:
    return _talk(served, _head(served, case, "Content-Length: -1"))


CONVERSATIONS: dict[str, Callable[[Served, BadRequest], Reply]] = {
    "large_chunks": _large_chunks,
    "websocket": _websocket,
    "header_bomb": _header_bomb,
    "garbage": _garbage,
    "half_body": _half_body,
    "leave": _leave,
    "pipelined_junk": _pipelined_junk,
    "two_lengths": _two_lengths,
    "length_and_chunks": _length_and_chunks,
    "negative_length": _negative_length,
}
