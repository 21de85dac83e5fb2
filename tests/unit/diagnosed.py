"""What the doctor makes of logs."""

from __future__ import annotations

from rayserve.doctor.diagnosis import Diagnosis
from rayserve.doctor.verdicts import Verdict


def diagnose(*logs: str) -> Verdict:
    """What the doctor makes of these logs."""
    reader = Diagnosis()
    for number, log in enumerate(logs):
        reader.read(f"log{number}", [f"{line}\n".encode() for line in log.splitlines()])
    return reader.verdict()


def tags(*logs: str) -> list[str]:
    """The tags of the causes that the doctor names, best first."""
    return [cause.tag for cause in diagnose(*logs).causes]
