"""What does the user of Ray find at a path? Asked in a child, which a dead mount may hold for ever.

Root reads what nobody else can, and not even that on a network mount that distrusts it: so where root
asks, the child becomes the user that Ray's unit runs as, after its imports and before it looks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rayserve
from rayserve.health.facts.run import Runner

PATH_S = 10.0
"""For a network mount that is slow to wake; the checks of a unit have three minutes together."""
BECOME = """
import json, os, sys
def become(user):
    if user and os.geteuid() == 0:
        import pwd
        try:
            one = pwd.getpwuid(int(user)) if user.isdecimal() else pwd.getpwnam(user)
        except KeyError:
            print(json.dumps({"unasked": "this host has no user " + user}))
            sys.exit()
        os.initgroups(user, one.pw_gid)
        os.setgid(one.pw_gid)
        os.setuid(one.pw_uid)
"""
FOLDER = (
    BECOME
    + """
become(sys.argv[2])
try:
    there = os.path.realpath(sys.argv[1], strict=True)
    found = os.statvfs(there)
    readable = os.access(there, os.R_OK | os.X_OK)
    entries = os.scandir(there) if readable or not os.path.isdir(there) else [there]
    empty = next(iter(entries), None) is None
except OSError as error:
    print(json.dumps({"error": error.strerror, "missing": isinstance(error, FileNotFoundError)}))
else:
    print(json.dumps({
        "path": there, "readable": readable, "empty": empty,
        "writable": os.access(there, os.W_OK), "read_only": bool(found.f_flag & os.ST_RDONLY),
        "free_bytes": found.f_bavail * found.f_frsize, "size_bytes": found.f_blocks * found.f_frsize,
    }))
"""
)
KEYS = (
    BECOME
    + """
sys.path.insert(0, sys.argv[3])
from rayserve.errors import HostError
from rayserve.keyfile import read_keys
become(sys.argv[2])
try:
    print(json.dumps({"count": len(read_keys(sys.argv[1])[1])}))
except HostError as error:
    line = error.where.line if error.where else None
    print(json.dumps({"needed": error.needed, "found": error.found, "do": error.do, "line": line}))
"""
)
TOKEN = (
    BECOME
    + """
import stat
become(sys.argv[2])
try:
    with open(os.open(sys.argv[1], os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        text = file.read(4098).strip() if stat.S_ISREG(status.st_mode) else b""
        plain = text.isascii() and text.decode("ascii").isprintable() and len(text) <= 4096
        found = {"empty": not text, "mode": stat.S_IMODE(status.st_mode)}
        print(json.dumps(found if plain else {"error": "more than one line of visible ASCII"}))
except OSError as error:
    print(json.dumps({"error": error.strerror}))
"""
)

PACKAGES = str(Path(rayserve.__file__).parents[1])
"""Where this very package stands, which may be a checkout beside one that is installed."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a child found; `ending` says why it found nothing."""

    said: dict[str, Any]
    ending: str = ""


def ask(program: str, path: str, user: str, run: Runner) -> Answer:
    """Run one of the programs above on a path, as `user` where we are root; empty: as ourselves."""
    if "\0" in path:
        return Answer({"error": "no path: it holds a NUL character", "missing": True})
    output = run([*python(program), path, user, PACKAGES], PATH_S)
    if not output.ok:
        return Answer({}, output.ending)
    try:
        said = json.loads(output.text.strip().splitlines()[-1])
    except (ValueError, IndexError):
        said = None
    if not isinstance(said, dict):
        return Answer({}, f"an answer that is none: {output.text[:80]!r}")
    return Answer(said, str(said.get("unasked", "")))


def python(program: str) -> Sequence[str]:
    """A command that runs a program; the working folder, which may be anybody's, gives it no module."""
    return [sys.executable, "-P", "-c", program]
