"""Where do benchmarks write, and what do they measure?"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rayserve.inventory import read_plan
from rayserve.plan import Plan
from tests.served import make_plan

OUT = Path(__file__).resolve().parents[1] / "build" / "bench"
"""Results; files of the same name are replaced."""
RUNS = OUT / "runs"
"""Every run's result, with the time in its name."""
PLAN_VARIABLE = "RAYSERVE_BENCH_PLAN"
"""Path of a plan.yml to measure instead of the demo's model."""


@contextmanager
def workbench(env: Mapping[str, str] | None = None) -> Iterator[tuple[Plan, Path]]:
    """A plan, and a folder that goes in the end. Its path is short: HAProxy's sockets lie in it.

    `env`: the environment of the demo model's engine.
    """
    RUNS.mkdir(parents=True, exist_ok=True)
    # Being told to stop is a way out like any other: what was started is stopped on the way.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="rsb-", dir="/tmp") as name:
        given = os.environ.get(PLAN_VARIABLE)
        yield (read_plan(given) if given else make_plan(Path(name), env=env or {})), Path(name)


def write(name: str, text: str, stamp: str) -> Path:
    """Write a result under its name, and once more under the time of the run."""
    (RUNS / f"{name}-{stamp}.json").write_text(text)
    path = OUT / f"{name}.json"
    path.write_text(text)
    return path
