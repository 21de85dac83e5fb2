"""When does a byte come too late? Every connection of the client asks that of the bounds.

Hooks of the client know of requests, answers and parts of a body. A server that never ends the head of
its answer, or sends a hundred times `100 Continue`, is met only where bytes are read.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import httpcore2
import httpx2

LAST: Final = "no address of it answers"
T = TypeVar("T")
Options = Iterable[Any]
"""Arguments of `socket.setsockopt`, handed on as they are."""


class Clock(Protocol):
    """How long may a step take?"""

    def step_s(self) -> float:
        """Seconds for the next wait; raises where none are left."""


def bind(client: httpx2.Client, clock: Clock) -> None:
    """Make every connection of a client ask the clock, those by a proxy too."""
    for transport in (client._transport, *client._mounts.values()):  # noqa: SLF001 - no public way
        if transport is None:  # NO_PROXY: the client's own
            continue
        assert isinstance(transport, httpx2.HTTPTransport)
        pool = transport._pool  # noqa: SLF001 - see above
        # Where it has moved, this raises: bounds that bind nothing would not be seen.
        pool._network_backend = _Network(pool._network_backend, clock)  # noqa: SLF001


def _in_time(wait: Callable[[float], T], timeout: float | None, clock: Clock) -> T:
    left = clock.step_s()
    try:
        return wait(left if timeout is None else min(timeout, left))
    except httpcore2.TimeoutException:
        clock.step_s()  # of the whole, it says so
        raise


class _Network(httpcore2.NetworkBackend):
    """Connections in bounds."""

    def __init__(self, network: httpcore2.NetworkBackend, clock: Clock) -> None:
        self._network, self._clock = network, clock

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Options | None = None,
    ) -> httpcore2.NetworkStream:
        """Try the addresses of a name one by one, for a step each, as long as there is time."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise httpcore2.ConnectError(str(error)) from error
        failed: Exception = httpcore2.ConnectError(LAST)
        for *_kind, address in found:
            connect = partial(self._network.connect_tcp, str(address[0]), port)
            try:
                stream = _in_time(
                    partial(connect, local_address=local_address, socket_options=socket_options),
                    timeout,
                    self._clock,
                )
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failed = error
            else:
                return _Stream(stream, self._clock)
        raise failed

    def sleep(self, seconds: float) -> None:
        self._network.sleep(min(seconds, self._clock.step_s()))


class _Stream(httpcore2.NetworkStream):
    """A connection in bounds."""

    def __init__(self, stream: httpcore2.NetworkStream, clock: Clock) -> None:
        self._stream, self._clock = stream, clock

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return _in_time(lambda left: self._stream.read(max_bytes, left), timeout, self._clock)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        _in_time(lambda left: self._stream.write(buffer, left), timeout, self._clock)

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore2.NetworkStream:
        stream = _in_time(
            lambda left: self._stream.start_tls(ssl_context, server_hostname, left),
            timeout,
            self._clock,
        )
        return _Stream(stream, self._clock)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
