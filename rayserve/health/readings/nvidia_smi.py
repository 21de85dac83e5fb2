"""What does `nvidia-smi -q -x` say of each GPU, and `nvidia-smi topo` of the ways between them?

The XML is the only form of nvidia-smi whose names stay: a figure that this driver or GPU does not have
is None, never 0.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds memory of a GPU."""

    pid: int
    name: str
    memory_mib: int | None


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU; None: not reported."""

    index: int
    name: str
    bus: str
    """PCI address as the kernel log writes it, `0000:07:00`."""
    uuid: str = ""
    memory_mib: int | None = None
    used_mib: int | None = None
    utilization: int | None = None
    """Percent of the last second in which a kernel ran."""
    mig: bool | None = None
    ecc: bool | None = None
    """ECC is on."""
    volatile_uncorrectable: int | None = None
    """Uncorrectable ECC errors since the driver was loaded."""
    remapped_uncorrectable: int | None = None
    """Memory rows that were replaced after uncorrectable errors, in the GPU's life."""
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    slowed: tuple[str, ...] = ()
    """Reasons for which the clocks are held down by heat, power brake or hardware, now."""
    persistence: bool | None = None
    recovery: str = ""
    """What the driver itself asks for (`gpu_recovery_action`): `None`, `Reset`, …; empty: an older one."""
    fabric_state: str = ""
    """`Completed` where NVSwitches are set up; empty: not reported."""
    link_width: int | None = None
    """PCIe lanes now; None: not reported."""
    link_width_max: int | None = None
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True, slots=True)
class SmiReading:
    """The whole answer."""

    driver: str
    gpus: tuple[GpuReading, ...]


class UnreadableError(ValueError):
    """The text is not nvidia-smi's."""


SLOWDOWNS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
"""Reasons that point to heat or power. `sw_power_cap` is the normal limit under load."""
ABSENT = frozenset(
    {"", "N/A", "[N/A]", "Not Supported", "Requested functionality has been deprecated"}
)


def parse_query(text: str) -> SmiReading:
    """`nvidia-smi -q -x`.

    Raises:
        UnreadableError: not the XML of nvidia-smi.
    """
    try:
        root = ET.fromstring(text)  # noqa: S314  (the driver's own tool on this host)
    except ET.ParseError as error:
        raise UnreadableError(f"not the XML of nvidia-smi: {error}") from None
    if root.tag != "nvidia_smi_log":
        raise UnreadableError(f"not the XML of nvidia-smi: <{root.tag[:40]}>")
    gpus = tuple(_gpu(index, node) for index, node in enumerate(root.iter("gpu")))
    return SmiReading(driver=_text(root, "driver_version"), gpus=gpus)


def _gpu(index: int, node: ET.Element) -> GpuReading:
    ecc = node.find("ecc_errors/volatile")
    remapped = node.find("remapped_rows")
    return GpuReading(
        index=index,
        name=_text(node, "product_name"),
        bus=bus_of(node.get("id", "")),
        uuid=_text(node, "uuid"),
        memory_mib=_number(node, "fb_memory_usage/total"),
        used_mib=_number(node, "fb_memory_usage/used"),
        utilization=_number(node, "utilization/gpu_util"),
        mig=_enabled(node, "mig_mode/current_mig"),
        ecc=_enabled(node, "ecc_mode/current_ecc"),
        volatile_uncorrectable=_uncorrectable(ecc),
        remapped_uncorrectable=_number(remapped, "remapped_row_unc"),
        remap_pending=_yes(remapped, "remapped_row_pending"),
        remap_failed=_yes(remapped, "remapped_row_failure"),
        slowed=_slowed(node),
        persistence=_enabled(node, "persistence_mode"),
        recovery=_text(node, "gpu_recovery_action"),
        fabric_state=_text(node, "fabric/state"),
        link_width=_number(node, "pci/pci_gpu_link_info/link_widths/current_link_width"),
        link_width_max=_number(node, "pci/pci_gpu_link_info/link_widths/max_link_width"),
        processes=tuple(_process(item) for item in node.iterfind("processes/process_info")),
    )


def bus_of(address: str) -> str:
    """nvidia-smi's `00000000:07:00.0` as the kernel log's `0000:07:00`."""
    parts = address.lower().rsplit(".", 1)[0].split(":")
    return ":".join([parts[0][-4:], *parts[1:]])


def _text(node: ET.Element | None, path: str) -> str:
    found = node.findtext(path) if node is not None else None
    value = (found or "").strip()
    return "" if value in ABSENT else value


def _number(node: ET.Element | None, path: str) -> int | None:
    match = re.match(r"\d+", _text(node, path))
    return int(match[0]) if match else None


def _enabled(node: ET.Element, path: str) -> bool | None:
    return {"Enabled": True, "Disabled": False}.get(_text(node, path))


def _yes(node: ET.Element | None, path: str) -> bool | None:
    return {"Yes": True, "No": False}.get(_text(node, path))


def _uncorrectable(volatile: ET.Element | None) -> int | None:
    """Uncorrectable errors, by the names of Ampere and newer, else by those of older GPUs."""
    if volatile is None:
        return None
    names = [child.tag for child in volatile if "uncorrectable" in child.tag]
    counts = [_number(volatile, name) for name in names or ["double_bit/total"]]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _slowed(node: ET.Element) -> tuple[str, ...]:
    """`clocks_event_reasons` (535 and newer) or `clocks_throttle_reasons`."""
    return tuple(
        reason
        for tag in ("clocks_event_reasons", "clocks_throttle_reasons")
        for reason in SLOWDOWNS
        if _text(node, f"{tag}/{tag.removesuffix('s')}_{reason}") == "Active"
    )


def _process(item: ET.Element) -> GpuProcess:
    return GpuProcess(
        pid=_number(item, "pid") or 0,
        name=_text(item, "process_name"),
        memory_mib=_number(item, "used_memory"),
    )


@dataclass(frozen=True, slots=True)
class Matrix:
    """What a table of `nvidia-smi topo` says of each pair of GPUs, `cells[row][column]`."""

    cells: tuple[tuple[str, ...], ...]

    def pairs(self) -> Iterable[tuple[int, int, str]]:
        """Each pair of different GPUs once."""
        for row, cells in enumerate(self.cells):
            for column in range(row + 1, len(cells)):
                yield row, column, cells[column]


_STYLE = re.compile(r"\x1b\[[0-9;]*m")


def parse_matrix(text: str) -> Matrix:
    """`nvidia-smi topo -m` or `topo -p2p n`: the square of GPUs, without NICs and affinities.

    Raises:
        UnreadableError: there is no such table.
    """
    rows = []
    for line in _STYLE.sub("", text).splitlines():
        cells = line.split()
        if (
            cells
            and re.fullmatch(r"GPU\d+", cells[0])
            and (len(cells) < 2 or "GPU" not in cells[1])
        ):
            rows.append(cells[1:])
    size = len(rows)
    if not size or any(len(row) < size for row in rows):
        raise UnreadableError("no table of GPUs in the answer of `nvidia-smi topo`")
    return Matrix(tuple(tuple(row[:size]) for row in rows))
