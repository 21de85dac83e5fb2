"""How a revision is deployed, and what is said when it does not become ready."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rayserve.clients import AppStatus, ServeDetails, app_status
from rayserve.deploy import BEYOND_ENGINE_S, DASHBOARD_S, SHOWN, TELL_S, deploy
from rayserve.errors import HostError, StartError
from rayserve.inventory import read_plan
from rayserve.serve_config import live_plan
from tests.bad_specs import ROOT

PLAN = read_plan(str(ROOT / "inventories/lab/group_vars/all/plan.yml"))
APP = f"lab-{PLAN.revision}"
START_S = PLAN.replica.start_timeout_s + BEYOND_ENGINE_S


class Clock:
    """Time that passes by sleeping."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class FakeServe:
    """Serve as a list of what it reports, the last one for ever, and of the orders that it was given."""

    def __init__(self, *states, refusal=""):
        self.states = list(states)
        self.refusal = refusal
        self.orders = []

    def status(self, app):
        assert app == APP
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(state, BaseException):
            raise state
        return state

    def deploy(self, config):
        assert [one["name"] for one in config["applications"]] == [APP]
        self._take("deploy")

    def add(self, app, config):
        assert app == APP
        assert [one["name"] for one in config["applications"]] == [APP]
        self._take("add")

    def take_away(self, app, config):
        assert app == APP
        assert config["http_options"]["port"] == PLAN.endpoint.port
        self._take("take away")

    def _take(self, order):
        if self.refusal:
            raise OSError(self.refusal)
        self.orders.append(order)


NOTHING = AppStatus("", "", proxies_healthy=False)
STARTING = AppStatus("DEPLOYING", "", proxies_healthy=False)
RUNNING = AppStatus("RUNNING", "", proxies_healthy=True)
FAILED = AppStatus("DEPLOY_FAILED", "no such model", proxies_healthy=True)
PARTLY_FAILED = AppStatus("DEPLOY_FAILED", "no room", proxies_healthy=True, has_replica=True)
DELETING = AppStatus("DELETING", "", proxies_healthy=True)
OLD_SERVES = replace(NOTHING, beside=("old",))
BUILDING = replace(STARTING, beside=("old",))
BUILT = replace(BUILDING, built=True)
AWAY = OSError("Connection refused")


WANTED = live_plan(PLAN).digest()


def run(
    serve, *, is_ready=lambda _url: True, limits_at=lambda _url: WANTED, tell=lambda _line: None
):
    """Deploy without waiting."""
    clock = Clock()
    return deploy(
        PLAN, serve, is_ready=is_ready, limits_at=limits_at, clock=clock, sleep=clock.sleep, tell=tell
    )  # fmt: skip


def test_it_waits_for_ray_then_for_the_replica():
    """A dashboard that is not up yet and a status that cannot be read are waited for."""
    serve = FakeServe(AWAY, AWAY, NOTHING, STARTING, OSError("busy"), STARTING, RUNNING)
    done = run(serve)
    assert done.app == APP
    assert done.url.endswith(f":8000/{PLAN.revision}")
    assert done.seconds == 6.0
    assert serve.orders == ["deploy"]


def test_running_is_not_enough_while_the_door_is_closed():
    """Serve's word counts only with the replica's own: /ready answers."""
    answers = iter([False, False, True])
    asked = []
    done = run(FakeServe(RUNNING), is_ready=lambda url: asked.append(url) or next(answers))
    assert done.seconds == 4.0
    assert set(asked) == {f"{done.url}/ready"}


def test_a_failed_replica_ends_the_wait_with_its_reason():
    """DEPLOY_FAILED is final; the message of the replica is shown."""
    serve = FakeServe(NOTHING, STARTING, FAILED)
    with pytest.raises(StartError, match="no such model"):
        run(serve)


def test_of_a_traceback_our_own_error_is_told():
    """Pages of Ray's frames say nothing to a person; what was needed, found and to be done does."""
    own = "a file of API keys that only the service can read\n  found: mode 0644\n  do:    chmod 0600 it"
    pages = "ray::Replica.initialize() (pid=7)\n  File 'x.py', line 3\n" * 20
    said = f"{pages}rayserve.errors.HostError: {own}\n\nThe deployment failed to start 3 times in a row."
    with pytest.raises(StartError) as error:
        run(FakeServe(NOTHING, replace(FAILED, message=said)))
    assert error.value.found == "a file of API keys that only the service can read: mode 0644"
    assert error.value.do == "chmod 0600 it"


def test_of_a_build_that_failed_our_own_error_is_told():
    """Serve puts its own word before it."""
    own = (
        "the model's config.json in /nothere\n  found: no such file\n  do:    put the weights there"
    )
    failed = replace(FAILED, message=f"Deploying app '{APP}' failed with exception:\n{own}")
    with pytest.raises(StartError) as error:
        run(FakeServe(OLD_SERVES, failed))
    assert error.value.found == "the model's config.json in /nothere: no such file"
    assert error.value.do == "put the weights there"


def test_a_replica_that_keeps_its_old_limits_is_no_success():
    """It refused the plan's, as where the new key file is not there: keys that were taken back would count on."""
    taken = iter(["old", "old", WANTED])
    assert run(FakeServe(RUNNING), limits_at=lambda _url: next(taken)).seconds == 4.0
    with pytest.raises(StartError, match="refused these") as error:
        run(FakeServe(RUNNING), limits_at=lambda _url: "old")
    assert "rayserve check host --plan" in error.value.do


def test_a_port_that_is_taken_is_no_matter_of_the_plan():
    """Serve says so at the end of a traceback."""
    with pytest.raises(StartError) as error:
        run(FakeServe(NOTHING, refusal="HTTP 500: cannot bind socket (Address already in use)"))
    assert "ss -ltnp" in error.value.do


def test_a_revision_that_had_failed_is_taken_away_and_tried_anew():
    """Serve ignores a config that equals the last one, so after a repair it must forget it first."""
    serve = FakeServe(FAILED, FAILED, DELETING, NOTHING, STARTING, RUNNING)
    assert run(serve).app == APP
    assert serve.orders == ["take away", "deploy"]


def test_a_failed_revision_that_still_serves_is_left_to_serve():
    """Only a replica beside others failed: new limits may mend it, and an outage would not."""
    mended = FakeServe(PARTLY_FAILED, STARTING, RUNNING)
    run(mended)
    assert mended.orders == ["deploy"]
    with pytest.raises(StartError, match="no room") as error:
        run(FakeServe(PARTLY_FAILED))
    assert "serve shutdown" in error.value.do


@pytest.mark.parametrize("states", [(RUNNING,), (STARTING, RUNNING)])
def test_what_runs_or_starts_is_not_taken_away(states):
    """To deploy what runs already changes nothing."""
    serve = FakeServe(*states)
    run(serve)
    assert serve.orders == ["deploy"]


@pytest.mark.parametrize(
    "states, refusal, told",
    [
        ([STARTING], "", [f"within {START_S:.0f} s", "DEPLOYING"]),
        ([RUNNING, NOTHING], "", [f"within {START_S:.0f} s", "nothing of that name"]),
        ([AWAY], "", [f"within {DASHBOARD_S:.0f} s", "Connection refused"]),
        ([RUNNING], "HTTP 400", ["HTTP 400"]),
        ([FAILED], "HTTP 400", ["HTTP 400"]),
        ([FAILED, DELETING], "", ["gone from Serve", "DELETING"]),
    ],
)
def test_it_gives_up_and_says_on_what(states, refusal, told):
    """Nothing is waited for without end; what was seen last and what Serve refuses is told."""
    with pytest.raises(StartError) as error:
        run(FakeServe(*states, refusal=refusal))
    assert [part for part in told if part not in str(error.value)] == []


def test_another_deploy_in_between_ends_the_wait():
    """An application that another config took away does not come back by waiting for it."""
    serve = FakeServe(NOTHING, STARTING, replace(NOTHING, beside=("another",)))
    with pytest.raises(StartError, match="another one, with another") as told:
        run(serve)
    assert "deploy it again" in str(told.value)


def test_another_deploy_in_between_ends_the_wait_for_the_building_too():
    """The one that is overtaken says so at once, and does not wait for two minutes."""
    serve = FakeServe(OLD_SERVES, BUILDING, replace(NOTHING, beside=("another",)))
    with pytest.raises(StartError, match="a second deploy came between"):
        run(serve)


def test_what_serves_is_taken_away_once_the_new_one_is_built():
    """Serve builds the new revision beside the old one, and only then is given it alone."""
    serve = FakeServe(OLD_SERVES, BUILDING, BUILT, BUILT, RUNNING)
    assert run(serve).app == APP
    assert serve.orders == ["add", "deploy"]


def test_what_cannot_be_built_leaves_the_old_one():
    """A revision that Serve cannot build is taken away, and what served serves on."""
    serve = FakeServe(OLD_SERVES, BUILDING, replace(FAILED, beside=("old",)))
    with pytest.raises(StartError, match="no such model") as error:
        run(serve)
    assert "what serves is left to serve" in str(error.value)
    assert serve.orders == ["add", "take away"]


@pytest.mark.parametrize(
    "ending", [HostError("the token that Ray's dashboard asks for"), KeyboardInterrupt()]
)
def test_whatever_ends_the_wait_takes_the_new_one_away(ending):
    """A token that no longer counts, or Ctrl-C, leaves the old revision alone."""
    serve = FakeServe(OLD_SERVES, BUILDING, ending)
    with pytest.raises(type(ending)):
        run(serve)
    assert serve.orders == ["add", "take away"]


def test_what_is_built_already_is_not_added_again():
    """New limits of a revision that runs beside another are one order."""
    serve = FakeServe(replace(RUNNING, built=True, beside=("old",)))
    run(serve)
    assert serve.orders == ["deploy"]


def test_neighbours_are_told_apart():
    """One of a config may be taken away, one of `serve run` not; one that is being deleted is neither."""
    config = {"deployed_app_config": {"name": "x"}}
    neighbours = {
        "config": {"status": "RUNNING", "source": "declarative", **config},
        "leaves": {"status": "DELETING", "source": "declarative", "deployed_app_config": None},
        "default": {"status": "RUNNING", "source": "imperative", "deployed_app_config": None},
        "ended": {"status": "DELETING", "source": "imperative", "deployed_app_config": None},
        APP: {"status": "RUNNING", "deployments": {"Engine": {}}, **config},
    }
    status = app_status(ServeDetails.model_validate({"applications": neighbours}), APP)
    assert (status.beside, status.kept, status.built) == (("config",), ("default",), True)


def test_what_serve_run_holds_is_refused():
    """An application that no config takes away would hold the GPUs, so nothing is ordered."""
    serve = FakeServe(replace(NOTHING, kept=("default",)))
    with pytest.raises(HostError, match="`default`, of a `serve run`"):
        run(serve)
    assert serve.orders == []


@pytest.mark.parametrize("states", [[], [NOTHING, STARTING]])
def test_a_refused_token_ends_every_wait_at_once(states):
    """Before and after the order: no time changes it."""
    refused = HostError("the token that Ray's dashboard asks for", found="HTTP 401")
    clock = Clock()
    with pytest.raises(HostError, match="HTTP 401"):
        deploy(PLAN, FakeServe(*states, refused), clock=clock, sleep=clock.sleep)
    assert clock.now <= 2.0


def test_a_wait_is_told_before_it_begins_and_while_it_lasts():
    """First what is waited for and how long at most, then every half minute what was seen."""
    told = []
    traceback = "Traceback:\n" + "  line\n" * 1000
    polls = int(TELL_S / 2.0) + 1
    starting = [AppStatus("DEPLOYING", traceback, proxies_healthy=False)] * (2 * polls)
    run(FakeServe(NOTHING, *starting, RUNNING), tell=told.append)
    assert told[:2] == [
        f"waiting for Ray's dashboard (--dashboard-port names its port), at most {DASHBOARD_S:.0f} s",
        f"waiting for a ready replica of {APP}, at most {START_S:.0f} s",
    ]
    assert [line.split(":")[0] for line in told[2:4]] == ["  after 30 s", "  after 60 s"]
    assert all("DEPLOYING Traceback: line line" in line for line in told[2:4])
    assert "limits and keys" in told[4]
    assert all(len(line) < SHOWN + 20 and "\n" not in line for line in told)


def test_what_is_waited_for_is_told_before_it_is_asked():
    """A dashboard that takes its time to answer leaves nobody before an empty screen."""
    told = []

    class Slow(FakeServe):
        def status(self, app):
            assert told
            return super().status(app)

    run(Slow(NOTHING, RUNNING), tell=told.append)
    assert len(told) == 3
