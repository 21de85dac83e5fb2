"""How do the door's tests talk to it without a server, a socket or a real clock?"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

from rayserve.plan import DoorPlan
from rayserve.serving.door import Door, current_account

KEY = "key-of-the-first-client"
OTHER_KEY = "key-of-the-second-client"
JSON = (b"content-type", b"application/json")
CHAT = "/v1/chat/completions"


def bearer(key=KEY):
    """The header that carries a key."""
    return (b"authorization", f"Bearer {key}".encode())


def plan(**changes):
    """A door plan with small limits and no key file, except for `changes`."""
    fields = {
        "max_in_flight": 4,
        "max_queued": 2,
        "max_body_bytes": 4096,
        "max_tokens": 100,
        "max_n": 4,
        "key_max_in_flight": 0,
        "key_tokens_per_minute": 0,
        "retry_after_s": 7,
    }
    return DoorPlan(**(fields | changes))


class Clock:
    """A clock that moves only when told."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class App:
    """An app that records what passed the door, and answers when `gate` is open."""

    def __init__(self):
        self.scopes = []
        self.bodies = []
        self.accounts = []
        self.aborted = 0
        self.raises = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, scope, receive, send):
        """Answer 200 with two chunks; a POST waits for the gate, or stops at a disconnect."""
        self.scopes.append(scope)
        self.accounts.append(current_account.get())
        if scope["type"] != "http":
            return
        message = await receive()
        self.bodies.append(message.get("body", b""))
        if self.raises is not None:
            raise self.raises
        held = scope["method"] == "POST" and not self.gate.is_set()
        if held and await self._disconnected(receive):
            self.aborted += 1
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"he", "more_body": True})
        await send({"type": "http.response.body", "body": b"llo"})

    async def _disconnected(self, receive):
        opened = asyncio.ensure_future(self.gate.wait())
        gone = asyncio.ensure_future(receive())
        try:
            done, _ = await asyncio.wait({opened, gone}, return_when=asyncio.FIRST_COMPLETED)
            return gone in done and gone.result()["type"] == "http.disconnect"
        finally:
            opened.cancel()
            gone.cancel()


@dataclass
class Answer:
    """What came out of the door."""

    messages: list = field(default_factory=list)

    @property
    def status(self):
        """The HTTP status, or None where no response was started."""
        return self.messages[0]["status"] if self.messages else None

    @property
    def headers(self):
        """The response headers."""
        return dict(self.messages[0]["headers"])

    @property
    def body(self):
        """The whole response body."""
        return b"".join(message["body"] for message in self.messages[1:])

    @property
    def error(self):
        """The `error` object of a refusal."""
        return json.loads(self.body)["error"]


class Client:
    """One client connection; `hang_up()` is what a closed socket looks like to the door."""

    def __init__(self, door):
        self.door = door
        self.incoming = asyncio.Queue()

    def hang_up(self):
        """Close the connection."""
        self.incoming.put_nowait({"type": "http.disconnect"})

    async def request(self, method, path, *, headers=(), body=b"", chunks=None, root_path=""):
        """Send one request and collect the answer."""
        chunks = [body] if chunks is None else chunks
        for number, chunk in enumerate(chunks, start=1):
            more = number < len(chunks)
            self.incoming.put_nowait({"type": "http.request", "body": chunk, "more_body": more})
        answer = Answer()

        async def send(message):
            answer.messages.append(message)

        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "root_path": root_path,
            "query_string": b"",
            "headers": list(headers),
        }
        await self.door(scope, self.incoming.get, send)
        return answer

    async def post(self, path=CHAT, body=None, *, headers=(JSON,), **more):
        """POST a JSON value, or bytes as they are."""
        raw = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        return await self.request("POST", path, headers=headers, body=raw, **more)


def key_file(folder, *keys, mode=0o600):
    """A file of API keys, and its path as the plan has it."""
    path = folder / "keys"
    path.write_text("".join(f"{key}\n" for key in keys))
    path.chmod(mode)
    return str(path)


def ready_door(app, **changes):
    """A door that admits requests, with a clock that stands still."""
    clock = changes.pop("clock", None) or Clock()
    options = {
        name: changes.pop(name) for name in ("is_draining", "path_prefix") if name in changes
    }
    door = Door(app, plan(**changes), clock=clock, **options)
    door.open()
    return door
