"""Does the demo's client time the service alone, and say what the service refused?"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rayserve.demo.chat import Answer, stream_answer
from rayserve.errors import StartError

WORDS = ["one ", "two ", "three "]
MODELS_S = 0.5


class Service(BaseHTTPRequestHandler):
    """An OpenAI service of two routes, of which the first is slow, and of one answer."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self.server.seen.append(("models", self.client_address))
        time.sleep(MODELS_S)
        self.answer(200, "application/json", json.dumps({"object": "list", "data": []}))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.server.seen.append(("chat", self.client_address))
        if self.server.refuses:
            self.answer(503, "application/json", json.dumps({"error": {"message": "draining"}}))
            return
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
        events = [{"choices": [{"index": 0, "delta": {"content": word}}]} for word in WORDS]
        lines = [json.dumps(event) for event in (*events, {"choices": [], "usage": usage})]
        text = "".join(f"data: {line}\n\n" for line in (*lines, "[DONE]"))
        self.answer(200, "text/event-stream", text)

    def answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing: the test asks what was seen."""


@pytest.fixture
def service() -> Iterator[ThreadingHTTPServer]:
    """The service on a free port, with a list of what was asked of it over which connection."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        server.seen, server.refuses = [], False
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: ThreadingHTTPServer, shown: list[str]) -> Answer:
    """Ask the service one question."""
    url = f"http://127.0.0.1:{server.server_port}/v1"
    return stream_answer(url, "a key", "tiny", "why?", max_tokens=3, show=shown.append)


def test_an_answer_and_its_count(service):
    """Each piece is shown as it comes; tokens are the service's own count, events are ours."""
    shown: list[str] = []
    answer = ask(service, shown)
    assert shown == WORDS
    assert answer.text == "one two three "
    assert (answer.prompt_tokens, answer.answer_tokens, answer.events) == (7, 3, 3)


def test_the_client_is_loaded_before_the_clock_starts(service):
    """The timed request goes over a connection that another one has opened, whose time does not count."""
    assert ask(service, []).ttft_s < MODELS_S
    (before, first), (timed, second) = service.seen
    assert (before, timed) == ("models", "chat")
    assert first == second


def test_what_the_service_refused_is_said(service):
    """A refusal is one error that quotes the service."""
    service.refuses = True
    with pytest.raises(StartError, match="draining"):
        ask(service, [])
