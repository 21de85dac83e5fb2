"""What does a whole plan load, in a fresh process?"""

from __future__ import annotations

import json
import subprocess
import sys

from tests.bad_specs import ROOT

HEAVY = {"torch", "vllm", "ray", "transformers", "numpy", "pandas"}
MOST_BYTES = 150_000_000
CHILD = """
import json, sys
from rayserve.cli import main
try:
    main(["plan", "inventories/example", "--out", sys.argv[1]])
except SystemExit as end:
    assert not end.code, end.code
with open("/proc/self/status") as file:
    peak = next(line.split()[1] for line in file if line.startswith("VmHWM"))
print(json.dumps({"modules": sorted(sys.modules), "peak_bytes": int(peak) * 1024}))
"""


def test_a_plan_of_405b_loads_no_engine_and_little_memory(tmp_path):
    """Planning needs none of the libraries that it plans for, and stays within 150 MB."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        capture_output=True, text=True, cwd=ROOT, check=True,
    )  # fmt: skip
    assert (tmp_path / "plan.yml").is_file()
    told = json.loads(done.stdout.splitlines()[-1])
    assert {name.partition(".")[0] for name in told["modules"]} & HEAVY == set()
    assert told["peak_bytes"] <= MOST_BYTES
