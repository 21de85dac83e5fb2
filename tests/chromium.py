"""A headless Chromium that tests look through, by the DevTools protocol over two pipes.

No port, no network: names resolve to nothing, and pages are files. Every answer is waited for with a
deadline, and the process ends with the context.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ANSWER_S = 20
FLAGS = (
    "--headless",
    "--no-sandbox",  # as root there is none
    "--disable-gpu",
    "--disable-dev-shm-usage",  # containers have 64 MiB of it
    "--disable-extensions",
    "--no-first-run",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)
# The browser reads commands from descriptor 3 and writes answers to 4.
PIPES = 'in=$1 out=$2; shift 2; exec "$@" 3<&"$in" 4>&"$out"'
BAD_EVENTS = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")


class Browser:
    """Sends commands, collects events."""

    def __init__(self, commands: int, answers: int) -> None:
        self.commands, self.answers = commands, answers
        self.rest = b""
        self.number = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """The result of a command; AssertionError when it fails or takes too long."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_S
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def wait_for(self, method: str) -> None:
        """Until this event has come since the last look at `events`."""
        deadline = time.monotonic() + ANSWER_S
        while all(event["method"] != method for event in self.events):
            self.events.append(self._next(deadline))

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self.rest:
            left = deadline - time.monotonic()
            assert left > 0, "Chromium does not answer"
            if select.select([self.answers], [], [], left)[0]:
                read = os.read(self.answers, 1 << 20)
                assert read, "Chromium has ended"
                self.rest += read
        text, _, self.rest = self.rest.partition(b"\0")
        return json.loads(text)


class View:
    """A page as a window of some width shows it."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command to this page."""
        return self.browser.call(method, self.session, **params)

    def open(self, path: Path, *, width: int, dark: bool = False, media: str = "screen") -> None:
        """Load a file; the events since then are in `browser.events`."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.browser.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        self.browser.wait_for("Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def picture(self, selector: str = "html") -> Any:
        """What an element looks like, as an image of Pillow."""
        from PIL import Image

        box = self.evaluate(
            f"(box => ({{x: box.x + scrollX, y: box.y + scrollY, width: box.width, "
            f"height: box.height}}))(document.querySelector({selector!r}).getBoundingClientRect())"
        )
        shot = self.call(
            "Page.captureScreenshot", captureBeyondViewport=True, clip={**box, "scale": 1}
        )
        return Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")

    def requests(self) -> list[str]:
        """Addresses that were asked for since the page was opened."""
        return [
            event["params"]["request"]["url"]
            for event in self.browser.events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[str]:
        """What stands on the console: errors, refusals by the page's policy, messages."""
        return [json.dumps(e["params"]) for e in self.browser.events if e["method"] in BAD_EVENTS]


@contextlib.contextmanager
def chromium(program: str, folder: Path) -> Iterator[Browser]:
    """A running browser whose profile is in `folder`."""
    commands_out, commands_in = os.pipe()
    answers_out, answers_in = os.pipe()
    theirs = [os.dup2(fd, place) for place, fd in ((90, commands_out), (91, answers_in))]
    shell = ["bash", "-c", PIPES, "bash", *map(str, theirs)]
    with (folder / "chromium.log").open("w") as log:
        process = subprocess.Popen(
            [*shell, program, *FLAGS, f"--user-data-dir={folder / 'profile'}"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=theirs,
        )  # fmt: skip
    for fd in (*theirs, commands_out, answers_in):
        os.close(fd)
    browser = Browser(commands_in, answers_out)
    try:
        yield browser
    finally:
        with contextlib.suppress(AssertionError, OSError):
            browser.call("Browser.close")
        for fd in (commands_in, answers_out):
            os.close(fd)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
