"""Does HAProxy, as Serve runs it for us, do what the plan counts on?"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from subprocess import DEVNULL, Popen

import pytest

from rayserve.haproxy import HAPROXY_BINARY
from rayserve.ingress import node_environment
from tests.ports import free_port
from tests.ray_cluster import wait_until
from tests.served import make_plan

CONFIG = """
global
    nbthread 2
    log stderr local0
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
    option abortonclose
    option splice-request
    option splice-response
    option idle-close-on-response
frontend clients
    bind 127.0.0.1:{front}
    default_backend server
backend server
    server one 127.0.0.1:{back}
"""
Server = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
CLIENTS = 16
NOTICED_WITHIN_S = 3


@contextlib.asynccontextmanager
async def running(folder: Path, text: str) -> AsyncIterator[None]:
    """The plan's HAProxy with this configuration."""
    config = folder / "haproxy.cfg"
    config.write_text(text)
    command = node_environment(make_plan(folder))[HAPROXY_BINARY]
    process = await asyncio.create_subprocess_exec(
        command, "-db", "-f", str(config), stdout=DEVNULL, stderr=DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        await process.wait()


@pytest.fixture
async def haproxy(tmp_path):
    """The plan's HAProxy in front of a port, as (its port, the server's port)."""
    front, back = free_port(), free_port()
    async with running(tmp_path, CONFIG.format(front=front, back=back)):
        yield front, back


async def connected(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to a port that will soon listen."""
    async with asyncio.timeout(10):
        while True:
            try:
                return await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)


async def test_a_client_that_leaves_is_noticed_while_the_answer_is_awaited(haproxy):
    """Also where headers and body came apart, with which HAProxy's splice() loses the client."""
    front, back = haproxy
    asked = asyncio.Semaphore(0)
    noticed: asyncio.Queue[bool] = asyncio.Queue()

    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(60)
        asked.release()
        try:
            await asyncio.wait_for(reader.read(), NOTICED_WITHIN_S)
        except (TimeoutError, ConnectionResetError) as end:
            noticed.put_nowait(isinstance(end, ConnectionResetError))
        else:
            noticed.put_nowait(True)
        finally:
            writer.close()

    async def leave() -> None:
        _, writer = await connected(front)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 60\r\n\r\n")
        await asyncio.sleep(0.005)
        writer.write(b"x" * 60)
        await asyncio.wait_for(asked.acquire(), 10)
        writer.close()

    async with await asyncio.start_server(never_answer, "127.0.0.1", back):
        for _ in range(CLIENTS):
            await leave()
        async with asyncio.timeout(NOTICED_WITHIN_S + 2):
            assert [await noticed.get() for _ in range(CLIENTS)] == [True] * CLIENTS


def answering(reply: bytes) -> tuple[Server, list[bytes]]:
    """A server's handler that answers all alike, and the bodies that it got."""
    bodies: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                bodies.append(await reader.readexactly(len(BODY)))
                writer.write(reply)
        writer.close()

    return answer, bodies


SHUT = b"HTTP/1.1 503 S\r\nRetry-After: 7\r\nContent-Length: 4\r\n\r\nshut"
OPEN = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
BODY = b"x" * 9000


async def post(port: int) -> bytes:
    """One request's whole answer."""
    reader, writer = await connected(port)
    writer.write(
        b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 9000\r\n\r\n" + BODY
    )
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    return answer


def retrying(folder: Path, front: int, *servers: int) -> str:
    """A configuration with several servers and the plan's retries."""
    retry_on = node_environment(make_plan(folder))["RAY_SERVE_HAPROXY_RETRY_ON"]
    retry = f"    option redispatch 1\n    retry-on {retry_on}\nfrontend clients"
    text = CONFIG.format(front=front, back=servers[0]).replace("frontend clients", retry)
    return text + "".join(f"    server s{port} 127.0.0.1:{port}\n" for port in servers[1:])


async def test_another_replica_takes_what_a_shut_door_refused(tmp_path):
    """A POST that one replica answers with 503 goes on to the other, whole."""
    front, back, other = free_port(), free_port(), free_port()
    shut, refused = answering(SHUT)
    willing, taken = answering(OPEN)
    async with (
        running(tmp_path, retrying(tmp_path, front, back, other)),
        await asyncio.start_server(shut, "127.0.0.1", back),
        await asyncio.start_server(willing, "127.0.0.1", other),
    ):
        answers = [await post(front) for _ in range(8)]
    assert [answer.split()[1] for answer in answers] == [b"200"] * 8
    assert taken == [BODY] * 8
    assert len(refused) >= 4


async def test_with_no_other_replica_the_refusal_is_told(tmp_path):
    """The 503 of the only replica reaches the client with its Retry-After, after few tries."""
    front, back = free_port(), free_port()
    shut, refused = answering(SHUT)
    async with (
        running(tmp_path, retrying(tmp_path, front, back)),
        await asyncio.start_server(shut, "127.0.0.1", back),
    ):
        answer = await post(front)
    assert b"retry-after: 7" in answer.lower()
    assert answer.endswith(b"shut")
    assert len(refused) <= 4


def test_serve_hands_haproxy_the_plans_retries():
    """Serve's template asks for another server at a retry, and takes what to retry from the plan."""
    from ray.serve._private import haproxy_templates

    template = Path(haproxy_templates.__file__).read_text()
    assert "    option redispatch 1\n    retry-on {{ config.retry_on }}\n" in template


def test_serve_still_asks_for_splice():
    """When its template no longer does, the plan needs no HAProxy command of its own."""
    from ray.serve._private import haproxy_templates

    assert "option splice-request" in Path(haproxy_templates.__file__).read_text()


def test_the_plans_haproxy_lies_beside_this_python(tmp_path):
    """Serve takes an absolute path only."""
    path = Path(node_environment(make_plan(tmp_path))[HAPROXY_BINARY])
    assert path == Path(sys.executable).parent / "rayserve-haproxy"


def test_nobody_else_reaches_haproxys_admin_socket(tmp_path):
    """The folder of configuration and socket is closed before HAProxy makes the socket in it."""
    folder = tmp_path / "h"
    folder.mkdir(mode=0o755)
    config = folder / "haproxy.cfg"
    socket = folder / "admin.sock"
    opened = f"global\n    stats socket {socket} mode 666 level admin\n"
    listening = CONFIG.replace("global\n", opened, 1)
    config.write_text(listening.format(front=free_port(), back=free_port()))
    command = node_environment(make_plan(tmp_path))[HAPROXY_BINARY]
    process = Popen([command, "-db", "-f", str(config)], stdout=DEVNULL, stderr=DEVNULL)
    try:
        wait_until(socket.exists, 10, "HAProxy's admin socket")
        assert folder.stat().st_mode & 0o777 == 0o700
    finally:
        process.terminate()
        process.wait()
