"""Do `serve run` and the generated config start the product, and refuse bad arguments in one message?"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml

from rayserve.clients import ServeApi
from rayserve.deploy import deploy
from rayserve.errors import HostError
from rayserve.plan import PLAN_KEY
from rayserve.serve_config import serve_config
from tests.ray_cluster import RayCluster, wait_until
from tests.served import first_token, make_plan

PLAIN_PORT = 8000
"""Where a plain `serve run` listens: Ray has no setting for it."""
SERVE = str(Path(sys.executable).with_name("serve"))


@pytest.fixture(scope="module")
def folder():
    """One model and one plan for all tests here."""
    with tempfile.TemporaryDirectory(prefix="rsr-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def plan(folder):
    """A plan without keys, which is only allowed on loopback through Serve's own proxy."""
    made = make_plan(folder, endpoint={"ingress": "proxy", "api_key_file": ""})
    (folder / "plan.yml").write_text(yaml.safe_dump({PLAN_KEY: made.as_dict()}, sort_keys=False))
    return made


@pytest.fixture(scope="module")
def cluster(plan):
    """A Ray with no environment prepared at all."""
    with RayCluster(num_gpus=plan.replica.placement.gpus, num_cpus=4) as running:
        yield running


def serve_run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """Run `serve run …` to its end."""
    return subprocess.run(
        [SERVE, "run", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path.cwd()), **(env or {})},
    )


def refusal(result: subprocess.CompletedProcess) -> str:
    """The one readable message of a refused run."""
    text = result.stdout + result.stderr
    assert result.returncode != 0, text
    assert "Traceback" not in text
    assert "Error: " in text
    return text


@contextmanager
def running(cluster: RayCluster, log: Path, *arguments: str) -> Iterator[None]:
    """`serve run …` in the background; ended by Ctrl-C, as a person would."""
    with log.open("w") as file:
        process = subprocess.Popen(
            [SERVE, "run", *arguments],
            stdout=file,
            stderr=file,
            env=cluster.environ,
            start_new_session=True,
        )
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGINT)
            process.wait(60)


def check_free(port: int) -> None:
    """Fail by the port's name where another program has it, and not after minutes without a token."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            pytest.fail(f"port {port}, which a plain `serve run` takes: {error.strerror}")


def test_a_plain_serve_run_warns_and_serves(folder, plan, cluster):
    """With nothing prepared it goes through Serve's own proxy, says what is missing, and answers."""
    check_free(PLAIN_PORT)
    log = folder / "run.log"
    with running(cluster, log, "rayserve.app:build", f"plan={folder / 'plan.yml'}"):
        url = f"http://127.0.0.1:{PLAIN_PORT}"
        wait_until(lambda: first_token(url, {}, "demo"), 240, "a token from `serve run`")
        text = log.read_text()
        assert "warning: the environment of this plan is not set" in text
        assert "RAY_worker_niceness=0" in text
        # No config takes its application away: `rayserve deploy` names it, and orders nothing.
        with pytest.raises(HostError, match="`default`, of a `serve run`"):
            deploy(plan, ServeApi(cluster.dashboard_port, ""))


def test_the_generated_config_runs(folder, plan, cluster):
    """`serve run serve.yml` serves under the revision's route, on the plan's port."""
    path = folder / "generated.yml"
    config = serve_config(plan)
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    with running(cluster, folder / "config.log", str(path)):
        url = f"http://127.0.0.1:{plan.endpoint.port}/{plan.revision}"
        wait_until(lambda: first_token(url, {}, "demo"), 240, "a token from the generated config")
        assert not first_token(f"http://127.0.0.1:{plan.endpoint.port}", {}, "demo")


def test_an_unknown_argument_is_refused(folder, plan):
    """A misspelt key is named; nothing starts."""
    text = refusal(serve_run("rayserve.app:build", f"plan={folder / 'plan.yml'}", "pln=x"))
    assert "argument `pln`" in text


def test_no_argument_is_refused():
    """The message says which arguments there are."""
    assert "plan=<plan.yml>" in refusal(serve_run("rayserve.app:build"))


def test_a_missing_plan_is_refused(folder):
    """The path is in the message."""
    assert "nowhere.yml" in refusal(serve_run("rayserve.app:build", "plan=nowhere.yml"))


def edited(plan, folder: Path, name: str, **replica: object) -> Path:
    """A plan whose replica was edited by hand."""
    data = {PLAN_KEY: copy.deepcopy(plan.as_dict())}
    data[PLAN_KEY]["replica"].update(replica)
    path = folder / name
    path.write_text(yaml.safe_dump(data))
    return path


def test_a_plan_edited_by_hand_is_refused(plan, folder):
    """Its revision no longer is the replica's hash."""
    path = edited(plan, folder, "edited.yml", served_model_name="other")
    assert "not edited by hand" in refusal(serve_run("rayserve.app:build", f"plan={path}"))


def test_a_production_plan_refuses_an_unprepared_environment(plan, folder):
    """It names what is missing, and the command that prints it."""
    data = {PLAN_KEY: plan.as_dict() | {"profile": "production"}}
    path = folder / "production.yml"
    path.write_text(yaml.safe_dump(data))
    text = refusal(serve_run("rayserve.app:build", f"plan={path}"))
    assert "rayserve env" in text
    assert "RAY_worker_niceness=0" in text


def test_haproxy_without_keys_is_refused(plan, folder):
    """Serve's HAProxy binds 0.0.0.0."""
    text = refusal(
        serve_run(
            "rayserve.app:build",
            f"plan={folder / 'plan.yml'}",
            env={"RAY_SERVE_ENABLE_HA_PROXY": "1"},
        )
    )
    assert "API key file" in text


def deploy_failure(cluster, config: dict) -> str:
    """Deploy a config that cannot work; how long it takes is part of the behaviour."""
    begin = time.monotonic()
    cluster.deploy(config)
    (name,) = [application["name"] for application in config["applications"]]

    def failed() -> str | None:
        found = cluster.serve_status()["applications"].get(name, {})
        return found["message"] if found.get("status") == "DEPLOY_FAILED" else None

    message = str(wait_until(failed, 60, "DEPLOY_FAILED"))
    assert "Traceback" not in message
    assert time.monotonic() - begin < 60
    assert not [g for g in cluster.placement_groups() if name in g["name"]]
    return message


def test_a_bad_argument_in_a_serve_config_fails_before_any_gang_is_taken(plan, cluster):
    """The application ends as DEPLOY_FAILED with our message; no placement group was asked for."""
    config = serve_config(plan)
    config["applications"][0]["args"]["replica"]["served_model_name"] = "other"
    assert "not edited by hand" in deploy_failure(cluster, config)


def test_an_unknown_key_in_a_serve_config_fails_before_any_gang_is_taken(plan, cluster):
    """The key is in the message."""
    config = serve_config(plan)
    config["applications"][0]["args"]["repica"] = {}
    assert "argument `repica`" in deploy_failure(cluster, config)


@pytest.mark.parametrize(
    "keys, profile, told",
    [("no-keys", "local", "a readable file of API keys"), ("", "production", "an API key file")],
)
def test_a_door_that_cannot_open_is_told_before_the_engine_starts(
    plan, cluster, folder, keys, profile, told
):
    """Weights of hundreds of gigabytes are not read for a missing key file, or for none at all."""
    config = serve_config(plan.model_copy(update={"profile": profile}))
    (application,) = config["applications"]
    # A production start would be refused for its environment before: it has what it asks for.
    application["args"]["environment"] = [{"name": "HOME", "value": ""}]
    (deployment,) = application["deployments"]
    deployment["user_config"]["door"]["api_key_file"] = keys and str(folder / keys)
    message = replica_refusal(cluster, config, told)
    assert "check_limits" in message  # and not the door's, which opens once the engine is warm


def replica_refusal(cluster, config: dict, told: str) -> str:
    """Deploy it, and the message of the replica that says this."""
    cluster.deploy(config)
    (application,) = config["applications"]

    def refusal_of_replica() -> str | None:
        found = cluster.serve_status()["applications"].get(application["name"], {})
        messages = [one["message"] for one in found.get("deployments", {}).values()]
        return next((text for text in messages if told in text), None)

    return str(wait_until(refusal_of_replica, 60, "the replica's refusal"))


def test_an_engine_that_is_not_ready_in_its_budget_is_ended_with_its_children(
    plan, cluster, folder
):
    """The replica's own clock ends the start, says how far it came, and leaves no process of vLLM."""
    (folder / "late").mkdir()
    late = make_plan(
        folder / "late",
        endpoint={"ingress": "proxy", "api_key_file": ""},
        timeouts={"start_s": 4, "stall_s": 3, "health_timeout_s": 2},
    )
    message = replica_refusal(cluster, serve_config(late), "within the start budget of 4 s")
    assert "not ready after phases" in message
    assert "raise timeouts.start_s" in message
    cluster.deploy({"applications": []})

    def ended() -> bool:
        with contextlib.suppress(psutil.Error):
            return not [one for one in cluster.members() if one.name().startswith("VLLM")]
        return False

    wait_until(ended, 60, "the end of vLLM's processes")


def test_a_door_without_keys_opens_to_no_network(plan):
    """What Serve's proxies really bind decides, whatever the plan says of loopback."""
    config = serve_config(plan)
    config["http_options"]["host"] = "0.0.0.0"
    with RayCluster(num_gpus=plan.replica.placement.gpus, num_cpus=4) as open_cluster:
        message = replica_refusal(open_cluster, config, "an API key file")
        assert "none, and Serve listens on 0.0.0.0" in message
        assert "check_limits" in message


def rayserve(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """A `rayserve` command, to its end."""
    command = [sys.executable, "-m", "rayserve.cli", *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=240, env=env
    )


def test_deploy_ends_with_the_reason_where_serve_run_does_not_end(plan, cluster, folder):
    """A replica that refuses its config is exit code 5 and its own words; a wrong plan is code 2."""
    door = plan.door.model_copy(update={"api_key_file": str(folder / "no-keys")})
    path = folder / "keyless.yml"
    data = {PLAN_KEY: plan.model_copy(update={"door": door}).as_dict()}
    path.write_text(yaml.safe_dump(data))
    words = ["deploy", str(path), "--dashboard-port", str(cluster.dashboard_port)]
    done = rayserve(*words, env=cluster.environ)
    assert done.returncode == 5, done.stdout + done.stderr
    assert str(folder / "no-keys") in done.stderr
    assert "waiting for a ready replica of" in done.stderr
    assert "  do:    " in done.stderr
    data[PLAN_KEY]["repica"] = {}
    path.write_text(yaml.safe_dump(data))
    done = rayserve(*words, env=cluster.environ)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "repica" in done.stderr


def test_check_args_judges_a_serve_config_without_ray(plan, folder):
    """`rayserve check args` is the same judgement with an exit code, before anything is deployed."""
    config = serve_config(plan)
    good = folder / "serve.yml"
    good.write_text(yaml.safe_dump(config, sort_keys=False))
    config["applications"][0]["args"]["replica"]["served_model_name"] = "other"
    bad = folder / "bad-serve.yml"
    bad.write_text(yaml.safe_dump(config, sort_keys=False))
    passed = rayserve("check", "args", "--json", str(good))
    failed = rayserve("check", "args", "--json", str(bad))
    assert passed.returncode == 0, passed.stdout + passed.stderr
    assert failed.returncode == 2
    assert "not edited by hand" in json.loads(failed.stdout)["do"]
    config = serve_config(plan)
    config["applications"][0]["args"]["repica"] = {}
    bad.write_text(yaml.safe_dump(config, sort_keys=False))
    failed = rayserve("check", "args", "--json", str(bad))
    assert failed.returncode == 2
    assert "repica" in failed.stdout
