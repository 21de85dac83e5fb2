"""Which GPUs and switches are on the PCI bus, whether a driver knows them or not?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from rayserve.health.facts.run import Runner

NVIDIA = "0x10de"
DISPLAY, BRIDGE = "0x03", "0x0680"
"""Classes: GPUs are display controllers (0x0300 VGA, 0x0302 3D), NVSwitches other bridges."""
LSPCI_S = 10.0


def nvidia_devices(root: Path) -> tuple[int, int]:
    """Number of NVIDIA GPUs and NVSwitches, by /sys."""
    classes = list(_classes(root))
    gpus = sum(kind.startswith(DISPLAY) for kind in classes)
    return gpus, sum(kind.startswith(BRIDGE) for kind in classes)


def _classes(root: Path) -> Iterator[str]:
    folder = root / "sys/bus/pci/devices"
    try:
        devices = sorted(folder.iterdir())
    except OSError:
        return
    for device in devices:
        try:
            if (device / "vendor").read_text().strip() == NVIDIA:
                yield (device / "class").read_text().strip()
        except OSError:
            continue


def redirecting_bridges(run: Runner) -> tuple[str, ...] | None:
    """Bridges whose access control (ACS) redirects; None where lspci does not show it (no root)."""
    answer = run(["lspci", "-vvv"], LSPCI_S)
    return parse_acs(answer.text) if answer.ok else None


def parse_acs(text: str) -> tuple[str, ...] | None:
    """Addresses of the bridges with `SrcValid+` or `ReqRedir+` under ACSCtl; None: none has ACSCtl."""
    found: list[str] = []
    address, seen = "", False
    for line in text.splitlines():
        if match := re.match(r"([0-9a-fA-F:.]+) \S", line):
            address = match[1]
        elif "ACSCtl:" in line:
            seen = True
            if "SrcValid+" in line or "ReqRedir+" in line:
                found.append(address)
    hidden = "<access denied>" in text and not seen
    return None if hidden or not text else tuple(found)
