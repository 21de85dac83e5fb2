"""From two bare hosts to an answer over TLS: the playbook `site`, on real test hosts.

The tests stand in the order in which they must run: bare hosts, a run, a second one, then what goes wrong.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest

from tests.hosts.site import (
    CONTROLLER,
    INVENTORY,
    LAB,
    RECOVERY_S,
    ROOT,
    RUN_S,
    call,
    lab,
    play,
    ssh,
)

pytestmark = [pytest.mark.root, pytest.mark.timeout(2 * RUN_S)]


@pytest.fixture(scope="module")
def bare():
    """Two bare hosts: their addresses by name."""
    if os.geteuid() or not shutil.which("podman"):
        pytest.skip("test hosts need root and Podman")
    call(sys.executable, "scripts/build_wheels.py", "--lock", "cpu")
    call(sys.executable, "-m", "rayserve.demo.model", LAB / "model")
    lab("down")
    certificate.cache_clear()
    try:
        yield json.loads(lab("up"))
    finally:
        lab("down")


@pytest.fixture(scope="module")
def site(bare):
    """The same hosts after a run of the playbook: the address of the gateway."""
    counts = play()
    assert all(count["changed"] for count in counts.values())
    return bare["node1"]


def secret(name):
    """A secret of the lab, which is JSON under a comment."""
    text = (INVENTORY / "group_vars/all/secrets.yml").read_text()
    return json.loads(text.partition("\n")[2])[name]


@functools.cache
def certificate(address):
    """The gateway's certificate, read on the host itself."""
    return ssh(address, "sudo cat /etc/haproxy/tls/gateway.pem")


def ask(address, path, body=None, *, key="", timeout=60):
    """Status and JSON of a request to the public door; a status of 0: it does not answer."""
    context = ssl.create_default_context(cadata=certificate(address))
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"https://{address}{path}", data=data, headers=headers)
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    try:
        with opener.open(request, timeout=timeout) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, None
    except OSError:
        return 0, None


def chat(address, key=""):
    """Status and answer of one question."""
    question = {
        "model": "demo",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 16,
    }
    return ask(address, "/v1/chat/completions", question, key=key)


def wait_until_it_answers(address):
    """Wait until a question is answered again; seconds that it took."""
    began = time.monotonic()
    while ask(address, "/ready", timeout=5)[0] != 200:
        assert time.monotonic() - began < RECOVERY_S, ssh(address, "systemctl --failed; uptime")
        time.sleep(2)
    assert chat(address, secret("serve_api_keys")[0])[0] == 200
    return time.monotonic() - began


def test_check_mode_on_bare_hosts_tells_and_changes_nothing(bare):
    """`--check --diff` of the first run ends well, and leaves neither user nor folder."""
    counts = play("--check", "--diff")
    assert all(count["failed"] == 0 and count["changed"] > 10 for count in counts.values())
    for address in bare.values():
        folders = "/etc/rayserve /opt/rayserve /srv/models"
        assert ssh(address, f"ls -d {folders} 2>/dev/null; id rayserve || true") == ""


def test_a_chat_completion_over_tls_with_a_key(site):
    """From outside the hosts, through the gateway, the model answers who has a key, and nobody else."""
    status, answer = chat(site, secret("serve_api_keys")[0])
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["message"]["content"].strip()
    assert chat(site)[0] == 401


@pytest.mark.parametrize("path", ["/-/routes", "/-/healthz", "/metrics", "/docs"])
def test_the_gateway_has_no_way_to_serves_own_paths(site, path):
    """What Serve answers without a key is not reached from outside."""
    assert ask(site, path)[0] in (401, 404)


PORTS = (6379, 6380, 8000, 8265, 8404, 9080, 9101, 10001, 52365)


@pytest.mark.parametrize("port", PORTS)
def test_no_port_of_ray_or_serve_is_open(bare, site, port):
    """The firewall drops what does not come from the cluster, on every host; this machine is not part of it."""
    for address in bare.values():
        with pytest.raises(TimeoutError):
            socket.create_connection((address, port), timeout=2)


def test_only_the_service_user_reaches_the_gateways_socket(site):
    """HAProxy's admin socket belongs to the service user alone."""
    told = ssh(site, "sudo stat -c '%U %a' /run/haproxy/rayserve.sock")
    assert told.split() == ["rayserve", "600"]


def test_secrets_are_readable_by_the_service_user_alone(site):
    """Keys and token are files of the service user, in a folder that others cannot enter."""
    names = "/etc/rayserve/api_keys /etc/rayserve/ray_token"
    lines = ssh(site, f"sudo stat -c '%U %a' {names}; stat -c %a /etc/rayserve").splitlines()
    assert lines == ["rayserve 400", "rayserve 400", "750"]


def test_a_second_run_changes_nothing(site):
    """The playbook describes a state: once reached, it leaves the hosts alone."""
    counts = play()
    found = {name: (one["changed"], one["failed"]) for name, one in counts.items()}
    assert found == {"node1": (0, 0), "node2": (0, 0)}


def test_both_hosts_serve_again_after_a_reboot(bare, site):
    """Nobody has to do anything: firewall, Ray, the application and the gateway come back by themselves."""
    call(
        CONTROLLER / "ansible", "-i", INVENTORY, "cluster", "--become",
        "--module-name", "ansible.builtin.reboot",
    )  # fmt: skip
    print(f"serving again after {wait_until_it_answers(site):.0f} s")
    for address in bare.values():
        told = ssh(address, "systemctl is-active ray rayserve-firewall")
        assert told.split() == ["active", "active"]


def test_a_head_whose_ray_is_killed_serves_again(site):
    """systemd starts Ray anew, and what Ray has forgotten is deployed again."""
    ssh(site, "sudo systemctl kill --kill-whom=main --signal=KILL ray")
    deadline = time.monotonic() + 60
    while ask(site, "/ready", timeout=5)[0] == 200:
        assert time.monotonic() < deadline, "it never stopped"
        time.sleep(1)
    print(f"serving again after {wait_until_it_answers(site):.0f} s")


def copied_inventory(name):
    """A copy of the lab's inventory under build/."""
    copy = ROOT / "build" / name
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(INVENTORY, copy)
    return copy


def refused(*arguments, inventory=INVENTORY, playbook="site.yml"):
    """What a playbook says that has to fail."""
    with pytest.raises(AssertionError) as told:
        play(*arguments, inventory=inventory, playbook=playbook)
    return str(told.value)


def test_rules_that_somebody_flushed_are_seen_and_loaded_again(bare, site):
    """Without its table a host fails `verify`, the next run loads it, and a reload of nftables keeps it."""
    other = bare["node2"]
    ssh(other, "sudo nft flush ruleset")
    assert "no such table" in refused(playbook="playbooks/verify.yml")
    counts = play(playbook="playbooks/hosts.yml")
    assert {name: one["changed"] for name, one in counts.items()} == {"node1": 0, "node2": 1}
    ssh(other, "sudo systemctl start nftables")
    play(playbook="playbooks/hosts.yml")
    for verb in ("reload", "restart"):
        ssh(other, f"sudo systemctl {verb} nftables")
        assert "policy drop" in ssh(other, "sudo nft list chain inet rayserve input")


def test_a_plan_that_ray_does_not_fit_is_not_deployed(bare, site):
    """Serve's replicas stay while Ray lacks the plan's environment, at a second run too; a restart brings both."""
    copy = copied_inventory("restart")
    plan = copy / "group_vars/all/plan.yml"
    text = plan.read_text().replace(
        "RAY_worker_niceness, value: '0'", "RAY_worker_niceness, value: '1'"
    )
    assert text != plan.read_text()
    plan.write_text(text)
    before = process_of_ray(site)
    for _ in range(2):
        assert "nothing was deployed" in refused(inventory=copy)
        assert chat(site, secret("serve_api_keys")[0])[0] == 200
    assert process_of_ray(site) == before
    play("-e", "ray_allow_restart=true", inventory=copy)
    assert process_of_ray(site) != before
    environ = ssh(site, "sudo cat /proc/$(systemctl show ray -P MainPID)/environ | tr '\\0' '\\n'")
    assert "RAY_worker_niceness=1" in environ.splitlines()
    wait_until_it_answers(site)
    play("-e", "ray_allow_restart=true")
    wait_until_it_answers(site)


def inventory_without(name):
    """A copy of the lab's inventory whose plan has one host less; the host is in the group `retired`."""
    copy = copied_inventory("retired")
    hosts = json.loads((copy / "hosts.yml").read_text().partition("\n")[2])
    groups = hosts["all"]["children"]
    groups["retired"] = {"hosts": {name: groups["cpu"]["hosts"].pop(name)}}
    (copy / "hosts.yml").write_text(json.dumps(hosts))
    spec = copy / "group_vars" / "all" / "cluster.yml"
    spec.write_text(spec.read_text().replace("hosts: 2", "hosts: 1"))
    call(sys.executable, "-m", "rayserve.cli", "plan", copy)
    return copy


ALIVE = """
import json, urllib.request
token = open('/etc/rayserve/ray_token').read()
request = urllib.request.Request('http://127.0.0.1:8265/api/v0/nodes',
                                 headers={'Authorization': 'Bearer ' + token})
nodes = json.load(urllib.request.urlopen(request))['data']['result']['result']
print(*sorted(node['node_ip'] for node in nodes if node['state'] == 'ALIVE'))
"""


def alive(head):
    """Addresses of Ray's nodes, as the head's dashboard tells them."""
    return ssh(head, f'sudo python3 -c "{ALIVE}"').split()


def process_of_ray(address):
    """When Ray's main process on a host has started, and its number."""
    return ssh(address, "systemctl show ray --property ExecMainPID,ExecMainStartTimestamp")


class Client:
    """Asks one question after the other, in the background, and keeps the statuses."""

    def __init__(self, address):
        self.statuses = []
        self._address = address
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def _ask(self):
        key = secret("serve_api_keys")[0]
        while not self._done.wait(0.5):
            self.statuses.append(chat(self._address, key)[0])

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._done.set()
        self._thread.join(timeout=90)


def test_a_host_leaves_a_cluster_that_serves_on(bare, site):
    """`remove-host` drains the host and takes from it what the roles made; no request fails meanwhile."""
    before = process_of_ray(site)
    with Client(site) as client:
        play(inventory=inventory_without("node2"), playbook="playbooks/remove-host.yml")
    assert len(client.statuses) > 10
    assert set(client.statuses) == {200}
    assert alive(site) == [site]
    assert process_of_ray(site) == before
    left = ssh(
        bare["node2"],
        "systemctl is-active ray rayserve-firewall; ls -d /opt/rayserve /etc/rayserve/* || true",
    )
    assert left.split() == ["inactive", "inactive"]


def test_a_host_joins_a_cluster_that_serves(bare, site):
    """`add-host` brings it back; Ray on the other host is not restarted, and no request fails."""
    before = process_of_ray(site)
    with Client(site) as client:
        play(playbook="playbooks/add-host.yml")
    assert set(client.statuses) == {200}
    assert alive(site) == sorted(bare.values())
    assert process_of_ray(site) == before


def own_certificate():
    """A PEM with a certificate for one DNS name, signed by an authority that nobody trusts, and its key."""
    folder = LAB / "own"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    call(
        "openssl",
        "req",
        "-x509",
        *new,
        "-subj",
        "/CN=authority",
        "-keyout",
        folder / "ca.key",
        "-out",
        folder / "ca.pem",
    )
    call(
        "openssl", "req", "-x509", *new, "-CA", folder / "ca.pem", "-CAkey", folder / "ca.key", "-subj", "/CN=own",
        "-addext", "subjectAltName=DNS:*.own.test", "-addext", "basicConstraints=critical,CA:FALSE",
        "-keyout", folder / "key.pem", "-out", folder / "cert.pem",
    )  # fmt: skip
    pem = folder / "gateway.pem"
    pem.write_text((folder / "cert.pem").read_text() + (folder / "key.pem").read_text())
    return pem


def test_verify_asks_by_a_name_of_the_certificate(site):
    """A certificate of your own, which names no address, is loaded in place of the old one, and `verify` asks by its name."""
    own = ("-e", f"gateway_certificate={own_certificate()}", "-e", "gateway_self_signed=false")
    play(*own, playbook="playbooks/gateway.yml")
    play(*own, playbook="playbooks/verify.yml")
    with socket.create_connection((site, 443), timeout=10) as plain:
        context = ssl.create_default_context(cafile=LAB / "own/ca.pem")
        with context.wrap_socket(plain, server_hostname="gateway.own.test") as secured:
            assert ("DNS", "*.own.test") in secured.getpeercert()["subjectAltName"]
    ssh(site, "sudo rm /etc/haproxy/tls/gateway.pem /etc/haproxy/tls/gateway.pem.key")
    play(playbook="playbooks/gateway.yml")
    certificate.cache_clear()
    assert chat(site, secret("serve_api_keys")[0])[0] == 200


def test_teardown_leaves_hosts_open_and_empty(bare, site):
    """`teardown` stops everything and removes the roles' files; without the cluster's name it does nothing."""
    command = [CONTROLLER / "ansible-playbook", "-i", INVENTORY, "playbooks/teardown.yml", "-e"]
    with pytest.raises(AssertionError, match="the name of this cluster"):
        call(*command, "teardown_name=other")
    assert chat(site, secret("serve_api_keys")[0])[0] == 200
    call(*command, "teardown_name=lab")
    for address in bare.values():
        left = ssh(
            address,
            "systemctl is-active ray rayserve-serve rayserve-firewall haproxy; ls -d /opt/rayserve || true",
        )
        assert set(left.split()) == {"inactive"}
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, 6379), timeout=2)
