"""How a revision is deployed, and what is said when it does not become ready."""

from __future__ import annotations

import pytest

from rayserve.clients import AppStatus, read_token
from rayserve.deploy import BEYOND_ENGINE_S, DASHBOARD_S, deploy
from rayserve.errors import HostError, StartError
from rayserve.inventory import read_plan
from tests.bad_specs import ROOT

PLAN = read_plan(str(ROOT / "inventories/lab/group_vars/all/plan.yml"))
APP = f"lab-{PLAN.revision}"


class Clock:
    """Time that passes by sleeping."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class FakeServe:
    """Serve as a list of the states that it reports, the last one for ever."""

    def __init__(self, *states, up_after=0, refusal=""):
        self.states = list(states)
        self.up_after = up_after
        self.refusal = refusal
        self.deployed = []

    def is_up(self):
        self.up_after -= 1
        return self.up_after < 0

    def deploy(self, config):
        if self.refusal:
            raise OSError(self.refusal)
        self.deployed.append(config)

    def status(self, app):
        assert app == APP
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(state, OSError):
            raise state
        return state


STARTING = AppStatus("DEPLOYING", "", proxies_healthy=False)
RUNNING = AppStatus("RUNNING", "", proxies_healthy=True)


def run(serve, *, is_ready=lambda _url: True):
    """Deploy without waiting."""
    clock = Clock()
    return deploy(PLAN, serve, is_ready=is_ready, clock=clock, sleep=clock.sleep)


def test_it_waits_for_ray_then_for_the_replica():
    """A dashboard that is not up yet and a status that cannot be read are waited for."""
    serve = FakeServe(STARTING, OSError("busy"), STARTING, RUNNING, up_after=3)
    done = run(serve)
    assert done.app == APP
    assert done.url.endswith(f":8000/{PLAN.revision}")
    assert done.seconds == 6.0
    assert [one["applications"][0]["name"] for one in serve.deployed] == [APP]


def test_running_is_not_enough_while_the_door_is_closed():
    """Serve's word counts only with the replica's own: /ready answers."""
    answers = iter([False, False, True])
    asked = []
    done = run(FakeServe(RUNNING), is_ready=lambda url: asked.append(url) or next(answers))
    assert done.seconds == 4.0
    assert set(asked) == {f"{done.url}/ready"}


def test_a_failed_replica_ends_the_wait_with_its_reason():
    """DEPLOY_FAILED is final; the message of the replica is shown."""
    serve = FakeServe(STARTING, AppStatus("DEPLOY_FAILED", "no such model", proxies_healthy=True))
    with pytest.raises(StartError, match="no such model"):
        run(serve)


@pytest.mark.parametrize(
    "serve, needed",
    [
        (FakeServe(STARTING), f"within {PLAN.replica.start_timeout_s + BEYOND_ENGINE_S:.0f} s"),
        (FakeServe(RUNNING, up_after=10**6), f"within {DASHBOARD_S:.0f} s"),
        (FakeServe(RUNNING, refusal="HTTP 400"), "HTTP 400"),
    ],
)
def test_it_gives_up_and_says_on_what(serve, needed):
    """Neither Ray nor the replica is waited for without end; what Serve refuses is told."""
    with pytest.raises(StartError, match=needed):
        run(serve)


def test_a_token_that_cannot_be_read_is_named(tmp_path):
    """A missing and an empty token file say which file, and what to do; a good one is read."""
    path = tmp_path / "token"
    with pytest.raises(HostError, match=str(path)):
        read_token(str(path))
    path.write_text("\n")
    with pytest.raises(HostError, match="empty"):
        read_token(str(path))
    path.write_text("abc\n")
    assert read_token(str(path)) == "abc"
