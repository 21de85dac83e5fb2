"""How a test asks the test hosts: by a command on the controller, over SSH, by a playbook."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "build" / "lab"
INVENTORY = ROOT / "inventories" / "lab"
CONTROLLER = ROOT / ".venv-ansible" / "bin"
RUN_S = 1500
"""For a whole run on two busy cores; on a quiet machine it takes six minutes."""
RECOVERY_S = 400
"""For Ray, Serve and the engine to start anew, all on the same two cores."""


def call(*command, timeout=RUN_S):
    """Output of a command; the test fails with it where the command does."""
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, env=environment, timeout=timeout,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return done.stdout


def lab(verb):
    """Start or remove the test hosts."""
    return call(ROOT / "tests/hosts/enter", "/usr/bin/python3", ROOT / "tests/hosts/lab.py", verb)


def ssh(address, command):
    """Output of a shell command on a host."""
    known = f"UserKnownHostsFile={LAB}/known_hosts"
    return call("ssh", "-i", LAB / "key", "-o", known, f"ansible@{address}", command, timeout=60)


def play(*arguments, inventory=INVENTORY, playbook="site.yml"):
    """Run a playbook; what each host counts, by its name."""
    output = call(CONTROLLER / "ansible-playbook", "-i", inventory, playbook, *arguments)
    recap = output.partition("PLAY RECAP")[2]
    return {
        line.split()[0]: {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", line)}
        for line in recap.splitlines()
        if "ok=" in line
    }
