"""What do Ray Serve and a replica answer? Serve's REST interface, and one URL of this host."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayserve.errors import HostError, Where

TIMEOUT_S = 10.0
TAKE_CONFIG_TIMEOUT_S = 120.0
"""Serve answers a config once its controller and proxies run, which a busy host starts slowly."""


@dataclass(frozen=True)
class AppStatus:
    """State of one application, in Serve's own words."""

    state: str
    """DEPLOYING, RUNNING, DEPLOY_FAILED, UNHEALTHY, …; empty while Serve does not know it."""
    message: str
    proxies_healthy: bool


class ServeApi:
    """Talks to one dashboard on loopback."""

    def __init__(self, port: int, token: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._token = token

    def is_up(self) -> bool:
        """Whether Serve's REST interface answers."""
        try:
            self._call("GET")
        except (OSError, ValueError):
            return False
        return True

    def deploy(self, config: dict[str, Any]) -> None:
        """Make `config` the whole of what Serve runs; Serve answers before it has built anything.

        Raises:
            OSError: the dashboard refused it (HTTPError) or is not there.
        """
        self._call("PUT", config, timeout_s=TAKE_CONFIG_TIMEOUT_S)

    def status(self, app: str) -> AppStatus:
        """State of an application.

        Raises:
            OSError: the dashboard is not there.
        """
        return app_status(self._call("GET"), app)

    def _call(
        self, method: str, body: dict[str, Any] | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> dict[str, Any]:
        request = urllib.request.Request(  # noqa: S310 - http on loopback, by construction
            f"{self.url}/api/serve/applications/",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Content-Type": "application/json",
                "Authorization": f"Bearer {self._token}",
            },
        )
        # No proxy from the environment stands between a process and its own machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=timeout_s) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace").strip()
            raise OSError(f"HTTP {error.code} from Ray's dashboard: {detail[:2000]}") from None
        content = json.loads(text) if text.strip() else {}
        return content if isinstance(content, dict) else {}


def app_status(details: dict[str, Any], app: str) -> AppStatus:
    """The state of one application in the answer of GET /api/serve/applications/."""
    found = details.get("applications", {}).get(app, {})
    messages = [found.get("message", "")]
    messages += [one.get("message", "") for one in found.get("deployments", {}).values()]
    proxies = details.get("proxies", {}).values()
    return AppStatus(
        state=found.get("status", ""),
        message="\n".join(dict.fromkeys(text for text in messages if text)),
        proxies_healthy=any(proxy.get("status") == "HEALTHY" for proxy in proxies),
    )


def answers(url: str) -> bool:
    """Whether a GET of this URL on loopback is answered with 200."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def read_token(path: str) -> str:
    """Ray's token from its file.

    Raises:
        HostError: it cannot be read, or is empty.
    """
    try:
        token = Path(path).read_text("utf-8").strip()
        found = "" if token else "an empty file"
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
