"""What do Ray Serve and a replica answer? Serve's REST interface, and one URL of this host."""

from __future__ import annotations

import errno
import http.client
import io
import json
import os
import re
import socket
import stat
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from rayserve.errors import HostError, Where

TIMEOUT_S = 10.0
TAKE_CONFIG_TIMEOUT_S = 120.0
"""Serve answers a config once its controller and proxies run, which a busy host starts slowly."""
MAX_ANSWER_BYTES: Final = 8 * 1024**2
"""Of one answer. Serve's own takes about a kilobyte for each replica."""
MAX_TOKEN: Final = 4096
"""Characters of Ray's token: far more than it makes."""
MAX_SHOWN: Final = 2000
"""Characters of an answer that a message repeats."""
MAX_MESSAGE: Final = 64 * 1024
"""Characters of the messages of an application: tracebacks of its replicas."""
REFUSALS: Final = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
"""Answers that waiting does not change."""
ELSEWHERE: Final = frozenset({301, 302, 303, 307, 308, 404, 405})
"""Answers of a program that has nothing at this path."""
IDLE_STATES: Final = frozenset({"STARTING", "STOPPING", "STOPPED"})
"""Of a replica that takes no request."""
IMPERATIVE: Final = "imperative"
"""Serve's word for the source of an application that no config gave."""
_TRACEBACK: Final = "Traceback (most recent call last)"
_STYLE: Final = re.compile(r"\x1b\[[0-9;]*m")
"""Colours, which Ray's own tracebacks have."""


@dataclass(frozen=True)
class AppStatus:
    """State of one application, in Serve's own words."""

    state: str
    """DEPLOYING, RUNNING, DEPLOY_FAILED, UNHEALTHY, …; empty while Serve does not know it."""
    message: str
    proxies_healthy: bool
    has_replica: bool = False
    """Whether one of its replicas takes requests."""
    built: bool = False
    """Whether its deployments are known, since its import path was called with its arguments."""
    beside: tuple[str, ...] = ()
    """Other applications that a config gave, and without which another config takes them away."""
    kept: tuple[str, ...] = ()
    """Other applications, of `serve run` with an import path: no config takes them away."""


class _Replica(BaseModel):
    state: str = ""


class _Deployment(BaseModel):
    message: str = ""
    replicas: list[_Replica] = []


class _Application(BaseModel):
    status: str = ""
    message: str = ""
    deployments: dict[str, _Deployment] = {}
    source: str = ""
    deployed_app_config: dict[str, Any] | None = None
    """None also of one that is being deleted."""


class _Proxy(BaseModel):
    status: str = ""


class ServeDetails(BaseModel):
    """What is read of the answer to GET /api/serve/applications/."""

    applications: dict[str, _Application]
    proxies: dict[str, _Proxy] | None = None


class ServeApi:
    """Talks to one dashboard on loopback, and to nobody that it may point to.

    Its methods raise:
        OSError: the dashboard is not there, is busy, refuses, or does not answer as Serve does; the
            message says which, and repeats what was answered without the token.
        HostError: it does not take the token.
    """

    def __init__(self, port: int, token: str, token_from: str = "") -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._token = token
        self._token_from = token_from or "none"

    def missing(self) -> str:
        """What Serve's REST interface does in place of answering; empty where it answers."""
        try:
            self._details()
        except OSError as error:
            return str(error)
        return ""

    def status(self, app: str) -> AppStatus:
        """State of an application."""
        found = app_status(self._details(), app)
        message = self._shown(found.message, MAX_MESSAGE)
        return replace(found, state=self._shown(found.state), message=message)

    def add(self, app: str, config: dict[str, Any]) -> None:
        """Give Serve the application of `config` beside those that it has; it answers before it has built it."""
        new = [one for one in config["applications"] if one["name"] == app]
        self.deploy({**config, "applications": others(self._details(), app) + new})

    def deploy(self, config: dict[str, Any]) -> None:
        """Make `config` the whole of what Serve runs; Serve answers before it has built anything."""
        text = self._call("PUT", config, timeout_s=TAKE_CONFIG_TIMEOUT_S)
        if text and not _is_json(text):
            raise self._stranger(text)

    def take_away(self, app: str, config: dict[str, Any]) -> None:
        """Make Serve delete one application, with the settings of `config` and all others as they are.

        Serve answers before it is gone.
        """
        self.deploy({**config, "applications": others(self._details(), app)})

    def _details(self) -> ServeDetails:
        text = self._call("GET")
        try:
            return ServeDetails.model_validate_json(text)
        except ValidationError:
            raise self._stranger(text) from None

    def _stranger(self, said: str) -> OSError:
        told = self._shown(said, 80)
        return OSError(f"{self.url} does not answer as Ray's dashboard does: {told!r}")

    def _call(
        self, method: str, body: dict[str, Any] | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> str:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"}
        content = None if body is None else json.dumps(body).encode()
        url = f"{self.url}/api/serve/applications/"
        try:
            status, text = _answer(url, timeout_s, method=method, body=content, headers=headers)
        except OSError as error:
            raise OSError(self._shown(str(error))) from None
        if status == HTTPStatus.OK:
            return text
        shown = self._shown(text)
        if status in REFUSALS:
            raise HostError(
                "the token that Ray's dashboard asks for",
                found=f"HTTP {status}: {shown[:200]} (token of {self._token_from})",
                do="name the file that Ray was started with: --token-file, or RAY_AUTH_TOKEN_PATH",
            )
        if status in ELSEWHERE:
            raise self._stranger(f"HTTP {status} {shown}".strip())
        raise OSError(f"HTTP {status} from {self.url}: {shown}")

    def _shown(self, text: str, most: int = MAX_SHOWN) -> str:
        """What was answered as a message repeats it: without the token, and nothing commands a terminal.

        Whatever listens on the port may repeat what it was sent, and messages go to the journal.
        """
        text = text.replace(self._token, "(the token)") if self._token else text
        # What went wrong stands at the end of a traceback.
        kept = text.strip()[-most:] if _TRACEBACK in text else text.strip()[:most]
        plain = _STYLE.sub("", kept)
        return "".join(char if char.isprintable() or char in "\n\t" else "?" for char in plain)


def app_status(details: ServeDetails, app: str) -> AppStatus:
    """The state of one application."""
    found = details.applications.get(app, _Application())
    rest = {name: one for name, one in details.applications.items() if name != app}
    deployments = found.deployments.values()
    messages = [found.message, *(one.message for one in deployments)]
    replicas = [replica for one in deployments for replica in one.replicas]
    return AppStatus(
        state=found.status,
        message="\n".join(dict.fromkeys(text for text in messages if text)),
        proxies_healthy=any(
            proxy.status == "HEALTHY" for proxy in (details.proxies or {}).values()
        ),
        has_replica=any(replica.state not in IDLE_STATES for replica in replicas),
        built=bool(deployments),
        beside=tuple(name for name, one in rest.items() if one.deployed_app_config),
        kept=tuple(
            name
            for name, one in rest.items()
            if one.source == IMPERATIVE and one.status != "DELETING"
        ),
    )


def others(details: ServeDetails, app: str) -> list[dict[str, Any]]:
    """The configs of all applications but one.

    Those that were not deployed by config have none, and Serve keeps them whatever config it is given.
    """
    configs = {name: one.deployed_app_config for name, one in details.applications.items()}
    return [config for name, config in configs.items() if name != app and config]


def answers(url: str) -> bool:
    """Whether a GET of this URL on loopback is answered with 200.

    Raises:
        HostError: it asks for a key, which no replica does there.
    """
    try:
        status, _ = _answer(url, timeout_s=5)
    except OSError:
        return False
    if status in REFUSALS:
        raise HostError(
            f"a replica that answers {url} without a key",
            found=f"HTTP {status}",
            do="look what listens on this port: `ss -ltnp`",
        )
    return status == HTTPStatus.OK


def limits_of(url: str) -> str:
    """Which limits the replica behind `/ready` runs with, by their digest; empty where it does not say."""
    try:
        said = json.loads(_answer(url, timeout_s=5)[1])
    except (OSError, ValueError, RecursionError):
        return ""
    return str(said.get("limits", "")) if isinstance(said, dict) else ""


def _answer(
    url: str,
    timeout_s: float,
    *,
    method: str = "GET",
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Status and text of the answer of this very server: no proxy, and no redirect is followed.

    `timeout_s` is for the whole of it, however little comes at a time.

    Raises:
        OSError: there is none that could be read; the message says why.
    """
    deadline = time.monotonic() + timeout_s
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=timeout_s)
    try:
        with closing(connection):
            connection.connect()
            asked = {**(headers or {}), "Connection": "close"}
            connection.request(method, parts.path, body, asked)
            return _read(connection.sock, deadline)
    except TimeoutError:
        raise OSError(f"no whole answer from {url} within {timeout_s:.0f} s") from None
    except (http.client.HTTPException, ValueError) as error:
        raise OSError(f"a broken answer: {type(error).__name__}: {error}") from None


def _read(connection: socket.socket, deadline: float) -> tuple[int, str]:
    # HTTPResponse asks a socket for nothing but a file to read from.
    answer = http.client.HTTPResponse(_Timed(connection, deadline))  # type: ignore[arg-type]
    with closing(answer):
        answer.begin()
        content = answer.read(MAX_ANSWER_BYTES + 1)
        if len(content) > MAX_ANSWER_BYTES:
            raise OSError(f"an answer of more than {MAX_ANSWER_BYTES // 1024**2} MiB")
        if answer.length:  # read() with a limit does not say so itself
            raise http.client.IncompleteRead(content, answer.length)
        return answer.status, content.decode(errors="replace")


class _Timed(io.RawIOBase):
    """Reads from a socket until a deadline: its own timeout begins anew with each byte."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline

    def makefile(self, _mode: str) -> io.BufferedReader:
        """The file that HTTPResponse reads."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        """It is; for BufferedReader."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Bytes that are there, at least one unless the server has ended.

        Raises:
            TimeoutError: the deadline is over.
        """
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _beginning(path: str) -> bytes:
    """As much of a regular file as a token may take; a pipe, which may never answer, is not read."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return file.read(MAX_TOKEN + 2)


def find_token(named: str | None, environment: Mapping[str, str]) -> tuple[str, str]:
    """Ray's token and where it was found, in Ray's own order; two empty texts where there is none.

    `named` is the file that is given, or RAY_AUTH_TOKEN_PATH; then RAY_AUTH_TOKEN counts, then
    ~/.ray/auth_token, by HOME as for Ray (ray/_private/authentication).

    Raises:
        HostError: the file cannot be read, or is empty.
    """
    if named:
        return read_token(named), named
    if environment.get("RAY_AUTH_TOKEN", "").strip():
        return environment["RAY_AUTH_TOKEN"].strip(), "RAY_AUTH_TOKEN"
    home = Path.home() / ".ray" / "auth_token"
    return (read_token(str(home)), str(home)) if home.exists() else ("", "")


def read_token(path: str) -> str:
    """Ray's token from its file.

    Raises:
        HostError: it cannot be read, or is empty.
    """
    try:
        token = _beginning(path).decode("utf-8").strip()
        found = "" if token else "an empty file"
        if len(token) > MAX_TOKEN or not (token.isascii() and token.isprintable()):
            found = "more than one line of visible ASCII characters"
    except (OSError, ValueError) as error:
        token, found = "", getattr(error, "strerror", None) or str(error)
    if found:
        raise HostError(
            "a file with Ray's token",
            found=found,
            do="run this as the user of Ray, or name the file with --token-file",
            where=Where(path),
        )
    return token
