"""How do two test hosts become the inventory `lab`? Starts them and writes what differs from run to run.

    tests/hosts/enter python3 tests/hosts/lab.py up        hosts, hosts.yml, secrets.yml, known_hosts
    tests/hosts/enter python3 tests/hosts/lab.py down      removes all of it

The model and the wheels are made before (`make hosts-up`), and mounted into the hosts as a share would be.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import hosts

ROOT = hosts.HERE.parent.parent
INVENTORY = ROOT / "inventories" / "lab"
LAB = ROOT / "build" / "lab"
NAMES = ("node1", "node2")
MOUNTS = (f"{ROOT}/build/wheelhouse:/srv/wheelhouse:ro", f"{LAB}/model:/srv/source/model:ro")
SSH_WAIT_S = 60


def up() -> None:
    """Start the hosts and write the inventory."""
    LAB.mkdir(parents=True, exist_ok=True)
    key = LAB / "key"
    if not key.is_file():
        hosts.call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
    hosts.up(NAMES, suite="bookworm", key=key.with_suffix(".pub"), disks=0, mounts=MOUNTS)
    addresses = hosts.addresses()
    (LAB / "model.sums").write_text(sums(LAB / "model"))
    (LAB / "known_hosts").write_text("".join(host_keys(addresses[name]) for name in NAMES))
    write(INVENTORY / "hosts.yml", inventory(addresses, key))
    secret = INVENTORY / "group_vars" / "all" / "secrets.yml"
    if not secret.is_file():
        write(
            secret,
            {"ray_token": secrets.token_hex(32), "serve_api_keys": [secrets.token_urlsafe(24)]},
        )
    print(json.dumps(addresses))


def inventory(addresses: dict[str, str], key: Path) -> dict[str, object]:
    """hosts.yml: the first host is head and gateway too."""
    known = f"-o UserKnownHostsFile={LAB}/known_hosts -o GlobalKnownHostsFile=/dev/null"
    nodes = {name: {"ansible_host": addresses[name], "node_ip": addresses[name]} for name in NAMES}
    first = {NAMES[0]: {}}
    groups = {
        "cpu": {"hosts": nodes},
        "ray_head": {"hosts": first},
        "cluster": {"children": {"cpu": {}, "ray_head": {}}},
        "gateway": {"hosts": first},
    }
    access = {
        "ansible_user": "ansible",
        "ansible_ssh_private_key_file": str(key),
        "ansible_ssh_common_args": known,
    }
    return {"all": {"vars": access, "children": groups}}


def host_keys(address: str) -> str:
    """The public keys of a host's SSH server, once it answers."""
    deadline = time.monotonic() + SSH_WAIT_S
    while not (found := hosts.call("ssh-keyscan", "-T", "2", address, check=False)):
        if time.monotonic() > deadline:
            raise hosts.HostsError(f"{address} does not answer on port 22")
        time.sleep(1)
    return found


def sums(folder: Path) -> str:
    """As `sha256sum *` prints them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if not files:
        raise hosts.HostsError(f"no model in {folder}: make hosts-up")
    return "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}\n"
        for path in files
    )


def write(path: Path, data: dict[str, object]) -> None:
    """Write YAML that needs no library (JSON is YAML), for this user's eyes alone from the first byte on."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(f"# Written by tests/hosts/lab.py.\n{json.dumps(data, indent=2)}\n")


def down() -> None:
    """Remove hosts, network and what was written."""
    hosts.down(())
    for path in (INVENTORY / "hosts.yml", INVENTORY / "group_vars" / "all" / "secrets.yml"):
        path.unlink(missing_ok=True)


def main() -> int:
    """The command line; returns the exit code."""
    verbs = {"up": up, "down": down}
    if len(sys.argv) != 2 or sys.argv[1] not in verbs:
        print("usage: lab.py up|down", file=sys.stderr)
        return 2
    try:
        verbs[sys.argv[1]]()
    except (hosts.HostsError, subprocess.SubprocessError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main())
