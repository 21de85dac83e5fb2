"""What is installed here? Reads this Python environment and this machine; judges nothing.

The heavy imports run in a child process under a time limit: a broken package may hang, or kill the
process outright.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from rayserve.health.checks.install import ImportFact, InstallFacts
from rayserve.health.facts.run import ending_of

IMPORT_BUDGET_S = 300.0
"""The imports take under 10 s on two cores; from a cold, busy disk, minutes."""

PROBE = """
import json, sys, time

def torch():
    import torch

def transformers():
    import transformers.image_utils  # brings in torchvision where there is one; vLLM needs it

def kernels():
    # vLLM chooses the kernel library that this processor can run; to import vllm._C by name is
    # death by SIGILL on one without AVX-512.
    from vllm.platforms import current_platform
    current_platform.import_kernels()
    import torch
    if current_platform.is_cpu():
        torch.ops._C.init_cpu_memory_env
    else:
        import vllm._C_stable_libtorch

for module, step in (("torch", torch), ("transformers", transformers), ("vllm", kernels)):
    print(json.dumps({"begin": module}), flush=True)
    started, error = time.monotonic(), ""
    try:
        step()
    except BaseException as problem:
        error = f"{type(problem).__name__}: {problem}".splitlines()[0]
    print(json.dumps({"module": module, "seconds": time.monotonic() - started, "error": error}),
          flush=True)
"""


def read_install_facts(*, imports: bool = True, budget_s: float = IMPORT_BUDGET_S) -> InstallFacts:
    """All facts of the environment that this process runs in. Takes as long as the imports."""
    return InstallFacts(
        python=(sys.version_info.major, sys.version_info.minor),
        executable=sys.executable,
        distributions=read_distributions(),
        imports=read_imports(PROBE, budget_s=budget_s) if imports else (),
        libnuma=has_libnuma(),
        shm_bytes=read_shm_bytes(Path("/dev/shm")),
    )


def read_distributions() -> dict[str, str]:
    """Version by distribution name (lower case, dashes) of everything installed here."""
    out: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        # To parse the whole of each, descriptions and all, takes four times as long.
        text = next(filter(None, map(distribution.read_text, ("METADATA", "PKG-INFO", ""))), "")
        head = dict(re.findall(r"^(Name|Version): *(\S+)", text.split("\n\n", 1)[0], re.MULTILINE))
        if len(head) == 2:  # a half-removed distribution has no metadata
            out.setdefault(re.sub(r"[-_.]+", "-", head["Name"]).lower(), head["Version"])
    return out


def has_libnuma() -> bool:
    """Whether the dynamic loader finds libnuma.so.1."""
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        return False
    return True


def read_shm_bytes(path: Path) -> int | None:
    """The size of a mounted shared-memory folder, or None where there is none."""
    try:
        stat = os.statvfs(path)
    except OSError:
        return None
    return stat.f_frsize * stat.f_blocks


def read_imports(probe: str, *, budget_s: float) -> tuple[ImportFact, ...]:
    """Run an import probe in a child and read how far it came.

    A step that the child did not survive is reported with the signal that ended it, or as a
    timeout; the steps after it are not reported.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    started = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-c", probe],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=budget_s,
            env=environment,
            check=False,
        )
        output, ending = done.stdout, ending_of(done.returncode)
    except subprocess.TimeoutExpired as expired:
        output = (expired.stdout or b"").decode(errors="replace")
        ending = f"no answer within {budget_s:.0f} s"
    return parse_imports(output, ending=ending, elapsed_s=time.monotonic() - started)


def parse_imports(output: str, *, ending: str, elapsed_s: float) -> tuple[ImportFact, ...]:
    """The facts in a probe's output; a step that was begun and not ended gets `ending`."""
    facts: list[ImportFact] = []
    begun = ""
    for line in output.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # a library that prints
        if not isinstance(row, dict):
            continue
        if "begin" in row:
            begun = row["begin"]
        elif "module" in row:
            facts.append(ImportFact(row["module"], row["seconds"], row["error"]))
            begun = ""
    if begun or (ending and not facts):
        facts.append(ImportFact(begun or "python", elapsed_s, ending or "ended early"))
    return tuple(facts)
