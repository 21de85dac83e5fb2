"""What do the kernel log, nvidia-smi and CUDA say of the GPUs? In this order, and never in this process.

The kernel log first: where it reports a lost GPU, every further question may hang. A call into CUDA is
made by a child, which may die or hang without us.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from rayserve.health.checks.fabric import FabricFacts
from rayserve.health.checks.gpu import CudaFact, GpuFacts, at_work
from rayserve.health.facts.as_user import python
from rayserve.health.facts.pci import nvidia_devices
from rayserve.health.facts.run import Output, Runner, run
from rayserve.health.readings.kernel_log import Fault, faults
from rayserve.health.readings.nvidia_smi import (
    Matrix,
    SmiReading,
    UnreadableError,
    parse_matrix,
    parse_query,
)

LOG_S, SMI_S, CUDA_S = 10.0, 30.0, 60.0
"""nvidia-smi takes a second a GPU without persistence mode; cuInit on eight GPUs up to ten."""
PROBE = """
import ctypes, json
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    print(json.dumps({"missing": True}))
else:
    code, count = cuda.cuInit(0), ctypes.c_int(0)
    if code == 0:
        code = cuda.cuDeviceGetCount(ctypes.byref(count))
    print(json.dumps({"code": code, "devices": count.value}))
"""
LOGS = (
    ("journalctl", "--dmesg", "--boot", "--no-pager", "--output", "short-iso"),
    ("dmesg", "--time-format", "iso"),
    ("dmesg",),
)
"""The journal first: the kernel's own buffer forgets what is old."""
KERNEL_LINE = re.compile(
    r"\b(?:kernel:|Linux version|NVRM:|nvidia-)|^\[ *\d+\.\d+\]|^\d{4}-\d\d-\d\dT", re.MULTILINE
)


def read_gpu_facts(*, root: Path = Path("/"), run: Runner = run) -> GpuFacts:
    """All facts of the GPUs. Without one on the PCI bus nothing is called."""
    on_bus, _ = nvidia_devices(root)
    if not on_bus:
        return GpuFacts(on_bus=0, smi=None, log=())
    log = read_log(run)
    smi, ending = read_smi(run)
    # A driver that does not answer nvidia-smi holds up CUDA too, and what waits there cannot be killed.
    hung = smi is None and ending.startswith("no answer")
    cuda = CudaFact(0, ending="not asked: nvidia-smi did not come back") if hung else read_cuda(run)
    return GpuFacts(on_bus=on_bus, smi=smi, smi_ending=ending, cuda=cuda, log=log)


def read_log(run: Runner) -> tuple[Fault, ...] | None:
    """Faults of this boot; None where nobody lets us read the kernel log."""
    for command in LOGS:
        answer = run(command, LOG_S)
        # journalctl ends well where it may read nothing, and says "No entries".
        if answer.ok and KERNEL_LINE.search(answer.text):
            return tuple(faults(answer.text.splitlines()))
    return None


XML = re.compile(r"<nvidia_smi_log>.*</nvidia_smi_log>", re.DOTALL)
WARNINGS = frozenset({"exit code 14"})
"""nvidia-smi's own code for a corrupt infoROM, beside a whole answer."""


def read_smi(run: Runner) -> tuple[SmiReading | None, str]:
    """nvidia-smi's answer, or why there is none."""
    answer = run(["nvidia-smi", "-q", "-x"], SMI_S)
    whole = XML.search(answer.text)  # warnings may stand around it
    if not whole or not (answer.ok or answer.ending in WARNINGS):
        said = answer.text.strip().splitlines()
        why = answer.ending or "not the XML of nvidia-smi"
        return None, f"{why}: {said[-1][:120]}" if said and not whole else why
    try:
        return parse_query(whole[0]), ""
    except UnreadableError as error:
        return None, str(error)


def read_cuda(run: Runner) -> CudaFact | None:
    """cuInit in a child; None: there is no libcuda.so.1."""
    answer = run(python(PROBE), CUDA_S)
    return parse_cuda(answer)


def parse_cuda(answer: Output) -> CudaFact | None:
    """The answer of `PROBE`."""
    if not answer.ok:
        return CudaFact(0, ending=answer.ending)
    try:
        said = json.loads(answer.text.strip().splitlines()[-1])
        return None if "missing" in said else CudaFact(int(said["code"]), int(said["devices"]))
    except (ValueError, LookupError, TypeError):
        return CudaFact(0, ending=f"an answer that is none: {answer.text[:80]!r}")


def read_fabric_facts(*, root: Path = Path("/"), run: Runner = run) -> FabricFacts:
    """The ways between GPUs, without a measurement."""
    on_bus, _ = nvidia_devices(root)
    if on_bus < 2:
        return FabricFacts(on_bus)
    smi, ending = read_smi(run)
    if smi is None and ending.startswith("no answer"):
        return FabricFacts(on_bus, busy=at_work(smi))
    states = tuple(gpu.fabric_state for gpu in smi.gpus) if smi is not None else ()
    return FabricFacts(
        on_bus=on_bus,
        topology=_matrix(run, ["nvidia-smi", "topo", "-m"]),
        peers=_matrix(run, ["nvidia-smi", "topo", "-p2p", "n"]),
        fabric_states=states if any(states) else (),
        busy=at_work(smi),
    )


def _matrix(run: Runner, command: list[str]) -> Matrix | None:
    answer = run(command, SMI_S)
    try:
        return parse_matrix(answer.text) if answer.ok else None
    except UnreadableError:
        return None
