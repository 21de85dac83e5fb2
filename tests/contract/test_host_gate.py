"""The host checks against real parts: this machine, a C library in CUDA's place, torch's all-reduce."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rayserve.health.facts.all_reduce import measure_all_reduce
from rayserve.health.facts.gpu import PROBE, parse_cuda
from rayserve.health.facts.run import run

pytestmark = pytest.mark.contract
STUB = """
#include <unistd.h>
#include <stdlib.h>
int cuInit(unsigned flags) { %s }
int cuDeviceGetCount(int *count) { *count = 8; return 0; }
"""


@pytest.fixture
def cuda(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """Makes a libcuda.so.1 whose cuInit does what is given; it stands in for hardware we lack."""

    def make(body: str) -> dict[str, str]:
        source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so.1"
        source.write_text(STUB % body)
        compiler = shutil.which("cc")
        assert compiler, "a C compiler is needed: apt-get install gcc"
        command = [compiler, "-shared", "-fPIC", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
        return {"LD_LIBRARY_PATH": str(tmp_path)}

    return make


@pytest.mark.parametrize(
    "body, code, devices, ending",
    [
        ("return 0;", 0, 8, ""),
        ("return 802;", 802, 0, ""),
        ("abort();", 0, 0, "killed by SIGABRT"),
        ("sleep(60); return 0;", 0, 0, "no answer within 2 s"),
    ],
)
def test_cuda_is_asked_in_a_child(
    cuda: Callable[[str], dict[str, str]], body: str, code: int, devices: int, ending: str
) -> None:
    """A library that answers, refuses, dies or hangs is told apart, and we live."""
    fact = parse_cuda(run([sys.executable, "-c", PROBE], 2, env=cuda(body)))
    assert fact is not None
    assert (fact.code, fact.devices, fact.ending) == (code, devices, ending)


def test_an_all_reduce_is_measured() -> None:
    """Two processes add 16 MiB each; the sum is checked and a time comes back."""
    fact = measure_all_reduce(2, size_bytes=2**24, rounds=3, backend="gloo", budget_s=100)
    assert fact.ending == ""
    assert 0 < fact.bus_gb_s < 1000


def test_ranks_that_do_not_finish_are_stopped() -> None:
    """The measurement is over when its budget is, and says so."""
    began = time.monotonic()
    fact = measure_all_reduce(2, size_bytes=2**24, backend="gloo", budget_s=0.5)
    assert fact.ending == "no answer within 0.5 s"
    assert time.monotonic() - began < 10


def test_every_check_of_this_machine_says_something() -> None:
    """`check all --json` gives a verdict for each check, or the reason why there is none."""
    done = subprocess.run(
        [sys.executable, "-m", "rayserve.cli", "check", "all", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    results = json.loads(done.stdout)["checks"]
    assert done.returncode == (4 if any(one["status"] == "fail" for one in results) else 0)
    assert len(results) > 30
    assert all(one["why"] for one in results if one["status"] == "skip")
