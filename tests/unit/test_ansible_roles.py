"""Do the roles keep to the house's rules: one home for each default, own names, templates that say what the plan says?"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import jinja2
import pytest
import yaml

from rayserve import ingress, ports, schema
from rayserve.haproxy import HAPROXY_BINARY
from rayserve.inventory import read_plan, read_yaml
from rayserve.plan import PLAN_KEY
from tests.bad_specs import ROOT

ROLES = sorted(path for path in (ROOT / "roles").iterdir() if path.is_dir())
WITH_OWN_SPECS = [role for role in ROLES if role.name != "preflight"]
TASK_FILES = sorted((ROOT / "roles").glob("*/tasks/*.yml")) + sorted(
    (ROOT / "playbooks").glob("*.yml")
)
TEXTS = (
    TASK_FILES
    + sorted((ROOT / "roles").glob("*/templates/*"))
    + sorted((ROOT / "roles").glob("*/handlers/*.yml"))
)
TASK_LINES = 120
PLAN = ROOT / "inventories" / "lab" / "group_vars" / "all" / "plan.yml"


def name(path):
    """A path as a test's id."""
    return str(path.relative_to(ROOT))


def load(path):
    """A YAML file; an empty dict where there is none."""
    return yaml.safe_load(path.read_text()) or {} if path.is_file() else {}


def options(role):
    """The options of a role's main entry."""
    return load(role / "meta" / "argument_specs.yml")["argument_specs"]["main"]["options"]


@pytest.mark.parametrize("role", WITH_OWN_SPECS, ids=name)
def test_each_default_is_the_one_of_the_argument_spec(role):
    """What Ansible documents as a default is the value that the role uses: it applies none by itself."""
    documented = {
        key: option["default"] for key, option in options(role).items() if "default" in option
    }
    assert documented == load(role / "defaults" / "main.yml")
    assert documented


@pytest.mark.parametrize("role", WITH_OWN_SPECS, ids=name)
def test_each_option_is_required_or_has_a_default(role):
    """No option of a role may silently be missing, and each says what it is."""
    for key, option in options(role).items():
        assert option.get("required", False) is ("default" not in option), key
        assert option["description"].endswith("."), key


@pytest.mark.parametrize("role", ROLES, ids=name)
def test_a_role_names_its_own_variables_with_its_name(role):
    """Inputs, internal variables, facts and registered results carry the role's name."""
    found = {*load(role / "defaults" / "main.yml"), *load(role / "vars" / "main.yml")}
    for path in role.glob("tasks/*.yml"):
        found |= set(re.findall(r"register: (\w+)", path.read_text()))
    assert [key for key in sorted(found) if not key.startswith(f"{role.name}_")] == []


SECRETS = {"ray_token", "serve_api_keys"}


@pytest.mark.parametrize("path", sorted((ROOT / "playbooks").glob("*.yml")), ids=name)
def test_a_playbook_gives_each_role_what_it_requires(path):
    """What a role requires stands beside it in the playbook, but for secrets, which are the inventory's."""
    for play in yaml.safe_load(path.read_text()):
        for entry in play.get("roles", []):
            if entry["role"] != "preflight":
                wanted = options(ROOT / "roles" / entry["role"])
                required = {key for key, option in wanted.items() if option.get("required")}
                assert required - SECRETS <= entry.get("vars", {}).keys() <= wanted.keys()


def test_secrets_are_marked_as_such():
    """Ansible keeps the values of such options out of its messages."""
    marked = {
        key
        for role in WITH_OWN_SPECS
        for key, option in options(role).items()
        if option.get("no_log")
    }
    assert marked == SECRETS


def test_preflight_validates_the_plan_as_the_package_defines_it():
    """`rayserve schema argument-specs` is what the role preflight checks a plan against."""
    assert (ROOT / "roles/preflight/meta/argument_specs.yml").read_text() == schema.render(
        "argument-specs"
    )


@pytest.mark.parametrize("path", TASK_FILES, ids=name)
def test_task_files_are_short(path):
    """A file of tasks can be read at once."""
    assert len(path.read_text().splitlines()) <= TASK_LINES


@pytest.mark.parametrize("path", TEXTS, ids=name)
def test_no_error_is_ignored_and_no_value_of_the_plan_has_a_second_default(path):
    """Failures stop a run, and what the plan leaves out is decided in the spec alone."""
    text = path.read_text()
    assert "ignore_errors" not in text
    assert re.findall(rf"{PLAN_KEY}[^}}]*\| *default\(", text) == []


def test_the_rules_find_what_they_forbid():
    """The pattern of the test above matches a default on a value of the plan."""
    assert re.findall(rf"{PLAN_KEY}[^}}]*\| *default\(", "{{ rayserve_plan.seed | default(0) }}")


def render(template, **variables):
    """A template as Ansible renders it, as far as it needs no filter of Ansible's own."""
    environment = jinja2.Environment(
        trim_blocks=True, undefined=jinja2.StrictUndefined, autoescape=False
    )
    text = (ROOT / "roles" / template).read_text()
    data = read_yaml(str(PLAN)) | variables
    return environment.from_string(text).render(ansible_managed="managed", **data)


def test_ray_gets_the_environment_of_the_plan(monkeypatch):
    """The file that systemd reads says what `rayserve env` prints on a host, path of the command included."""
    monkeypatch.setattr(ingress, "_command", lambda command: f"/opt/rayserve/venvs/a/bin/{command}")
    text = render(
        "ray/templates/ray.env.j2",
        ray_venv="/opt/rayserve/venvs/a",
        ray_node_ip="192.0.2.1",
        ray__work_dir="/r",
        ray_digest="0",
        ray_replica_digest="1",
    )
    lines = [line.partition("=") for line in text.splitlines() if not line.startswith("#")]
    written = {key: "".join(shlex.split(value)) for key, _, value in lines}
    wanted = ingress.node_environment(read_plan(str(PLAN)))
    assert wanted[HAPROXY_BINARY].startswith("/opt")
    assert wanted.items() <= written.items()
    assert written.keys() - wanted.keys() == {
        "RAY_AUTH_TOKEN_PATH", "PATH", "RAY_TMPDIR", "VLLM_CACHE_ROOT", "VLLM_HOST_IP",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "RAYSERVE_RAY_DIGEST", "RAYSERVE_REPLICA_DIGEST",
    }  # fmt: skip


UNTIL_TOLD = ROOT / "roles/ray/files/until_told.py"
LIKE_RAY = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(sys.argv[1])))
print("up", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("own, seen", [(1, 0), (0, 0), (3, 3)])
def test_a_told_stop_is_no_failure(own, seen):
    """Told to stop, a command that ends with 1 as Ray does has stopped well; any other code is its own."""
    command = [sys.executable, UNTIL_TOLD, sys.executable, "-c", LIKE_RAY, str(own)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"up\n"
        process.terminate()
        assert process.wait(timeout=20) == seen


@pytest.mark.parametrize(
    "ending, seen",
    [("sys.exit(1)", 1), ("sys.exit(0)", 0), ("os.kill(os.getpid(), 9)", 128 + 9)],
)
def test_a_command_that_ends_by_itself_ends_as_it_did(ending, seen):
    """Without being told, Ray's 1 stays the failure that it is, and a killed command is none that ended well."""
    code = f"import os, sys; {ending}"
    done = subprocess.run(
        [sys.executable, UNTIL_TOLD, sys.executable, "-c", code], timeout=20, check=False
    )
    assert done.returncode == seen


def test_the_gates_before_ray_are_not_covered_by_what_excuses_its_stop():
    """The unit has no SuccessExitStatus, which would hold for a broken ExecStartPre as well."""
    assert "SuccessExitStatus=" not in (ROOT / "roles/ray/templates/ray.service.j2").read_text()


GATEWAY = {
    "gateway_max_connections": 10,
    "gateway_admin_user": "rayserve",
    "gateway_port": 443,
    "gateway_stream_s": 77,
    "gateway_servers": ["192.0.2.2", "192.0.2.1"],
}


@pytest.mark.parametrize(
    "environment, seconds",
    [([{"name": "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", "value": "235"}], 235), ([], 77)],
)
def test_the_gateway_lets_streams_run_as_long_as_serve_does(environment, seconds):
    """The plan's limit holds; with Serve's own proxy, for which the plan has none, the role's."""
    plan = read_yaml(str(PLAN))[PLAN_KEY] | {"environment": environment}
    text = render("gateway/templates/haproxy.cfg.j2", **GATEWAY, **{PLAN_KEY: plan})
    assert f"timeout server {seconds}s\n" in text
    assert f"hard-stop-after {seconds}s\n" in text


def test_the_gateway_passes_to_the_revision_alone():
    """Every path from outside gets the revision's prefix, so that Serve's own paths have no way through."""
    plan = read_plan(str(PLAN))
    text = render("gateway/templates/haproxy.cfg.j2", **GATEWAY)
    assert f"http-request set-path /{plan.revision}%[path]\n" in text
    assert text.count("bind ") == 1
    assert re.findall(r"server (\S+) (\S+)\n", text) == [
        ("192.0.2.1", "192.0.2.1:8000"),
        ("192.0.2.2", "192.0.2.2:8000"),
    ]


def test_the_firewall_opens_the_port_that_the_gateway_listens_on():
    """Where an inventory names no port, the play of the hosts assumes the default of the role gateway."""
    port = load(ROOT / "roles/gateway/defaults/main.yml")["gateway_port"]
    assert f"gateway_port | default({port})" in (ROOT / "playbooks/hosts.yml").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "inventories").glob("*/hosts.yml")), ids=name)
def test_an_inventory_has_the_hosts_of_its_plan(path):
    """Each node pool of the plan is a group of as many hosts, each with its address in the cluster."""
    children = load(path)["all"]["children"]
    for pool in load(path.parent / "group_vars/all/plan.yml")[PLAN_KEY]["node_pools"]:
        hosts = children[pool["name"]]["hosts"]
        assert len(hosts) == pool["hosts"]
        assert all("node_ip" in about for about in hosts.values())
    assert len(children["ray_head"]["hosts"]) == 1
    assert children["gateway"]["hosts"]


def test_the_role_gives_ray_the_ports_that_spec_and_checks_know():
    """What `rayserve.ports` keeps free for Ray is where the role `ray` lets it listen."""
    found = load(ROOT / "roles" / "ray" / "vars" / "main.yml")["ray__ports"]
    workers = {"first_worker": ports.WORKERS[0], "last_worker": ports.WORKERS[-1]}
    assert found == {**ports.RAY, **workers}
