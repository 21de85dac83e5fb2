"""Does Serve run the plan's revision? Makes it so, waits, and says how it ended.

Run at every boot of the head and at every change of the plan, by one systemd unit, which is the only writer of
Serve's config. To deploy what runs already changes nothing: Serve compares what it is given with what it has. It
does so too where the revision has failed, so that one is taken away first, and tried anew.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from rayserve.clients import AppStatus, answers, limits_of
from rayserve.errors import HostError, RayserveError, StartError
from rayserve.plan import Plan
from rayserve.serve_config import live_plan, serve_config

DASHBOARD_S: Final = 180.0
"""For Ray's dashboard to answer after Ray has started."""
BEYOND_ENGINE_S: Final = 120.0
"""On top of the engine's own start budget: Serve's actors, the ingress, imports."""
LIMITS_S: Final = 30.0
"""For replicas that run already to take other limits and keys."""
BUILD_S: Final = 120.0
"""For Serve to import an application and to call it with its arguments, in a worker that starts for it."""
POLL_S: Final = 2.0
TELL_S: Final = 30.0
"""Between two words on a wait that goes on."""
SHOWN: Final = 300
"""Characters of what is seen, in a word on the wait."""

_OWN_ERROR: Final = re.compile(r"\brayserve\.errors\.\w+: |failed with exception:\n")
"""What stands before a message of ours in what Serve says: a traceback, or its own word on a build."""
_READ_THE_LOG: Final = "read the replica's log under session_latest/logs/serve in Ray's folder"

_Value = TypeVar("_Value")


class Serve(Protocol):
    """What is asked of Serve's REST interface (`rayserve.clients.ServeApi`, which says what it raises)."""

    def status(self, app: str) -> AppStatus:
        """State of an application."""
        ...

    def deploy(self, config: dict[str, object]) -> None:
        """Make `config` the whole of what Serve runs."""
        ...

    def add(self, app: str, config: dict[str, object]) -> None:
        """Give Serve one application beside those that it has."""
        ...

    def take_away(self, app: str, config: dict[str, object]) -> None:
        """Make Serve delete one application, with the settings of `config` and all others as they are."""
        ...


@dataclass(frozen=True, slots=True)
class Deployed:
    """A revision that serves."""

    app: str
    url: str
    """Root of the application on this host."""
    seconds: float
    """From the order to the first readiness."""


class _NotYet(Exception):  # noqa: N818 - no error: the wait goes on
    """What was seen in place of what is waited for."""


@dataclass(frozen=True, slots=True)
class _Pace:
    """How waiting is done."""

    clock: Callable[[], float]
    sleep: Callable[[float], None]
    tell: Callable[[str], None]

    def until(self, probe: Callable[[], _Value], limit_s: float, *, needed: str, do: str) -> _Value:
        """What `probe` returns, once it neither raises `_NotYet` nor finds the dashboard away.

        Told is what is waited for, and at times what is seen.

        Raises:
            StartError: it was asked for longer than `limit_s`; the message says what was seen last.
        """
        began = told = self.clock()
        self.tell(f"waiting for {needed}, at most {limit_s:.0f} s")
        while True:
            try:
                return probe()
            except (_NotYet, OSError) as error:
                seen = str(error)
            now = self.clock()
            if now - began > limit_s:
                raise StartError(f"{needed} within {limit_s:.0f} s", found=seen, do=do)
            if now - told >= TELL_S:
                told = now
                self.tell(f"  after {now - began:.0f} s: {_one_line(seen)}")
            self.sleep(POLL_S)


def deploy(
    plan: Plan,
    serve: Serve,
    *,
    is_ready: Callable[[str], bool] = answers,
    limits_at: Callable[[str], str] = limits_of,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    tell: Callable[[str], None] = lambda _line: None,
) -> Deployed:
    """Deploy the plan's revision and wait until it takes requests on this host.

    What serves is taken away only once Serve has built the new revision, which it refuses where the model, the
    environment or the packages are not there. `tell` is given a line on each wait, and more while it lasts.

    Raises:
        HostError: Ray does not take the token, another program has the port, or Serve runs what no config gave.
        StartError: Ray does not answer, Serve refuses the config, the replica fails, the start budget is over, or a
            replica that runs keeps its old limits.
    """
    config = serve_config(plan)
    app = str(config["applications"][0]["name"])
    url = f"http://127.0.0.1:{plan.endpoint.port}/{plan.revision}"
    pace = _Pace(clock, sleep, tell)
    before = pace.until(
        lambda: serve.status(app),
        DASHBOARD_S,
        needed="Ray's dashboard (--dashboard-port names its port)",
        do="start Ray on this host (`ray start --head`, or systemctl status ray; journalctl -u ray), or name its "
        "dashboard's port with --dashboard-port; `ss -ltnp` shows which program has the port",
    )
    _check_alone(before)
    ordered = clock()
    if _is_dead(before):
        _order(lambda: serve.take_away(app, config))
        pace.until(
            lambda: _check_gone(serve.status(app)),
            plan.timeouts.drain_s + BEYOND_ENGINE_S,
            needed=f"the failed {app} gone from Serve",
            do="serve shutdown -y, and deploy again",
        )
    if before.beside and (not before.built or _is_dead(before)):
        _build(app, config, serve, pace)
    _order(lambda: serve.deploy(config))
    pace.until(
        lambda: _check_serves(serve.status(app), app, f"{url}/ready", is_ready),
        plan.replica.start_timeout_s + BEYOND_ENGINE_S,
        needed=f"a ready replica of {app}",
        do=_READ_THE_LOG,
    )
    pace.until(
        lambda: _check_limits(limits_at(f"{url}/ready"), live_plan(plan).digest()),
        LIMITS_S,
        needed="the plan's limits and keys taken by the replica",
        do="rayserve check host --plan PLAN, which judges the key file; its log says why it refused them",
    )
    return Deployed(app, url, clock() - ordered)


def _check_alone(status: AppStatus) -> None:
    """An application of `serve run` holds its GPUs, whatever config Serve is given."""
    if status.kept:
        raise HostError(
            "a Serve that runs only what it is deployed",
            found=f"application {', '.join(f'`{name}`' for name in status.kept)}, of a `serve run`",
            do="end that `serve run` with Ctrl-C where it runs, or all with `serve shutdown -y`; then deploy again",
        )


def _build(app: str, config: dict[str, object], serve: Serve, pace: _Pace) -> None:
    """Make Serve build the application while what it has serves on; what cannot be built leaves no trace."""
    _order(lambda: serve.add(app, config))
    try:
        pace.until(
            lambda: _check_built(serve.status(app), app),
            BUILD_S,
            needed=f"{app} built by Serve",
            do=_READ_THE_LOG,
        )
    except (RayserveError, KeyboardInterrupt):
        # What went wrong is told, not that Serve could not be told of it.
        with contextlib.suppress(RayserveError, OSError):
            serve.take_away(app, config)
        raise


def _check_built(status: AppStatus, app: str) -> None:
    if status.state == "DEPLOY_FAILED":
        found, do = _reason(status)
        raise StartError(
            f"{app} in a form that can start; what serves is left to serve",
            found=found,
            do=do or "mend what it names, plan and deploy again",
        )
    _check_there(status, app)
    if not status.built:
        raise _NotYet(f"{status.state or 'nothing of that name'} {status.message}".strip())


def _check_there(status: AppStatus, app: str) -> None:
    """Serve, which has taken a config with the application, still has it."""
    if not status.state and status.beside:
        raise StartError(
            f"{app} in the config that Serve was given last",
            found=f"another one, with {', '.join(status.beside)}: a second deploy came between",
            do="deploy one at a time: the last one stands; to have this one, deploy it again",
        )


def _reason(status: AppStatus) -> tuple[str, str]:
    """What Serve says of a failure, and what to do where that is an error of ours, which alone counts then."""
    message = status.message or status.state
    ours = RayserveError.from_message(_OWN_ERROR.split(message)[-1])
    if ours is None:
        return message, ""
    return ": ".join(filter(None, (ours.needed, ours.found))), ours.do


def _one_line(text: str) -> str:
    """The beginning of what may be pages of a replica's traceback."""
    return " ".join(text.split())[:SHOWN]


def _order(put: Callable[[], None]) -> None:
    try:
        put()
    except OSError as error:
        do = (
            "is the plan of this version of rayserve? `rayserve plan` writes it anew; where the answer is not "
            "Serve's, journalctl -u ray"
        )
        if "already in use" in str(error).lower():
            do = "end what has the port (`ss -ltnp` shows it), or plan with another `endpoint.port`"
        raise StartError(
            "Ray Serve to take the generated config", found=str(error), do=do
        ) from error


def _check_limits(said: str, wanted: str) -> None:
    """A replica that does not say with which limits it runs is not asked further."""
    if said not in {"", wanted}:
        raise _NotYet("it runs with the limits and keys that it had, and refused these")


def _is_dead(status: AppStatus) -> bool:
    """It has failed, and nothing of it serves: to take it away costs no request."""
    return status.state == "DEPLOY_FAILED" and not status.has_replica


def _check_gone(status: AppStatus) -> None:
    if status.state:
        raise _NotYet(f"{status.state} {status.message}".strip())


def _check_serves(
    status: AppStatus, app: str, ready_url: str, is_ready: Callable[[str], bool]
) -> None:
    if status.state == "DEPLOY_FAILED":
        left = "; what still serves of it is left: `serve shutdown -y` first, where it may go"
        found, do = _reason(status)
        raise StartError(
            f"a replica of {app} that starts",
            found=found,
            do=(do or _READ_THE_LOG) + (left if status.has_replica else ""),
        )
    _check_there(status, app)
    if status.state != "RUNNING":
        raise _NotYet(f"{status.state or 'nothing of that name'} {status.message}".strip())
    if not status.proxies_healthy:
        raise _NotYet("no healthy proxy")
    if not is_ready(ready_url):
        raise _NotYet(f"RUNNING, but {ready_url} does not answer 200")
