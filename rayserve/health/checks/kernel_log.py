"""Which faults of GPUs and switches has the kernel logged, and what do they ask for?"""

from __future__ import annotations

import functools
import importlib.resources
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import yaml

from rayserve.health.readings.kernel_log import Fault, FaultKind
from rayserve.health.results import Check, CheckResult, Status


@dataclass(frozen=True, slots=True)
class XidMeaning:
    """A row of data/xid.yml."""

    title: str
    action: str
    see: str = ""


@functools.lru_cache(maxsize=1)
def xids() -> dict[int, XidMeaning]:
    """All codes of the table."""
    text = importlib.resources.files("rayserve").joinpath("data", "xid.yml").read_text("utf-8")
    rows: dict[int, dict[str, str]] = yaml.safe_load(text)
    return {code: XidMeaning(**row) for code, row in rows.items()}


STEPS = {
    "ignore": "nothing: a report only",
    "restart": "start what ran there again; if it repeats on one GPU, reset that GPU",
    "look": "see what it names",
    "reset": "drain this host and reset the GPU (nvidia-smi -r), or reboot",
    "reboot": "drain this host and reboot it; if it repeats, have the GPU replaced",
}
SEVERITY = ("ignore", "restart", "look", "reset", "reboot")
STATUS = {
    "ignore": Status.PASS,
    "restart": Status.WARN,
    "look": Status.WARN,
    "reset": Status.FAIL,
    "reboot": Status.FAIL,
}


def action_of(fault: Fault) -> str:
    """What a fault of the kernel log asks for; `SEVERITY` has the actions, least first."""
    if fault.kind is FaultKind.LOST:
        return "reboot"
    if fault.kind is FaultKind.SXID:
        return "ignore" if fault.nonfatal else "reset" if fault.fatal else "look"
    if fault.kind is FaultKind.MISMATCH:
        return "reboot"
    if fault.kind is not FaultKind.XID:
        return "look"
    meaning = xids().get(fault.code)
    if meaning is None:
        return "look"
    return "ignore" if fault.nonfatal and meaning.action == "reset" else meaning.action


def check_log(log: Sequence[Fault] | None, on_bus: int, *, recovered: bool = False) -> CheckResult:
    """Has the kernel reported a fault of a GPU or switch since the boot?

    `recovered`: the driver says that no GPU is left to mend; then a reset is behind us, and a fault of a
    GPU warns only. One of a switch, or a GPU that is lost, is still there.
    """
    check = Check("kernel-log", "no fault of a GPU since the boot", "xid")
    if log is None:
        return check.skipped("the kernel log could not be read (it needs root, or the group adm)")
    if not on_bus and not log:
        return check.skipped("no NVIDIA GPU on the PCI bus")
    ours = [fault for fault in log if fault.kind is not FaultKind.OOM]
    if not ours:
        return check.passed("none")
    gravest = max((action_of(fault) for fault in ours), key=SEVERITY.index)
    decisive = [fault for fault in ours if action_of(fault) == gravest]
    observed = _counted(decisive)
    past = recovered and all(fault.kind is FaultKind.XID for fault in decisive)
    status = Status.WARN if past and gravest == "reset" else STATUS[gravest]
    if status is Status.PASS:
        return check.passed(f"reports only: {observed}")
    why, do = _meaning(decisive[0]), STEPS[gravest]
    return (check.failed if status is Status.FAIL else check.warned)(observed, why=why, do=do)


def _counted(found: Iterable[Fault]) -> str:
    counts: dict[str, int] = defaultdict(int)
    for fault in found:
        code = f" {fault.code}" if fault.code else ""
        where = f" on {fault.device}" if fault.device else ""
        counts[f"{fault.kind.value}{code}{where}"] += 1
    parts = [f"{name}, {count} times" if count > 1 else name for name, count in counts.items()]
    return "; ".join(parts[:4]) + (f"; and {len(parts) - 4} more" if len(parts) > 4 else "")


def _meaning(fault: Fault) -> str:
    if fault.kind is FaultKind.XID:
        known = xids().get(fault.code)
        if known is None:
            return "a code that this version does not know; NVIDIA's Xid catalogue may"
        return known.title + (f"; see {known.see}" if known.see else "")
    if fault.kind is FaultKind.SXID:
        return "a fault of an NVSwitch: collectives hang on every GPU until it is set up again"
    if fault.kind is FaultKind.LOST:
        return "the GPU no longer answers on the PCI bus"
    if fault.kind is FaultKind.MISMATCH:
        return "the libraries were replaced under the running module"
    return "the kernel refused a module that is not signed; the driver's may be the one"
