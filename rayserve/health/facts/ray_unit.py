"""What does systemd say of the units that a serving host lives by, and what limits has Ray?

`rayserve check` runs in a shell, in a timer, or as a part of Ray's own unit before Ray starts; only in
the last case are its own limits, user and environment those of Ray.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rayserve.health.checks.host_facts import Limits, Unit
from rayserve.health.facts.run import Runner

SYSTEMCTL_S = 5.0
RAY, MANAGER = "ray.service", "nvidia-fabricmanager.service"
UNITS = (RAY, MANAGER, "nvidia-persistenced.service")
"""ray.service is the unit that the role `ray` installs."""
PROPERTIES = (
    "Id,LoadState,ActiveState,UnitFileState,MainPID,User,LimitNOFILESoft,LimitMEMLOCKSoft,"
    "Environment,EnvironmentFiles"
)
NO_LIMIT = ("infinity", "unlimited", str(2**64 - 1))


@dataclass(frozen=True, slots=True)
class Asker:
    """Who runs the checks."""

    user: str
    environment: Mapping[str, str] = field(repr=False)


def this_process() -> Asker:
    """The user and the environment that we have."""
    return Asker(_user(), os.environ)


@dataclass(frozen=True, slots=True)
class RayUnit:
    """Ray's unit, and whether we may ask in its stead."""

    inside: bool
    """This very process is a part of the unit: its gate before the start."""
    known: bool
    """What stands here is Ray's own, not what our shell happens to have."""
    user: str
    """Whom the unit runs as; empty: there is no unit, or it is ourselves."""
    asker: str
    """Our own user."""
    environment: Mapping[str, str] = field(repr=False)
    """What the unit gives to Ray, else our own environment. A token may stand in it."""
    unread: str = ""
    """A file of the unit's environment that we may not read."""

    @property
    def stranger(self) -> str:
        """The user that somebody else than root would have to be, to see what Ray sees; else empty."""
        return self.user if self.user not in ("", self.asker) and self.asker != "root" else ""


def read_units(run: Runner) -> dict[str, dict[str, str]]:
    """Properties of the units that are installed, by their name; empty where systemd does not answer."""
    answer = run(["systemctl", "show", "--property", PROPERTIES, *UNITS], SYSTEMCTL_S)
    found: dict[str, dict[str, str]] = {}
    for block in answer.text.split("\n\n") if answer.ok else []:
        unit: dict[str, str] = {}
        for line in block.splitlines():
            key, _, value = line.partition("=")
            # EnvironmentFiles has a line for each file
            unit[key] = f"{unit[key]}\n{value}" if key in unit else value
        if unit.get("LoadState") in ("loaded", "masked") and "Id" in unit:
            found[unit["Id"]] = unit
    return found


def units_of(found: Mapping[str, Mapping[str, str]]) -> tuple[Unit, ...]:
    """What the checks need to know of each."""
    return tuple(
        Unit(name, unit.get("ActiveState", ""), unit.get("UnitFileState", ""))
        for name, unit in found.items()
    )


def read_ray_unit(unit: Mapping[str, str] | None, root: Path, asker: Asker) -> RayUnit:
    """Whom and what Ray's unit starts Ray with; None: no such unit is known."""
    inside = is_inside(root)
    if inside or unit is None:
        return RayUnit(inside, inside, "", asker.user, asker.environment)
    environment = dict(_assignments(unit.get("Environment", "")))
    unread = ""
    for line in unit.get("EnvironmentFiles", "").splitlines():
        path = line.partition(" (")[0]
        try:
            text = (root / path.lstrip("/")).read_text(errors="replace")
        except FileNotFoundError:
            continue
        except OSError:
            unread = path
            continue
        for row in text.splitlines():
            name, equals, value = row.strip().partition("=")
            if equals and not name.startswith(("#", ";")):
                environment[name] = value.strip("\"'")
    return RayUnit(inside, True, unit.get("User") or "root", asker.user, environment, unread)


def is_inside(root: Path) -> bool:
    """This process is of Ray's unit, by the control group that systemd gave it."""
    with contextlib.suppress(OSError):
        text = (root / "proc/self/cgroup").read_text()
        return any(RAY in line.split(":", 2)[-1].split("/") for line in text.splitlines())
    return False


def _user() -> str:
    try:
        return getpass.getuser() if os.geteuid() else "root"
    except (KeyError, OSError):
        return str(os.geteuid())


def _assignments(text: str) -> Iterator[tuple[str, str]]:
    """`A=1 "B=two words"`, as systemd writes and reads it."""
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    for word in words:
        name, equals, value = word.partition("=")
        if equals:
            yield name, value


def read_limits(unit: Mapping[str, str] | None, root: Path) -> tuple[Limits, ...]:
    """Limits to judge: of Ray as it runs and as its unit starts it next, else of this process."""
    if is_inside(root):
        return _of_process(root, "self", "this start of ray.service")
    if unit is None:
        return _of_process(root, "self", "this process; no unit of Ray is known here")
    pid = unit.get("MainPID", "0")
    running = _of_process(root, pid, f"{RAY}, process {pid}") if pid != "0" else ()
    written = Limits(
        f"the next start of {RAY}" if running else RAY,
        _limit(unit.get("LimitNOFILESoft", "")),
        _limit(unit.get("LimitMEMLOCKSoft", "")),
    )
    return (*running, written)


def _of_process(root: Path, pid: str, whose: str) -> tuple[Limits, ...]:
    try:
        text = (root / "proc" / pid / "limits").read_text()
    except OSError:
        return ()
    soft = dict(re.findall(r"^(Max [a-z ]+?) {2,}(\S+)", text, re.MULTILINE))
    return (
        Limits(whose, _limit(soft.get("Max open files")), _limit(soft.get("Max locked memory"))),
    )


def _limit(text: str | None) -> int | None:
    if text in NO_LIMIT:
        return -1
    return int(text) if text and text.isdecimal() else None
