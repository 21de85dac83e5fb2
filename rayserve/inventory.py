"""Where do spec, model config, plan and Serve config lie, and how are they read and written?

inventories/<env>/hosts.yml                     Ansible's inventory: pass this file, not the folder
inventories/<env>/group_vars/all/cluster.yml    the spec
inventories/<env>/group_vars/all/plan.yml       the plan, beside it
inventories/<env>/group_vars/all/starts.jsonl   real starts, collected from the hosts
inventories/<env>/serve.yml                     the Serve config, where Ansible reads no variables
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import itertools
import os
import shutil
import signal
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rayserve.errors import HostError, PlanError, SpecError, UsageError, Where
from rayserve.files import read_bytes
from rayserve.plan import Plan, parse_plan
from rayserve.starts import LEDGER
from rayserve.usage import GROUP_VARS, MOST_NEIGHBOURS, nearby, shown

# A plan has some tens of KiB.
MAX_BYTES = 4 * 2**20
MAX_DEPTH = 64
# A safe loader either way; in C where PyYAML has it.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Files:
    """The files of one environment."""

    spec: Path
    plan: Path
    serve: Path

    @property
    def starts(self) -> Path:
        """Real starts, beside the spec."""
        return self.spec.with_name(LEDGER)


def locate(spec: str, out: str | None) -> Files:
    """The files that belong to a spec: a cluster.yml, or a folder of an inventory.

    Raises:
        UsageError: there is no such spec, or a name is empty.
    """
    if not spec or out == "":  # an unset variable of a script, and no word for the working folder
        raise UsageError(
            "the name of a folder or file",
            found=f"an empty {'--out' if spec else 'SPEC'}",
            do="name it; the working folder is `.`",
        )
    path = Path(spec)
    found = f"no file at {path}"
    try:
        if path.is_dir():
            path = _in_folder(path)
            found = f"no file at {path}"
        there = path.is_file()
    except OSError as error:  # a name that is too long, a folder that is not ours
        there, found = False, error.strerror or str(error)
    if not there:
        raise UsageError(
            "a cluster.yml, or the folder of an inventory that has one",
            found=shown(found),
            do=_meant(Path(spec)),
        )
    if out is not None:
        return Files(path, Path(out) / "plan.yml", Path(out) / "serve.yml")
    folder = path.parent
    in_group_vars = folder.parts[-2:] == GROUP_VARS.parts
    return Files(
        path,
        folder / "plan.yml",
        (folder.parent.parent if in_group_vars else folder) / "serve.yml",
    )


def _in_folder(folder: Path) -> Path:
    """Where the spec of an inventory is, or would be."""
    inside = folder / GROUP_VARS / "cluster.yml"
    return inside if inside.is_file() else folder / "cluster.yml"


MOST_NAMED = 5
"""Inventories that an error names."""


def _meant(path: Path) -> str:
    """What to write instead of a name under which there is no spec."""

    def takes(name: Path) -> Path | None:
        ours = name.is_file() if name.suffix in (".yml", ".yaml") else _in_folder(name).is_file()
        return name if ours else None

    if inside := _inventories(path) or _inventories(path / "inventories"):
        more = len(inside) - MOST_NAMED
        rest = f", or one of {more} more" if more > 0 else ""
        named = " or ".join(map(str, inside[:MOST_NAMED]))
        return f"name one of its inventories: rayserve plan {named}{rest}"
    close = nearby(path, takes) or nearby(Path("inventories", path), takes)
    if close is not None:
        return f"write it so: rayserve plan {close}"
    return "name the folder or its cluster.yml: rayserve plan inventories/NAME"


def _inventories(folder: Path) -> list[Path]:
    """The folders with a spec in a folder; none where it cannot be looked into."""
    try:
        names = itertools.islice(folder.iterdir(), MOST_NEIGHBOURS)
        return sorted(name for name in names if _in_folder(name).is_file())
    except OSError:
        return []


def read_plan(path: str) -> Plan:
    """The plan in a plan.yml.

    Raises:
        PlanError: it is no plan, or was edited by hand.
    """
    return parse_plan(read_yaml(path), path)


def read_yaml(path: str) -> object:
    """The content of a generated YAML file, of bounded size and depth, and without aliases.

    Raises:
        SpecError, PlanError: it cannot be read, or is not what `rayserve plan` writes.
    """
    text = decoded(read_bytes(Path(path), MAX_BYTES), Path(path))
    try:
        problem = _unlike_ours(text)
        data: object = None if problem else yaml.load(text, Loader=_Loader)  # noqa: S506
    # PyYAML's constructors let through what Python makes of a value: `!!int x`, 2024-13-45.
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, OverflowError) as e:
        problem = (str(e).splitlines() or [type(e).__name__])[0]
    if problem:
        raise PlanError(
            "YAML as `rayserve plan` writes it",
            found=problem[:200],
            do="write the plan again with `rayserve plan`",
            where=Where(path),
        )
    return data


def _unlike_ours(text: str) -> str:
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            return f"more than {MAX_DEPTH} levels"
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            return "an anchor or alias"
    return ""


def current(path: Path) -> str:
    """The text of a file, with the bytes that are no UTF-8 escaped; empty when there is none.

    Raises:
        HostError: it is there but cannot be read.
    """
    try:
        there = path.is_file()
        return read_bytes(path, MAX_BYTES).decode("utf-8", "backslashreplace") if there else ""
    except (OSError, SpecError) as error:
        problem = error.strerror if isinstance(error, OSError) else error.found
        raise HostError(
            "to read what is to be replaced",
            found=f"{str(path)[:200]}: {problem or type(error).__name__}",
            do="correct its owner and mode, or write elsewhere with --out",
        ) from None


def check_places(paths: Iterable[Path]) -> None:
    """Refuse places where one file would be lost in another, or folders be made at the end of a link.

    Raises:
        UsageError: two names of one file; a link to nothing.
    """
    taken: dict[str, Path] = {}
    for path in paths:
        real = os.path.realpath(path)
        found = f"{path} and {taken[real]} are one file, {real}" if real in taken else ""
        taken[real] = path
        # A link of the file itself may be the first to name it, in a folder that is there.
        there = os.path.isdir(os.path.dirname(real))  # noqa: PTH112, PTH120 - as below
        ways = path.parents if there else (path, *path.parents)
        for way in ways:
            if os.path.islink(way) and not os.path.exists(way):  # noqa: PTH110, PTH114 - never raise
                found = f"{way} is a link to {os.path.realpath(way)}, which is not there"
        if found:
            raise UsageError(
                "a place of its own for each file, in a folder that is there or can be made",
                found=found[:300],
                do="remove the link, or make what it points to",
            )


def write_all(texts: dict[Path, str]) -> None:
    """Write every file, or none: a failure or Ctrl-C puts back what was there, and SIGTERM waits for the end.

    Two that write at once do not mix their files. What is killed (SIGKILL) may; its drafts go with the next write.

    Raises:
        UsageError: as `check_places`.
        HostError: a folder or file cannot be written.
    """
    check_places(texts)
    # A link stays a link: what it points to is replaced.
    texts = {Path(os.path.realpath(path)): text for path, text in texts.items()}
    for path in texts:
        _check_place(path)
    drafts = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in texts}
    begun: list[Path] = []
    whole = False
    at = next(iter(texts), Path())
    locks = contextlib.ExitStack()
    try:
        for path in texts:
            at = path
            path.parent.mkdir(parents=True, exist_ok=True)
        for folder in sorted({path.parent for path in texts}):
            at = folder
            locks.enter_context(_locked(folder))
        locks.enter_context(_undisturbed())
        for path in texts:
            _remove_left_drafts(path)
        before = {path: path.read_bytes() if path.is_file() else None for path in texts}
        for path, text in texts.items():
            at = path
            _write(drafts[path], text.encode())
        for path, draft in drafts.items():
            at = path
            if before[path] is not None:
                shutil.copymode(path, draft)
            begun.append(path)
            draft.replace(path)
        whole = True
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        there = "free some space there" if full else "make its folder writable"
        raise HostError(
            f"to write {str(at)[:200]}",
            found=error.strerror or type(error).__name__,
            do=f"{there}, or write elsewhere (--out, --html; of a check --textfile)",
        ) from None
    finally:
        for path in () if whole else begun:
            old = before[path]
            with contextlib.suppress(OSError):
                path.unlink() if old is None else _write(path, old)
        for draft in drafts.values():
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
        locks.close()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The folder held against another that writes there; no file of a lock is left."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(
            OSError
        ):  # a file system without locks, a folder that is not listed
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            held.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """SIGTERM and SIGHUP, which end a process at once, wait for the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _remove_left_drafts(path: Path) -> None:
    """Remove drafts of a file whose writers are gone: the folder is held, so what lives does not write."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*"):
        writer = left.name.rpartition(".")[2]
        if writer.isdecimal() and not Path("/proc", writer).exists():
            with contextlib.suppress(OSError):
                left.unlink()


def _check_place(path: Path) -> None:
    """Refuse to put a file in the place of a device, a pipe or a folder."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return  # nothing there; what else is wrong, the writing says
    if not stat.S_ISREG(mode):
        raise HostError(
            "a regular file to write, or none yet",
            found=f"{str(path)[:200]} is something else",
            do="name another file or folder",
        )


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def decoded(raw: bytes, path: Path) -> str:
    """The text of a file.

    Raises:
        SpecError: it is not UTF-8.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(
            "text in UTF-8",
            found=f"byte 0x{raw[error.start]:02x}",
            do="save the file as UTF-8",
            where=Where(str(path), raw.count(b"\n", 0, error.start) + 1),
        ) from None
