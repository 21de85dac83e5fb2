"""Is the environment of a plan printed as shells, systemd and programs read it?"""

from __future__ import annotations

import json
import shlex
import subprocess

import pytest

from rayserve import ingress
from rayserve.planner.render import environment_lines
from tests.bad_specs import ROOT
from tests.command import plan_files, run


def test_env_for_a_shell(env):
    """`rayserve env` prints exports that a shell takes."""
    run("plan", env)
    output = run("env", plan_files(env)[0]).output
    script = output + 'printf %s "$RAY_SERVE_ENABLE_HA_PROXY"'
    process = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert process.stdout == "1"


def test_env_for_systemd_and_as_json(env):
    """The same values come as KEY=VALUE lines and as a JSON object."""
    run("plan", env)
    lines = run("env", plan_files(env)[0], "--systemd").output.splitlines()
    values = json.loads(run("env", plan_files(env)[0], "--json").output)
    read = [line.partition("=") for line in lines]
    assert {key: "".join(shlex.split(value)) for key, _, value in read} == values
    assert int(values["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) > 600


@pytest.mark.parametrize("name, mode", [("demo", "disabled"), ("example", "token")])
def test_whether_ray_asks_for_a_token_is_always_said(monkeypatch, name, mode):
    """Ray would else ask for a token that happens to lie in somebody's home, and its clients send none."""
    monkeypatch.setattr(ingress, "_command", str)
    plan = ROOT / "inventories" / name / "group_vars/all/plan.yml"
    assert json.loads(run("env", plan, "--json").output)["RAY_AUTH_MODE"] == mode


@pytest.mark.parametrize("content", ["a: [", "a: 1", "rayserve_plan: 3", ""])
def test_env_of_something_else(tmp_path, content):
    """A file that is no plan is refused with a message."""
    (tmp_path / "plan.yml").write_text(content)
    result = run("env", tmp_path / "plan.yml")
    assert result.exit_code == 2
    assert "rayserve plan" in result.output


def test_systemd_values_are_quoted_where_they_must_be():
    """A value with blanks, quotes or dollars is one quoted value of an EnvironmentFile."""
    text = environment_lines({"NAME": 'a "b" $c \\', "PLAIN": "/a/b-c"}, systemd=True)
    assert text == r'NAME="a \"b\" \$c \\"' + "\nPLAIN=/a/b-c"
