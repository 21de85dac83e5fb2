"""What do Ray's dashboard and a replica answer, whole, refusing or broken, and what is told of it?"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from socket import create_server

import pytest

from rayserve import clients
from rayserve.clients import (
    MAX_ANSWER_BYTES,
    MAX_SHOWN,
    ServeApi,
    answers,
    limits_of,
)
from rayserve.deploy import deploy
from rayserve.errors import HostError, StartError
from tests.ray_cluster import free_port
from tests.unit.test_deploy import APP, PLAN, Clock

TOKEN = "5f2d7c1e9b"
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
    "no protocol": (b"\x00\x01garbage\r\n\r\n", "BadStatusLine"),
    "an endless line": (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000 + b"\r\n\r\n", "LineTooLong"),
    "an error": (http("503 Unavailable", b"the GCS may be down"), "the GCS may be down"),
    "an error cut short": (http("500 Oops", b"half", 500), "IncompleteRead"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_answer_is_told(case):
    """Whatever listens there, a person reads what it said, and who waits goes on waiting."""
    reply, told = BROKEN[case]
    with answering(reply, reply, reply) as (port, _):
        api = ServeApi(port, TOKEN)
        with pytest.raises(OSError, match=told):
            api.status("a")
        assert told in api.missing()
        assert not answers(api.url)


def serve_answer(**parts: object) -> bytes:
    """An answer to GET as Serve's, but for `parts`."""
    return json.dumps({"applications": {}, "proxies": {}} | parts).encode()


STRANGE = {
    "a page": b"<html>hello</html>",
    "a list": b"[1, 2]",
    "binary": b"\xff\xfe",
    "too deep": b"[" * 200_000,
    "a number of 5000 digits": b'{"applications": ' + b"9" * 5000 + b"}",
    "no applications": b"{}",
    "applications as a list": serve_answer(applications=[1]),
    "applications as null": serve_answer(applications=None, proxies=None),
    "an application as text": serve_answer(applications={APP: "x"}),
    "an application as null": serve_answer(applications={APP: None}),
    "a message as a number": serve_answer(applications={APP: {"message": 7}}),
    "a deployment's message": serve_answer(
        applications={APP: {"deployments": {"a": {"message": 8}}}}
    ),
    "deployments as a list": serve_answer(applications={APP: {"deployments": [1]}}),
    "replicas as numbers": serve_answer(
        applications={APP: {"deployments": {"a": {"replicas": [1]}}}}
    ),
    "proxies as numbers": serve_answer(proxies={"n": 1}),
    "a config as text": serve_answer(applications={"b": {"deployed_app_config": "x"}}),
}


@pytest.mark.parametrize("case", STRANGE)
def test_another_program_is_no_dashboard(case):
    """A whole answer that is not Serve's says so, whatever is asked for."""
    reply = http("200 OK", STRANGE[case])
    with answering(reply, reply, reply) as (port, _):
        api = ServeApi(port, TOKEN)
        for ask in (lambda: api.status(APP), lambda: api.take_away(APP, {})):
            with pytest.raises(OSError, match="does not answer as Ray's dashboard does"):
                ask()
        assert "does not answer as Ray's dashboard does" in api.missing()


@pytest.mark.parametrize("body", [b"<html>hello</html>", b"\xff\xfe", b"[" * 200_000])
def test_an_order_that_something_else_took_is_no_order(body):
    """Serve answers a config with nothing; a page in its place says that no Serve has it."""
    with (
        answering(http("200 OK", body)) as (port, _),
        pytest.raises(OSError, match="does not answer as Ray's dashboard does"),
    ):
        ServeApi(port, TOKEN).deploy({})


@pytest.mark.parametrize("status", ["302 Found", "307 Temporary Redirect"])
def test_the_token_goes_to_the_dashboard_alone(status):
    """A redirect is not followed: whoever it names is never asked, with or without the token."""
    with answering(http("200 OK", EMPTY)) as (elsewhere, asked_there):
        target = f"HTTP/1.1 {status}\r\nLocation: http://localhost:{elsewhere}/\r\n"
        reply = http(status, b"").replace(f"HTTP/1.1 {status}\r\n".encode(), target.encode())
        with answering(reply, reply) as (port, received):
            api = ServeApi(port, TOKEN)
            with pytest.raises(
                OSError, match=f"not answer as Ray's dashboard does: 'HTTP {status[:3]}"
            ):
                api.status("a")
            assert not answers(api.url)
        assert TOKEN.encode() in received[0]
        assert asked_there == []
        assert answers(f"http://127.0.0.1:{elsewhere}/")  # it was there to be asked


@pytest.mark.parametrize(
    "reply",
    [
        http("200 OK", TOKEN.encode()),
        http("401 Unauthorized", b"who is " + TOKEN.encode()),
        http("500 Oops", b"x" * (MAX_SHOWN - 3) + TOKEN.encode()),
        http("302 Found", TOKEN.encode()),
        TOKEN.encode() + b"\r\n\r\n",
        b"x" * (MAX_SHOWN - 40) + TOKEN.encode() * 4 + b"\r\n\r\n",
    ],
)
def test_an_answer_is_repeated_without_the_token(reply):
    """What listens on the port may echo its headers; a message goes to the journal."""
    with answering(reply, reply) as (port, _):
        for ask in (lambda api: api.status("a"), lambda api: api.deploy({})):
            with pytest.raises((OSError, HostError)) as error:
                ask(ServeApi(port, TOKEN))
            assert TOKEN[:3] not in str(error.value)


def test_of_a_traceback_the_end_is_told():
    """There it says what went wrong."""
    pages = b"Traceback (most recent call last)\n" + b"  File x\n" * 1000
    with answering(http("500 Oops", pages + b"OSError: Address already in use")) as (port, _):
        with pytest.raises(OSError, match="Address already in use") as error:
            ServeApi(port, TOKEN).deploy({})
        assert len(str(error.value)) < MAX_SHOWN + 100


@pytest.mark.parametrize(
    "body, limits",
    [(b'{"status": "ready", "limits": "abc"}', "abc"), (b'{"status": "ready"}', ""), (b"ok", ""), (b"[]", "")],
)  # fmt: skip
def test_a_replica_says_which_limits_it_runs_with(body, limits):
    """Another program there, or an older replica, says nothing."""
    with answering(http("200 OK", body)) as (port, _):
        assert limits_of(f"http://127.0.0.1:{port}/ready") == limits


def test_no_answer_commands_a_terminal():
    """Colours are left out, other control characters become question marks, and pages are cut."""
    with answering(http("500 Oops", b"\x1b[31mred\x07\x1b]0;x" + b"x" * 10_000)) as (port, _):
        with pytest.raises(OSError, match="red") as error:
            ServeApi(port, TOKEN).deploy({})
        assert ": red??]0;xx" in str(error.value)
        assert len(str(error.value)) < MAX_SHOWN + 100
    app = {"status": "DEPLOY_FAILED", "message": f"\x1b[36mray::x\x1b[39m\x07 {TOKEN}\nline"}
    with answering(http("200 OK", serve_answer(applications={APP: app}))) as (port, _):
        message = ServeApi(port, TOKEN).status(APP).message
    assert message == "ray::x? (the token)\nline"


@contextmanager
def speaking(speak: Callable[[Callable[[bytes], None]], None]) -> Iterator[int]:
    """A server whose every answer is what `speak` sends, for as long as anybody listens: its port."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection, suppress(OSError):
                    request(connection)
                    speak(connection.sendall)

    with create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


def endless(status: str) -> Callable[[Callable[[bytes], None]], None]:
    """An answer that goes on as fast as it is read."""

    def speak(send: Callable[[bytes], None]) -> None:
        send(f"HTTP/1.1 {status}\r\n\r\n".encode())
        while True:
            send(b"a" * 65536)

    return speak


def dripping(head: bytes) -> Callable[[Callable[[bytes], None]], None]:
    """An answer of which a byte comes at a time, each soon enough."""

    def speak(send: Callable[[bytes], None]) -> None:
        send(head)
        while True:
            send(b"a")
            time.sleep(0.05)

    return speak


@pytest.mark.parametrize("status", ["200 OK", "500 Oops"])
def test_an_endless_answer_is_left(status):
    """To a question and to an order, good or bad: reading ends at the limit."""
    with speaking(endless(status)) as port:
        api = ServeApi(port, TOKEN)
        for ask in (lambda: api.status("a"), lambda: api.deploy({})):
            with pytest.raises(OSError, match=f"more than {MAX_ANSWER_BYTES // 1024**2} MiB"):
                ask()
        assert not answers(api.url)


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_a_dripping_answer_is_left(monkeypatch, head):
    """In its first line, its headers or its body: one time is for the whole, not for each byte."""
    monkeypatch.setattr(clients, "TAKE_CONFIG_TIMEOUT_S", 0.5)
    with speaking(dripping(head)) as port:
        began = time.monotonic()
        with pytest.raises(OSError, match="no whole answer"):
            ServeApi(port, TOKEN).deploy({})
        assert time.monotonic() - began < 3


def test_what_serve_answers_is_up():
    """Without applications too, and before it has proxies."""
    reply = http("200 OK", b'{"applications": {}, "proxies": null}')
    with answering(reply, reply) as (port, _):
        api = ServeApi(port, TOKEN)
        assert api.missing() == ""
        assert api.status("a").state == ""


def test_nobody_there_is_told():
    """A closed port is not up, and the reason is readable."""
    api = ServeApi(free_port(), TOKEN)
    assert "Connection refused" in api.missing()
    assert not answers(api.url)
    with pytest.raises(OSError, match="Connection refused"):
        api.status("a")


@pytest.mark.parametrize(
    "broken",
    [*(reply for reply, _ in BROKEN.values()), *(http("200 OK", x) for x in STRANGE.values())],
)
def test_one_broken_poll_ends_no_deploy(broken):
    """Once ordered, a poll that is answered wrongly is one more to wait for."""
    runs = serve_answer(
        applications={APP: {"status": "RUNNING"}}, proxies={"n": {"status": "HEALTHY"}}
    )
    replies = [http("200 OK", EMPTY), http("200 OK", b""), broken, http("200 OK", runs)]
    clock = Clock()
    with answering(*replies) as (port, _):
        done = deploy(
            PLAN, ServeApi(port, TOKEN), is_ready=lambda _: True, clock=clock, sleep=clock.sleep
        )
    assert done.seconds == 2.0


@pytest.mark.parametrize(
    "broken", [*(reply for reply, _ in BROKEN.values()), http("200 OK", b"<html>")]
)
def test_an_order_without_a_whole_answer_is_a_failed_start(broken):
    """Whatever came in place of Serve's answer, the message says what it was and what to do."""
    with answering(http("200 OK", EMPTY), broken) as (port, _), pytest.raises(StartError) as error:
        deploy(PLAN, ServeApi(port, TOKEN))
    assert error.value.exit_code == 5
    assert error.value.found
    assert error.value.do


@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden"])
def test_a_refused_token_is_no_dashboard_that_is_not_up_yet(status):
    """Whatever is asked, it says that the token is not the one, and what to do."""
    reply = http(status, b"Forbidden: Invalid authentication token")
    with answering(reply, reply, reply, reply) as (port, _):
        api = ServeApi(port, TOKEN)
        for ask in (
            api.missing,
            lambda: api.status("a"),
            lambda: api.deploy({}),
            lambda: api.take_away("a", {}),
        ):
            with pytest.raises(HostError, match="Invalid authentication token") as error:
                ask()
            assert "RAY_AUTH_TOKEN_PATH" in error.value.do
            assert TOKEN not in str(error.value)


def test_a_port_that_asks_for_a_key_is_no_replica():
    """/ready needs none, so whoever asks for one there is another program."""
    reply = http("401 Unauthorized", b"")
    with answering(reply) as (port, _), pytest.raises(HostError, match="without a key"):
        answers(f"http://127.0.0.1:{port}/r/ready")


def test_one_application_is_taken_away_and_the_others_stay():
    """The config keeps what was deployed by config, to the letter, and leaves out what `serve.run` brought."""
    details = {
        "applications": {
            "old": {
                "status": "RUNNING",
                "deployed_app_config": {"name": "old", "args": {"x": TOKEN}},
            },
            "bad": {"status": "DEPLOY_FAILED", "deployed_app_config": {"name": "bad"}},
            "by-hand": {"status": "RUNNING", "deployed_app_config": None},
        }
    }
    replies = http("200 OK", json.dumps(details).encode()), http("200 OK", b"")
    with answering(*replies) as (port, received):
        ServeApi(port, TOKEN).take_away(
            "bad", {"http_options": {"port": 8000}, "applications": [{"name": "bad"}]}
        )
    head, body = received[1].split(b"\r\n\r\n", 1)
    assert head.startswith(b"PUT /api/serve/applications/ ")
    assert json.loads(body) == {
        "http_options": {"port": 8000},
        "applications": [{"name": "old", "args": {"x": TOKEN}}],
    }
