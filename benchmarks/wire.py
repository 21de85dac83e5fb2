"""How is a request sent exactly as written, and what came back?"""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 60.0

Body = bytes | dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server answered; status 0: it closed the connection without an answer."""

    status: int
    text: str
    headers: Mapping[str, str]

    def json(self) -> dict[str, Any]:
        """The body as an object; empty where it is none."""
        try:
            content = json.loads(self.text)
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}

    def error(self, shape: str) -> str | None:
        """The message of an error body in a dialect, or None where it has another shape."""
        content = self.json()
        error = content.get("error")
        if not isinstance(error, dict) or not isinstance(error.get("message"), str):
            return None
        if shape == "anthropic":
            right = content.get("type") == "error" and isinstance(error.get("type"), str)
        else:
            right = {"message", "type", "param", "code"} <= error.keys()
            right = right and error["code"] == self.status
        return error["message"] if right else None

    def line(self) -> str:
        """Status and message in one line."""
        error = self.json().get("error")
        message = error.get("message") if isinstance(error, dict) else None
        text = message if isinstance(message, str) else self.text
        return f"{self.status} {' '.join(text.split())[:160]}"


def ask(base: str, method: str, path: str, body: Body, headers: Mapping[str, str]) -> Reply:
    """Send one request; a header with an empty value is left out.

    Raises:
        OSError: the server is not there, or closed the connection without an answer.
    """
    url = urlsplit(base)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=TIMEOUT_S)
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    sent = {name: value for name, value in headers.items() if value}
    try:
        # A refusal may come before the body was sent to its end: the answer is there to be read.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.request(method, url.path + path, data, sent)
        reply = connection.getresponse()
        text = reply.read().decode(errors="replace")
        return Reply(reply.status, text, {k.lower(): v for k, v in reply.getheaders()})
    except http.client.HTTPException as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()
