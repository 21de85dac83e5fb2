"""What do Ray Serve and a replica answer? Serve's REST interface, and one URL of this host."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from rayserve.errors import HostError, Where

TIMEOUT_S = 10.0
TAKE_CONFIG_TIMEOUT_S = 120.0
"""Serve answers a config once its controller and proxies run, which a busy host starts slowly."""
REFUSALS: Final = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
"""Answers that waiting does not change."""
IDLE_STATES: Final = frozenset({"STARTING", "STOPPING", "STOPPED"})
"""Of a replica that takes no request."""


@dataclass(frozen=True)
class AppStatus:
    """State of one application, in Serve's own words."""

    state: str
    """DEPLOYING, RUNNING, DEPLOY_FAILED, UNHEALTHY, …; empty while Serve does not know it."""
    message: str
    proxies_healthy: bool
    has_replica: bool = False
    """Whether one of its replicas takes requests."""


class ServeApi:
    """Talks to one dashboard on loopback.

    Its methods raise:
        OSError: the dashboard is not there, is busy, refuses, or does not answer as Serve does; the
            message says which.
        HostError: it does not take the token.
    """

    def __init__(self, port: int, token: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._token = token

    def is_up(self) -> bool:
        """Whether Serve's REST interface answers."""
        try:
            self._details()
        except OSError:
            return False
        return True

    def status(self, app: str) -> AppStatus:
        """State of an application."""
        return app_status(self._details(), app)

    def deploy(self, config: dict[str, Any]) -> None:
        """Make `config` the whole of what Serve runs; Serve answers before it has built anything."""
        self._call("PUT", config, timeout_s=TAKE_CONFIG_TIMEOUT_S)

    def take_away(self, app: str, config: dict[str, Any]) -> None:
        """Make Serve delete one application, with the settings of `config` and all others as they are.

        Serve answers before it is gone.
        """
        self.deploy({**config, "applications": others(self._details(), app)})

    def _details(self) -> dict[str, Any]:
        text = self._call("GET")
        try:
            details = json.loads(text)
        except ValueError:
            details = None
        if isinstance(details, dict) and isinstance(details.get("applications"), dict):
            return details
        raise OSError(f"{self.url} does not answer as Ray's dashboard does: {text[:80]!r}")

    def _call(
        self, method: str, body: dict[str, Any] | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> str:
        request = urllib.request.Request(  # noqa: S310 - http on loopback, by construction
            f"{self.url}/api/serve/applications/",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Content-Type": "application/json",
                "Authorization": f"Bearer {self._token}",
            },
        )
        status, text = _answer(request, timeout_s)
        if status in REFUSALS:
            raise HostError(
                "the token that Ray's dashboard asks for",
                found=f"HTTP {status}: {text.strip()[:200]}",
                do="run this as the user of Ray, with the RAY_AUTH_TOKEN_PATH that Ray was started with",
            )
        if status != HTTPStatus.OK:
            raise OSError(f"HTTP {status} from Ray's dashboard: {text.strip()[:2000]}")
        return text


def app_status(details: dict[str, Any], app: str) -> AppStatus:
    """The state of one application in the answer of GET /api/serve/applications/."""
    found = details.get("applications", {}).get(app, {})
    deployments = found.get("deployments", {}).values()
    messages = [found.get("message", "")]
    messages += [one.get("message", "") for one in deployments]
    proxies = (details.get("proxies") or {}).values()
    replicas = [replica for one in deployments for replica in one.get("replicas", [])]
    return AppStatus(
        state=found.get("status", ""),
        message="\n".join(dict.fromkeys(text for text in messages if text)),
        proxies_healthy=any(proxy.get("status") == "HEALTHY" for proxy in proxies),
        has_replica=any(replica.get("state") not in IDLE_STATES for replica in replicas),
    )


def others(details: dict[str, Any], app: str) -> list[dict[str, Any]]:
    """The configs of all applications but one in the same answer.

    Those that were not deployed by config have none, and Serve keeps them whatever config it is given.
    """
    configs = {
        name: one.get("deployed_app_config") for name, one in details["applications"].items()
    }
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


def _answer(request: urllib.request.Request | str, timeout_s: float) -> tuple[int, str]:
    """Status and text of the answer to a request.

    Raises:
        OSError: there is none that could be read; the message says why.
    """
    # No proxy from the environment stands between a process and its own machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        try:
            answer = opener.open(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            answer = error  # an answer all the same
        with answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.URLError as error:
        raise OSError(str(error.reason)) from None
    except (http.client.HTTPException, ValueError) as error:
        raise OSError(f"a broken answer: {error!r}") from None


def read_token(path: str) -> str:
    """Ray's token from its file.

    Raises:
        HostError: it cannot be read, or is empty.
    """
    try:
        token = Path(path).read_text("utf-8").strip()
        found = "" if token else "an empty file"
        if not (token.isascii() and token.isprintable()):
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
