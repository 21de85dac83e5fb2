"""Are the GPUs those of the plan, sound, free, and does CUDA start?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rayserve.health.checks.driver import without_gpu
from rayserve.health.checks.kernel_log import check_log
from rayserve.health.checks.wanted import Wanted
from rayserve.health.readings.kernel_log import Fault
from rayserve.health.readings.nvidia_smi import GpuReading, SmiReading
from rayserve.health.results import Check, CheckResult

MEMORY_SHARE = 0.03
"""nvidia-smi counts a little more than CUDA."""
FREE_SHARE = 0.02
"""Of a GPU's memory that the driver itself may hold when nothing runs."""
REMAPPED_ROWS = 512
"""Rows that an A100 or H100 can replace in its life (NVIDIA, GPU memory error management)."""
CUDA_ERRORS = {
    3: ("the driver did not initialize", "see `dmesg | grep NVRM`"),
    100: ("CUDA sees no GPU", "CUDA_VISIBLE_DEVICES may be empty, or the device files are missing"),
    802: (
        "system not yet initialized: the NVSwitches are not set up",
        "systemctl restart nvidia-fabricmanager; then: journalctl -u nvidia-fabricmanager",
    ),
    803: (
        "the driver's libraries are of another version than its module",
        "drain this host and reboot it",
    ),
    804: (
        "forward compatibility on a GPU that does not have it",
        "install a newer driver, and no cuda-compat",
    ),
    999: ("an unknown error", "reset the GPUs, or reboot; see `dmesg | grep -i xid`"),
}
"""cuInit's codes (cuda.h) and what they mean on a serving host."""


@dataclass(frozen=True, slots=True)
class CudaFact:
    """What cuInit and the count of devices answered in a child process."""

    code: int
    """CUDA's error; 0: none."""
    devices: int = 0
    ending: str = ""
    """How the child ended, where it did not answer: a signal, or no answer in time."""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What was read of the GPUs."""

    on_bus: int
    """NVIDIA GPUs on the PCI bus."""
    smi: SmiReading | None
    """None: nvidia-smi is missing, or did not answer."""
    smi_ending: str = ""
    """Why there is no answer."""
    cuda: CudaFact | None = None
    """None: there is no libcuda.so.1."""
    log: tuple[Fault, ...] | None = None
    """Of this boot's kernel log; None: it could not be read."""


def check_gpu(
    facts: GpuFacts, wanted: Wanted | None = None, *, before_start: bool = False
) -> list[CheckResult]:
    """All verdicts on the GPUs. `before_start`: nothing may hold their memory yet."""
    return [
        check_log(facts.log, facts.on_bus, recovered=has_recovered(facts.smi)),
        check_count(facts, wanted),
        *(check(facts.smi, facts.on_bus) for check in _OF_EACH),
        check_memory(facts.smi, before_start=before_start),
        check_cuda(facts, wanted),
    ]


def _skip(check: Check, on_bus: int) -> CheckResult:
    return check.skipped("nvidia-smi did not answer" if on_bus else "no NVIDIA GPU on the PCI bus")


def check_count(facts: GpuFacts, wanted: Wanted | None) -> CheckResult:
    """Are all GPUs there, of the plan's model and memory?"""
    expected = f"{wanted.gpus} x {wanted.model}" if wanted else "every GPU on the PCI bus"
    check = Check("gpus", expected, "gpu-lost")
    need = wanted.gpus if wanted else facts.on_bus
    if not facts.on_bus:
        return without_gpu(check, wanted)
    if facts.smi is None:
        return check.failed(
            f"{facts.on_bus} on the PCI bus; nvidia-smi: {facts.smi_ending or 'no answer'}",
            why="the driver does not answer",
            do="rayserve check host says whether it is loaded; a hang needs a reboot",
        )
    found = facts.smi.gpus
    kinds = sorted({gpu.name for gpu in found})
    if len(found) < need:
        return check.failed(
            f"{len(found)}, {facts.on_bus} on the PCI bus",
            why="a GPU is lost: it fell off the bus, or the driver gave it up",
            do="dmesg | grep -iE 'xid|fallen off'; reboot; if it stays away, have it replaced",
        )
    if wanted is not None:
        wrong = [gpu for gpu in found if not _is(gpu, wanted)]
        if wrong:
            return check.failed(
                f"GPU {wrong[0].index} is {wrong[0].name}, {wrong[0].memory_mib} MiB",
                why="the plan's proof that the model fits is of another GPU",
                do="correct `gpu` in cluster.yml and plan again",
            )
    return check.passed(f"{len(found)} x {', '.join(kinds)}")


def _is(gpu: GpuReading, wanted: Wanted) -> bool:
    named = wanted.label.lower().replace("-", "") in gpu.name.lower().replace("-", "").replace(
        " ", ""
    )
    if gpu.memory_mib is None:
        return named
    return named and abs(gpu.memory_mib / wanted.memory_mib - 1) <= MEMORY_SHARE


def check_mig(smi: SmiReading | None, on_bus: int) -> CheckResult:
    """Are the GPUs whole?"""
    check = Check("mig", "MIG off on every GPU", "mig")
    if smi is None or not smi.gpus:
        return _skip(check, on_bus)
    cut = [gpu.index for gpu in smi.gpus if gpu.mig]
    if not cut:
        return check.passed("off")
    return check.failed(
        f"on: GPU {_list(cut)}",
        why="a process sees one slice alone, so ranks cannot reach each other (vllm issue 7211)",
        do=f"drain this host, then: nvidia-smi -mig 0 -i {','.join(map(str, cut))}",
    )


def check_ecc(smi: SmiReading | None, on_bus: int) -> CheckResult:
    """Is ECC on, and has it met no error since the driver was loaded?"""
    check = Check("ecc", "on, without uncorrectable errors", "gpu-memory")
    if smi is None or not smi.gpus:
        return _skip(check, on_bus)
    struck = [gpu for gpu in smi.gpus if gpu.volatile_uncorrectable]
    if struck:
        each = ", ".join(f"GPU {gpu.index}: {gpu.volatile_uncorrectable}" for gpu in struck)
        return check.failed(
            f"uncorrectable errors, {each}",
            why="a rank that reads such memory is killed; uncontained, others on the GPU are too",
            do="drain this host and reset the GPU (nvidia-smi -r -i N); if it comes back, replace it",
        )
    off = [gpu.index for gpu in smi.gpus if gpu.ecc is False]
    if off:
        return check.warned(
            f"off: GPU {_list(off)}",
            why="a flipped bit goes unnoticed into answers",
            do="nvidia-smi -e 1, then reboot (GeForce cards have no ECC)",
        )
    return check.passed("no uncorrectable error")


def check_rows(smi: SmiReading | None, on_bus: int) -> CheckResult:
    """Are all faulty memory rows replaced, with some to spare?"""
    check = Check("memory-rows", "no row that waits or failed to be remapped", "gpu-memory")
    if smi is None or not smi.gpus:
        return _skip(check, on_bus)
    broken = [gpu.index for gpu in smi.gpus if gpu.remap_failed]
    if broken:
        return check.failed(
            f"remapping failed: GPU {_list(broken)}",
            why="the GPU has no spare row left where it needs one",
            do="have this GPU replaced (NVIDIA's criterion for return)",
        )
    waiting = [gpu.index for gpu in smi.gpus if gpu.remap_pending]
    if waiting:
        return check.failed(
            f"a row waits: GPU {_list(waiting)}",
            why="until the GPU is reset the faulty row is avoided only, not replaced",
            do=f"drain this host, then: nvidia-smi -r -i {waiting[0]}, or reboot",
        )
    worn = [gpu for gpu in smi.gpus if (gpu.remapped_uncorrectable or 0) >= REMAPPED_ROWS]
    if worn:
        return check.failed(
            f"GPU {worn[0].index}: {worn[0].remapped_uncorrectable} rows remapped",
            why=f"{REMAPPED_ROWS} is all that a GPU can replace",
            do="have this GPU replaced",
        )
    known = [gpu for gpu in smi.gpus if gpu.remap_pending is not None]
    if not known:
        return check.skipped("these GPUs do not report it")
    return check.passed(
        f"{sum(gpu.remapped_uncorrectable or 0 for gpu in known)} remapped, none waits"
    )


def check_recovery(smi: SmiReading | None, on_bus: int) -> CheckResult:
    """Does the driver itself ask for a reset or a reboot?"""
    check = Check("recovery", "no GPU that must be reset", "xid")
    if smi is None or not smi.gpus:
        return _skip(check, on_bus)
    if not any(gpu.recovery for gpu in smi.gpus):
        return check.skipped("this driver does not report it")
    asked = [gpu for gpu in smi.gpus if gpu.recovery not in ("", "None")]
    if not asked:
        return check.passed("none")
    return check.failed(
        "; ".join(f"GPU {gpu.index}: {gpu.recovery}" for gpu in asked),
        why="the driver has met a fault that only this mends",
        do="drain this host, then do what it says: nvidia-smi -r -i N, or reboot",
    )


def has_recovered(smi: SmiReading | None) -> bool:
    """Every GPU's driver says that nothing is left to mend."""
    return smi is not None and bool(smi.gpus) and all(gpu.recovery == "None" for gpu in smi.gpus)


def check_clocks(smi: SmiReading | None, on_bus: int) -> CheckResult:
    """Does heat or power hold the clocks down?"""
    check = Check("clocks", "not slowed by heat or power", "gpu-slow")
    if smi is None or not smi.gpus:
        return _skip(check, on_bus)
    slow = [gpu for gpu in smi.gpus if gpu.slowed]
    if not slow:
        return check.passed("not slowed")
    each = "; ".join(f"GPU {gpu.index}: {', '.join(gpu.slowed)}" for gpu in slow)
    return check.warned(
        each,
        why="all ranks of a replica wait for the slowest",
        do="look at fans, air flow and power supplies; nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER",
    )


def check_pcie(smi: SmiReading | None, on_bus: int) -> CheckResult:
    """Has every GPU all its PCIe lanes?"""
    check = Check("pcie", "all lanes of every GPU", "gpu-slow")
    if smi is None or not smi.gpus:
        return _skip(check, on_bus)
    narrow = [
        gpu for gpu in smi.gpus if gpu.link_width and gpu.link_width < (gpu.link_width_max or 0)
    ]
    if not narrow:
        return check.passed("all")
    one = narrow[0]
    return check.warned(
        f"GPU {one.index}: x{one.link_width} of x{one.link_width_max}",
        why="loading weights and offloading KV blocks take as much longer",
        do="reseat the board or its riser, then reboot",
    )


def check_persistence(smi: SmiReading | None, on_bus: int) -> CheckResult:
    """Does the driver stay loaded between processes?"""
    check = Check("persistence", "on", "driver")
    if smi is None or not smi.gpus:
        return _skip(check, on_bus)
    off = [gpu.index for gpu in smi.gpus if gpu.persistence is False]
    if not off:
        return check.passed("on")
    return check.warned(
        f"off: GPU {_list(off)}",
        why="each start sets the GPU up anew, which takes seconds, and settings are lost",
        do="systemctl enable --now nvidia-persistenced",
    )


_OF_EACH = (
    check_recovery,
    check_mig,
    check_ecc,
    check_rows,
    check_clocks,
    check_pcie,
    check_persistence,
)


def check_memory(smi: SmiReading | None, *, before_start: bool) -> CheckResult:
    """Before a start: is the memory of every GPU free, and who holds it?"""
    check = Check("gpu-memory", "free before a start", "gpu-memory-held")
    if not before_start:
        return check.skipped("asked before a start only (--before-start)")
    if smi is None or not smi.gpus:
        return check.skipped("nvidia-smi did not answer")
    held = [gpu for gpu in smi.gpus if _is_held(gpu)]
    if not held:
        return check.passed("free")
    one = held[0]
    return check.failed(
        f"GPU {_list([gpu.index for gpu in held])}: {one.used_mib} of {one.memory_mib} MiB used by "
        + _owners(held),
        why="vLLM refuses to start where less is free than it was told to take",
        do="stop these processes by their ids; none visible: look in containers, else reset the GPU",
    )


def _owners(gpus: Sequence[GpuReading]) -> str:
    names = sorted({f"{one.name or '?'} ({one.pid})" for gpu in gpus for one in gpu.processes})
    return ", ".join(names) or "no process that is visible here"


def at_work(smi: SmiReading | None) -> str:
    """Who uses the GPUs, or why that is not known; empty: they are idle.

    Utilization counts beside a process alone: a driver without persistence shows some for its own start.
    """
    if smi is None or not smi.gpus:
        return "nvidia-smi did not say whether they are"
    busy = [gpu for gpu in smi.gpus if _is_held(gpu) or (gpu.processes and gpu.utilization)]
    if not busy:
        return ""
    return f"GPU {_list([gpu.index for gpu in busy])} in use by {_owners(busy)}"


def _is_held(gpu: GpuReading) -> bool:
    if gpu.used_mib is None or not gpu.memory_mib:
        return bool(gpu.processes)
    return gpu.used_mib > FREE_SHARE * gpu.memory_mib


def check_cuda(facts: GpuFacts, wanted: Wanted | None) -> CheckResult:
    """Does CUDA itself start? nvidia-smi may list all GPUs where no program can use one."""
    need = wanted.gpus if wanted else facts.on_bus
    check = Check("cuda", f"starts, with {need} devices", "fabric-manager")
    if not facts.on_bus:
        return without_gpu(check, wanted)
    cuda = facts.cuda
    if cuda is None:
        return replace(check, runbook="driver").failed(
            "no libcuda.so.1",
            why="it comes with the driver's libraries, which are not installed",
            do="install the driver's libraries, of the driver's very version",
        )
    if cuda.ending:
        return check.failed(
            cuda.ending,
            why="a call into the driver does not come back: the GPU or its firmware hangs",
            do="dmesg | grep -i xid; reboot",
        )
    if cuda.code:
        why, do = CUDA_ERRORS.get(cuda.code, ("see cuda.h", "see `dmesg | grep NVRM`"))
        return check.failed(f"error {cuda.code}", why=why, do=do)
    if cuda.devices < need:
        return check.failed(
            f"{cuda.devices} devices",
            why="CUDA sees fewer GPUs than there are: CUDA_VISIBLE_DEVICES, or a GPU is lost",
            do="unset CUDA_VISIBLE_DEVICES and ask again; then: nvidia-smi -L",
        )
    return check.passed(f"{cuda.devices} devices")


def _list(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices))
