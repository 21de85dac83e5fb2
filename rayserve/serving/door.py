"""Who may pass to the engine's HTTP app: a pure ASGI middleware, closed by default.

    path and method in the table?   no: 404 / 405      routes.py
    key known?                      no: 401            keys.py
    ready and admitting?            no: 503            here
    room in queue, key's share?     no: 429            here
    body small, JSON, in limits?    no: 413 / 415 / 400   limits.py
    did it kill the engine before?  yes: 400 / 503   suspects.py
    → the app, with the client's `receive` (so a disconnect aborts the generation) and the server's
      own `send` (so a token passes without any work of the door)

The slot is taken before the body is read, so that waiting uploads cannot pile up in memory, grows
to the number of sequences that the body asks for, and is released on every way out.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from rayserve.plan import DoorPlan
from rayserve.serving import body
from rayserve.serving.keys import Account, Clock, KeyRing
from rayserve.serving.limits import read_body
from rayserve.serving.replies import (
    App,
    Headers,
    Receive,
    Refusal,
    Scope,
    Send,
    send_json,
    send_refusal,
)
from rayserve.serving.routes import READY_PATH, Route, find, locate, shape_of
from rayserve.serving.suspects import Suspects

logger = logging.getLogger("ray.serve")

current_account: ContextVar[Account | None] = ContextVar("current_account", default=None)
"""The account of the request being served; the engine wrapper charges its tokens to it."""

HANG_UP_S: Final = 1.0
"""Time for the app to end by itself after a disconnect."""

UNHEALTHY: Final = ("unhealthy", "the engine of this replica does not work")
"""Reason and message of a door that is shut for good."""

# Read by the engine's app: the first two carry the key, the others choose rank and order.
_PRIVATE_HEADERS: Final = frozenset(
    (b"authorization", b"x-api-key", b"x-vllm-priority", b"x-data-parallel-rank")
)


@dataclass(frozen=True, slots=True)
class DoorStats:
    """What the door counted since the replica started."""

    in_flight: int
    """Sequences of requests now inside."""
    waiting: int
    """Of these, how many are beyond what the engine runs at once."""
    admitted: int
    """Requests that reached the engine's app through a counted route."""
    rejected: dict[str, int]
    """Requests refused, by reason."""
    uptime_s: float


class Door:
    """ASGI middleware in front of the engine's app; without a plan it knows no key and lets nobody in.

    `is_dead`: vLLM's own word on its engine; what it says is acted on when it is asked, as by `Vitals.notice_death`.
    `every_tool`: the engine builds each tool of a body, as `schemas.constrains_every_tool` tells.

    Raises:
        HostError: the plan's key file cannot be used.
    """

    def __init__(
        self,
        app: App,
        plan: DoorPlan | None,
        *,
        clock: Clock = time.monotonic,
        is_draining: Callable[[], bool] = lambda: False,
        is_dead: Callable[[], bool] = lambda: False,
        path_prefix: str = "",
        every_tool: bool = False,
        suspects: Suspects | None = None,
    ) -> None:
        self._app = app
        self.suspects = suspects if suspects is not None else Suspects()
        self._clock = clock
        self._is_draining = is_draining
        self._is_dead = is_dead
        self._prefix = path_prefix.rstrip("/")
        self._every_tool = every_tool
        self._started_at = clock()
        self._closed_for = ("starting", "the model is not ready yet")
        self._in_flight = 0
        self._pending = 0
        self._admitted = 0
        self._rejected: Counter[str] = Counter()
        self._nobody = Account("anonymous", clock)
        self._plan = DoorPlan.closed()
        self._keys: KeyRing | None = None
        self._configured = False
        self._limits = ""
        if plan is not None:
            self.update(plan)

    def update(self, plan: DoorPlan, limits: str = "") -> None:
        """Use another plan from now on; what is in flight stays counted. `limits`: what /ready calls it.

        Raises:
            HostError: the new key file cannot be used; nothing has changed then.
        """
        if plan.api_key_file != self._plan.api_key_file:
            self._keys = KeyRing(plan.api_key_file, self._clock) if plan.api_key_file else None
            if self._keys is None:
                logger.warning("the door asks for no API key from now on")
        self._plan = plan
        self._limits = limits
        self._configured = True

    def open(self) -> None:
        """Let requests in: the engine is warm. Until then /ready and inference answer 503."""
        self._closed_for = ("", "")

    def close(self, reason: str, message: str) -> None:
        """Let no more in; what is inside goes on."""
        self._closed_for = (reason, message)

    @property
    def in_flight(self) -> int:
        """Sequences inside: running, waiting in the engine, or with a body still arriving."""
        return self._in_flight

    @property
    def pending(self) -> int:
        """Sequences that the engine's app works on: those inside whose body has arrived."""
        return self._pending

    @property
    def waiting(self) -> int:
        """Sequences beyond what the engine runs at once."""
        return max(0, self._in_flight - self._plan.max_in_flight)

    def stats(self) -> DoorStats:
        """A snapshot of the counters."""
        return DoorStats(
            in_flight=self._in_flight,
            waiting=self.waiting,
            admitted=self._admitted,
            rejected=dict(self._rejected),
            uptime_s=self._clock() - self._started_at,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        kind = scope["type"]
        if kind == "http":
            await self._serve(scope, receive, send)
        elif kind == "websocket":
            # Closing before accepting makes the server answer the handshake with 403.
            self._rejected["websocket"] += 1
            await send({"type": "websocket.close", "code": 1008, "reason": "not served here"})
        else:
            await self._app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        mount, path = locate(scope, self._prefix) or ("", "")
        route = _route(path, scope["method"])
        if isinstance(route, Refusal):
            await self._refuse(send, route, path or scope["path"])
            return
        account, headers = self._identify(scope["headers"])
        inner = {**scope, "path": mount + path, "root_path": mount, "headers": headers}
        if route.access == "open":
            if path == READY_PATH:
                await self._answer_ready(send)
            else:
                await self._app(inner, receive, send)
            return
        refusal = _NO_KEY if account is None else self._closed(route)
        if account is None or refusal is not None:
            if refusal is not None and refusal.close:
                await body.discard(receive, self._plan.max_body_bytes)
            await self._refuse(send, refusal or _NO_KEY, path)
        elif route.json_body:
            await self._serve_counted(inner, receive, send, route, account, path)
        else:
            await self._app(inner, receive, send)

    async def _serve_counted(
        self, scope: Scope, receive: Receive, send: Send, route: Route, account: Account, path: str
    ) -> None:
        refusal = self._check_room(account, 1)
        if refusal is not None:
            await self._refuse(send, refusal, path)
            return
        held = 1
        self._hold(account, held)
        try:
            raw = await body.read(scope["headers"], receive, self._plan.max_body_bytes)
            if isinstance(raw, Refusal):
                await self._refuse(send, raw, path)
                return
            wanted = read_body(raw, route, self._plan, every_tool=self._every_tool)
            if not isinstance(wanted, Refusal) and wanted > held:
                wanted = self._check_room(account, wanted - held) or wanted
            fingerprint = ""
            if self._is_dead() or self._closed_for[0]:
                wanted = self._unavailable(*UNHEALTHY)  # while its body arrived
            if not isinstance(wanted, Refusal):
                fingerprint = self.suspects.fingerprint(path, raw)
                wanted = self.suspects.refusal(fingerprint, self._plan.retry_after_s) or wanted
            if isinstance(wanted, Refusal):
                await self._refuse(send, wanted, path)
                return
            self._hold(account, wanted - held)
            held = wanted
            self._admitted += 1
            self._pending += held
            token = current_account.set(account)
            replay = body.Replay(raw, receive)
            stayed = False
            self.suspects.enter(fingerprint)
            try:
                await self._run(scope, replay, send)
                stayed = not replay.hung_up
            finally:
                dead = True
                try:
                    # Asked while it still counts as inside: at a death that is what ran.
                    dead = self._is_dead()
                finally:
                    self.suspects.leave(fingerprint, well=stayed and not dead)
                    self._pending -= held
                    current_account.reset(token)
        finally:
            self._hold(account, -held)

    async def _run(self, scope: Scope, replay: body.Replay, send: Send) -> None:
        """Run the app. A cancellation reaches it as what it is: the client's disconnect.

        Serve cancels this task when the client leaves. vLLM generates in a task of its own, which it
        ends at a disconnect but leaves running when its handler is cancelled.
        """
        task = asyncio.ensure_future(self._app(scope, replay, send))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                replay.hang_up()
                await asyncio.wait({task}, timeout=HANG_UP_S)
            if not task.cancel() and not task.cancelled():
                task.exception()  # nobody is left to hear it, and asyncio would complain
            raise

    def _hold(self, account: Account, sequences: int) -> None:
        self._in_flight += sequences
        account.in_flight += sequences

    def _identify(self, headers: Headers) -> tuple[Account | None, Headers]:
        """The account that the key headers name, and the headers without them."""
        keys = self._keys
        account = self._nobody if keys is None and self._configured else None
        kept: Headers = []
        for header in headers:
            name = header[0].lower()
            if name not in _PRIVATE_HEADERS:
                kept.append(header)
            elif keys is not None and account is None:
                presented = _presented_key(name, header[1])
                account = keys.account(presented) if presented else None
        return account, kept

    def _closed(self, route: Route) -> Refusal | None:
        """The 503 of a replica that is starting, draining or given up."""
        reason, message = self._closed_for
        if route.gated and reason:
            return self._unavailable(reason, message)
        if route.gated and self._is_dead():
            return self._unavailable(*UNHEALTHY)
        if route.gated and (not self._plan.admit or self._is_draining()):
            return self._unavailable("draining", "this replica is going away")
        return None

    def _unavailable(self, reason: str, message: str) -> Refusal:
        return Refusal(
            503,
            reason,
            message,
            retry_after_s=self._plan.retry_after_s,
            close=reason != "starting",
        )

    def _check_room(self, account: Account, more: int) -> Refusal | None:
        plan = self._plan
        wait_s = plan.retry_after_s
        if self._in_flight + more > plan.max_in_flight + plan.max_queued:
            return Refusal(429, "queue", "the queue is full", retry_after_s=wait_s)
        limit = plan.key_max_in_flight
        if limit and account.in_flight + more > limit:
            message = f"this key may run {limit} sequences at once"
            return Refusal(429, "key_in_flight", message, retry_after_s=wait_s)
        budget = plan.key_tokens_per_minute
        if budget and (budget_wait_s := account.wait_s(budget)):
            message = f"this key has used its {budget} tokens a minute"
            return Refusal(429, "key_tokens", message, retry_after_s=budget_wait_s)
        return None

    async def _answer_ready(self, send: Send) -> None:
        refusal = self._closed(_READY_ROUTE)
        if refusal is None:
            said = {"status": "ready", "limits": self._limits}
            await send_json(send, 200, json.dumps(said).encode(), [])
        else:
            # A probe is not a rejected request: it is left out of the counters.
            await send_refusal(send, refusal, "openai")

    async def _refuse(self, send: Send, refusal: Refusal, path: str) -> None:
        self._rejected[refusal.reason] += 1
        if refusal is not body.GONE:
            await send_refusal(send, refusal, shape_of(path))


_NO_KEY: Final = Refusal(
    401, "key", "a valid API key is needed: `Authorization: Bearer` or `x-api-key`"
)
_READY_ROUTE: Final = Route()


def _route(path: str, method: str) -> Route | Refusal:
    methods = find(path)
    if methods is None:
        return Refusal(404, "path", "there is nothing at this path")
    route = methods.get(method)
    if route is None:
        allow = ((b"allow", ", ".join(methods).encode()),)
        return Refusal(405, "method", "this path has no such method", headers=allow)
    return route


def _presented_key(name: bytes, value: bytes) -> bytes:
    """The key in a header, or nothing."""
    if name == b"x-api-key":
        return value.strip()
    scheme, _, key = value.strip().partition(b" ")
    return key.strip() if name == b"authorization" and scheme.lower() == b"bearer" else b""
