"""Does Serve run the plan's revision? Makes it so, waits, and says how it ended.

Run at every boot of the head and at every change of the plan, by one systemd unit, which is the only writer of
Serve's config. To deploy what runs already changes nothing: Serve compares what it is given with what it has.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from rayserve.clients import AppStatus, answers
from rayserve.errors import StartError
from rayserve.plan import Plan
from rayserve.serve_config import serve_config

DASHBOARD_S: Final = 180.0
"""For Ray's dashboard to answer after Ray has started."""
BEYOND_ENGINE_S: Final = 120.0
"""On top of the engine's own start budget: Serve's actors, the ingress, imports."""
POLL_S: Final = 2.0


class Serve(Protocol):
    """What is asked of Serve's REST interface (`rayserve.clients.ServeApi`)."""

    def is_up(self) -> bool:
        """Whether it answers."""
        ...

    def deploy(self, config: dict[str, object]) -> None:
        """Make `config` the whole of what Serve runs."""
        ...

    def status(self, app: str) -> AppStatus:
        """State of an application."""
        ...


@dataclass(frozen=True, slots=True)
class Deployed:
    """A revision that serves."""

    app: str
    url: str
    """Root of the application on this host."""
    seconds: float
    """From the order to the first readiness."""


def deploy(
    plan: Plan,
    serve: Serve,
    *,
    is_ready: Callable[[str], bool] = answers,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Deployed:
    """Deploy the plan's revision and wait until it takes requests on this host.

    Raises:
        StartError: Ray does not answer, Serve refuses the config, the replica fails, or the start budget is over.
    """
    config = serve_config(plan)
    app = str(config["applications"][0]["name"])
    url = f"http://127.0.0.1:{plan.endpoint.port}/{plan.revision}"
    began = clock()
    while not serve.is_up():
        if clock() - began > DASHBOARD_S:
            raise StartError(
                f"Ray's dashboard within {DASHBOARD_S:.0f} s",
                found="no answer",
                do="systemctl status ray; journalctl -u ray",
            )
        sleep(POLL_S)
    ordered = clock()
    try:
        serve.deploy(config)
    except OSError as error:
        raise StartError(
            "Ray Serve to take the generated config",
            found=str(error),
            do="is the plan of this version of rayserve? `rayserve plan` writes it anew",
        ) from error
    budget_s = plan.replica.start_timeout_s + BEYOND_ENGINE_S
    while not _serves(serve, app, f"{url}/ready", is_ready):
        if clock() - ordered > budget_s:
            raise StartError(
                f"a ready replica of {app} within {budget_s:.0f} s",
                found="none when the time was over",
                do="read the replica's log under session_latest/logs/serve in Ray's folder",
            )
        sleep(POLL_S)
    return Deployed(app, url, clock() - ordered)


def _serves(serve: Serve, app: str, ready_url: str, is_ready: Callable[[str], bool]) -> bool:
    try:
        status = serve.status(app)
    except (OSError, ValueError):
        return False  # the dashboard is busy, or is being started again
    if status.state == "DEPLOY_FAILED":
        raise StartError(
            f"a replica of {app} that starts",
            found=status.message or status.state,
            do="read the replica's log under session_latest/logs/serve in Ray's folder",
        )
    return status.state == "RUNNING" and status.proxies_healthy and is_ready(ready_url)
