"""What do Ray's dashboard and a replica answer, whole, refusing or broken, and what is told of it?"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from socket import create_server

import pytest

from rayserve.clients import ServeApi, answers, read_token
from rayserve.errors import HostError
from tests.ray_cluster import free_port

EMPTY = b'{"applications": {}, "proxies": {}}'


@contextmanager
def answering(*replies: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """A server on loopback that sends these bytes, one a connection: its port, and what it was sent."""
    received: list[bytes] = []

    def serve() -> None:
        for reply in replies:
            connection, _ = server.accept()
            with connection:
                received.append(request(connection))
                connection.sendall(reply)

    with create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1], received
        thread.join(10)


def request(connection) -> bytes:
    """The whole of one request."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, body = data.split(b"\r\n\r\n", 1)
    lengths = [
        line.split(b":")[1] for line in head.lower().split(b"\r\n") if b"content-length" in line
    ]
    while len(body) < sum(map(int, lengths)):
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


def http(status: str, body: bytes, length: int | None = None) -> bytes:
    """The bytes of an answer; `length` may promise more than there is."""
    size = len(body) if length is None else length
    head = f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


BROKEN = {
    "another protocol": (b"SSH-2.0-OpenSSH_9.2\r\n", "BadStatusLine"),
    "cut short": (http("200 OK", EMPTY, 500), "IncompleteRead"),
    "nothing": (b"", "RemoteDisconnected"),
    "an endless line": (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000 + b"\r\n\r\n", "LineTooLong"),
    "an error": (http("503 Unavailable", b"the GCS may be down"), "the GCS may be down"),
    "an error cut short": (http("500 Oops", b"half", 500), "IncompleteRead"),
    "a way to nowhere": (
        http("302 Found", b"").replace(b"\r\nC", b"\r\nLocation: http://[\r\nC", 1),
        "Invalid IPv6",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_answer_is_told_and_is_not_up(case):
    """Whatever listens there, a person reads what it said, and who waits goes on waiting."""
    reply, told = BROKEN[case]
    with answering(reply, reply, reply) as (port, _):
        api = ServeApi(port, "t")
        with pytest.raises(OSError, match=told):
            api.status("a")
        assert not api.is_up()
        assert not answers(api.url)


@pytest.mark.parametrize("body", [b"<html>hello</html>", b"[]", b'{"applications": []}', b"\xff"])
def test_another_program_is_no_dashboard(body):
    """A whole answer that is not Serve's is not up either."""
    reply = http("200 OK", body)
    with answering(reply, reply) as (port, _):
        api = ServeApi(port, "t")
        with pytest.raises(OSError, match="does not answer as Ray's dashboard does"):
            api.status("a")
        assert not api.is_up()


def test_what_serve_answers_is_up():
    """Without applications too, and before it has proxies."""
    reply = http("200 OK", b'{"applications": {}, "proxies": null}')
    with answering(reply, reply) as (port, _):
        api = ServeApi(port, "t")
        assert api.is_up()
        assert api.status("a").state == ""


def test_nobody_there_is_told():
    """A closed port is not up, and the reason is readable."""
    api = ServeApi(free_port(), "t")
    assert not api.is_up()
    assert not answers(api.url)
    with pytest.raises(OSError, match="Connection refused"):
        api.status("a")


@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden"])
def test_a_refused_token_is_no_dashboard_that_is_not_up_yet(status):
    """Whatever is asked, it says that the token is not the one, and what to do."""
    reply = http(status, b"Forbidden: Invalid authentication token")
    with answering(reply, reply, reply, reply) as (port, _):
        api = ServeApi(port, "secret-token")
        for ask in (
            api.is_up,
            lambda: api.status("a"),
            lambda: api.deploy({}),
            lambda: api.take_away("a", {}),
        ):
            with pytest.raises(HostError, match="Invalid authentication token") as error:
                ask()
            assert "RAY_AUTH_TOKEN_PATH" in error.value.do
            assert "secret-token" not in str(error.value)


def test_a_port_that_asks_for_a_key_is_no_replica():
    """/ready needs none, so whoever asks for one there is another program."""
    reply = http("401 Unauthorized", b"")
    with answering(reply) as (port, _), pytest.raises(HostError, match="without a key"):
        answers(f"http://127.0.0.1:{port}/r/ready")


def test_one_application_is_taken_away_and_the_others_stay():
    """The config keeps what was deployed by config, and leaves out what `serve.run` brought."""
    details = {
        "applications": {
            "old": {"status": "RUNNING", "deployed_app_config": {"name": "old", "args": {"x": 1}}},
            "bad": {"status": "DEPLOY_FAILED", "deployed_app_config": {"name": "bad"}},
            "by-hand": {"status": "RUNNING", "deployed_app_config": None},
        }
    }
    replies = http("200 OK", json.dumps(details).encode()), http("200 OK", b"")
    with answering(*replies) as (port, received):
        ServeApi(port, "t").take_away(
            "bad", {"http_options": {"port": 8000}, "applications": [{"name": "bad"}]}
        )
    head, body = received[1].split(b"\r\n\r\n", 1)
    assert head.startswith(b"PUT /api/serve/applications/ ")
    assert json.loads(body) == {
        "http_options": {"port": 8000},
        "applications": [{"name": "old", "args": {"x": 1}}],
    }


def test_a_token_that_cannot_be_used_is_named(tmp_path):
    """A missing, empty or binary token file says which file, and what to do; a good one is read."""
    path = tmp_path / "token"
    with pytest.raises(HostError, match=str(path)):
        read_token(str(path))
    for content, told in (("\n", "empty"), ("a\nb", "one line"), ("ключ", "ASCII")):
        path.write_text(content)
        with pytest.raises(HostError, match=told):
            read_token(str(path))
    path.write_text("abc\n")
    assert read_token(str(path)) == "abc"
