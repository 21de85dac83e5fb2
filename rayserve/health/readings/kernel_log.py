"""Which hardware faults did the kernel log?

Understands `dmesg`, with and without `--ctime` or `--time-format iso`, and `journalctl -k`. Messages of
the NVIDIA driver begin with "NVRM:", those of its switch driver with "nvidia-nvswitch".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    """What a line of the kernel log reports."""

    XID = "Xid"
    SXID = "SXid"
    LOST = "fallen off the bus"
    MISMATCH = "API mismatch"
    UNSIGNED = "module rejected"
    OOM = "out of memory"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault in the kernel log."""

    kind: FaultKind
    device: str = ""
    """PCI address, `0000:44:00`; empty where the line names none."""
    code: int = 0
    """Of an Xid or SXid."""
    nonfatal: bool = False
    """The driver itself says so."""
    fatal: bool = False
    """The driver itself says so."""
    text: str = ""
    """The message, without time and prefix."""


_PCI = r"(?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.[0-9a-fA-F])?"
_XID = re.compile(rf"NVRM: Xid \({_PCI}\): (\d+)\b,?\s*(.*)")
_SXID = re.compile(rf"nvidia-nvswitch\d*: SXid \({_PCI}\): (\d+)\b,?\s*(.*)")
_LOST = re.compile(r"fallen off the bus|NVRM:.*GPU is lost", re.IGNORECASE)
_NAMED = re.compile(r"NVRM:.*?(?:GPU|device).*?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})\b")
_MISMATCH = re.compile(r"NVRM: API mismatch: .*")
_UNSIGNED = re.compile(r"Loading of (?:unsigned module|module with .*) is rejected|"
                       r"Lockdown: \S+: unsigned module loading is restricted")  # fmt: skip
_OOM = re.compile(r"(?:Out of memory|Memory cgroup out of memory): Killed process \d+ \(([^)]*)\)")
_NONFATAL = re.compile(r"\bnon-?fatal\b", re.IGNORECASE)
_FATAL = re.compile(r"\bfatal\b", re.IGNORECASE)
_DETAIL = re.compile(r"(?:Severity \d|Data \{)")
"""A second and third line of the same SXid."""
LOST_SPAN_LINES = 3
"""The driver spreads "The NVIDIA GPU … has fallen off the bus" over so many lines; those after the
first may lack its "NVRM:"."""


def faults(lines: Iterable[str]) -> Iterator[Fault]:
    """The faults in a kernel log, in its order."""
    device, since = "", LOST_SPAN_LINES
    for line in lines:
        named = _NAMED.search(line)
        device, since = (named[1], 0) if named else (device, since + 1)
        if match := _XID.search(line):
            yield _numbered(FaultKind.XID, match)
        elif match := _SXID.search(line):
            if not _DETAIL.match(match[3]):
                yield _numbered(FaultKind.SXID, match)
        elif _LOST.search(line) and ("NVRM:" in line or since < LOST_SPAN_LINES):
            lost = device.lower() if since < LOST_SPAN_LINES else ""
            yield Fault(FaultKind.LOST, lost, text=line.rsplit("NVRM:", 1)[-1].strip())
        elif match := _MISMATCH.search(line):
            yield Fault(FaultKind.MISMATCH, text=match[0].strip())
        elif match := _UNSIGNED.search(line):
            yield Fault(FaultKind.UNSIGNED, text=match[0].strip())
        elif match := _OOM.search(line):
            yield Fault(FaultKind.OOM, text=match[0].strip())


def _numbered(kind: FaultKind, match: re.Match[str]) -> Fault:
    text = match[3].strip()
    nonfatal = bool(_NONFATAL.search(text))
    fatal = not nonfatal and bool(_FATAL.search(text))
    return Fault(kind, match[1].lower(), int(match[2]), nonfatal, fatal, text)
