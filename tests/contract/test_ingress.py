"""Does HAProxy, as Serve runs it for us, tell the server that a client left?"""

from __future__ import annotations

import asyncio
import sys
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
CLIENTS = 16
NOTICED_WITHIN_S = 3


@pytest.fixture
async def haproxy(tmp_path):
    """The plan's HAProxy in front of a port, as (its port, the server's port)."""
    front, back = free_port(), free_port()
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG.format(front=front, back=back))
    command = node_environment(make_plan(tmp_path))[HAPROXY_BINARY]
    process = await asyncio.create_subprocess_exec(
        command, "-db", "-f", str(config), stdout=DEVNULL, stderr=DEVNULL
    )
    try:
        yield front, back
    finally:
        process.terminate()
        await process.wait()


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
