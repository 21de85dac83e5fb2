"""What does Ray's user find where the plan's folders and secrets are? Nothing is opened in this process."""

from __future__ import annotations

import re
from pathlib import Path, PurePath

from rayserve.health.checks.host_facts import Folder, KeyFile, TokenFile
from rayserve.health.checks.wanted import Wanted
from rayserve.health.facts.as_user import FOLDER, KEYS, TOKEN, Answer, ask
from rayserve.health.facts.boot import read_line
from rayserve.health.facts.ray_unit import RayUnit
from rayserve.health.facts.run import Runner

SILENT = "no answer"
"""How the ending of a child begins that was not back in time."""


def read_folder(path: str, unit: RayUnit, root: Path, run: Runner) -> Folder:
    """A folder and its file system; where it is silent no other question is put to it."""
    answer = ask(FOLDER, path, unit.user, run)
    said = answer.said
    if answer.ending:
        return Folder(
            path,
            error=answer.ending,
            silent=answer.ending.startswith(SILENT),
            unasked=answer.ending,
            kind=_kind(root, PurePath(path)),
        )
    if "error" in said:
        # What we may not see, Ray's user may.
        denied = unit.stranger if not said.get("missing") else ""
        return Folder(
            path,
            error=str(said["error"]),
            missing=bool(said.get("missing")),
            unasked=f"only root or {denied} can look" if denied else "",
            kind=_kind(root, PurePath(path)),
        )
    return Folder(
        path,
        kind=_kind(root, PurePath(str(said.get("path", path)))),
        empty=bool(said.get("empty")),
        read_only=bool(said.get("read_only")),
        readable=bool(said.get("readable")) or bool(unit.stranger),
        writable=bool(said.get("writable")) or bool(unit.stranger),
        free_bytes=int(said.get("free_bytes", 0)),
        size_bytes=int(said.get("size_bytes", 0)),
    )


def _kind(root: Path, path: PurePath) -> str:
    """Of the last mount over a path, as the kernel lists them; a space in a name is an octal code."""
    kind = ""
    for line in read_line(root / "proc/self/mounts").splitlines():
        fields = line.split(" ")
        if len(fields) > 2 and path.is_relative_to(
            re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[1])
        ):
            kind = fields[2]
    return kind


def ray_folder(unit: RayUnit) -> str:
    """Where Ray keeps its sessions."""
    return unit.environment.get("RAY_TMPDIR") or unit.environment.get("TMPDIR") or "/tmp"


def read_keys(wanted: Wanted | None, unit: RayUnit, run: Runner) -> KeyFile | None:
    """What a replica on this host would say of the key file; None: the plan has none."""
    path = wanted.key_file if wanted is not None else ""
    if not path:
        return None
    if unit.stranger:
        return KeyFile(path, unasked=f"only root or {unit.stranger} can look")
    answer = ask(KEYS, path, unit.user, run)
    said = answer.said
    if answer.ending:
        return _silent(path, answer)
    if "needed" not in said:
        return KeyFile(path, count=int(said.get("count", 0)))
    line = f", line {said['line']}" if said.get("line") else ""
    return KeyFile(
        path, needed=said["needed"], found=f"{said['found']}{line}", do=said.get("do", "")
    )


def _silent(path: str, answer: Answer) -> KeyFile:
    if not answer.ending.startswith(SILENT):
        return KeyFile(path, unasked=answer.ending)
    return KeyFile(
        path,
        needed="a readable file of API keys",
        found=answer.ending,
        do="keep it on a disk of this host; findmnt -T says what is mounted there",
    )


def read_token(wanted: Wanted | None, unit: RayUnit, root: Path, run: Runner) -> TokenFile | None:
    """Where Ray finds its token, in Ray's own order; None: the plan's Ray asks for none."""
    if wanted is None or not wanted.token:
        return None
    if unit.environment.get("RAY_AUTH_TOKEN", "").strip():
        return TokenFile("")
    path = unit.environment.get("RAY_AUTH_TOKEN_PATH", "")
    if not path and unit.unread:
        return TokenFile("", unasked=f"{unit.unread}, which names it, is closed to {unit.asker}")
    named = bool(path)
    # Ray goes by HOME, which need not be the home that the system has for the user.
    ours = "" if unit.user else unit.environment.get("HOME", "")
    path = path or f"{ours or _home(unit.user or unit.asker, root)}/.ray/auth_token"
    if unit.stranger:
        return TokenFile(path, unasked=f"only root or {unit.stranger} can look")
    answer = ask(TOKEN, path, unit.user, run)
    said = answer.said
    if answer.ending and not answer.ending.startswith(SILENT):
        return TokenFile(path, unasked=answer.ending)
    error = answer.ending or said.get("error", "") or ("it is empty" if said.get("empty") else "")
    if error and not named and not unit.known:
        return TokenFile(path, unasked="neither this shell nor a unit of Ray says where it is")
    return TokenFile(path, error=error, mode=int(said.get("mode", 0)))


def _home(user: str, root: Path) -> str:
    for line in read_line(root / "etc/passwd").splitlines():
        fields = line.split(":")
        if fields[0] == user and len(fields) > 5:
            return fields[5]
    return "/root" if user == "root" else f"/home/{user}"
