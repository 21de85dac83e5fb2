"""Where do spec, model config, plan and Serve config lie, and how are they read and written?

inventories/<env>/hosts.yml                     Ansible's inventory: pass this file, not the folder
inventories/<env>/group_vars/all/cluster.yml    the spec
inventories/<env>/group_vars/all/plan.yml       the plan, beside it
inventories/<env>/serve.yml                     the Serve config, where Ansible reads no variables
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rayserve.errors import HostError, PlanError, SpecError, UsageError, Where
from rayserve.plan import Plan, parse_plan
from rayserve.planner import build_plan
from rayserve.planner.candidates import Checkpoint, Compared, Comparison, compare, pick
from rayserve.planner.content import host_files, model_config_path
from rayserve.planner.render import plan_text, serve_text
from rayserve.serve_config import serve_config
from rayserve.spec import SERVED, ClusterSpec, absolute_paths, parse_spec, picks

GROUP_VARS = Path("group_vars", "all")
# A plan has some tens of KiB, a config.json less.
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


@dataclass(frozen=True)
class Planned:
    """A plan and the texts of its two files."""

    plan: Plan
    texts: dict[Path, str]


def locate(spec: str, out: str | None) -> Files:
    """The files that belong to a spec: a cluster.yml, or a folder of an inventory.

    Raises:
        UsageError: there is no such spec.
    """
    path = Path(spec)
    found = f"no file at {path}"
    try:
        if path.is_dir():
            inside = path / GROUP_VARS / "cluster.yml"
            path = inside if inside.is_file() else path / "cluster.yml"
            found = f"no file at {path}"
        there = path.is_file()
    except OSError as error:  # a name that is too long, a folder that is not ours
        there, found = False, error.strerror or str(error)
    if not there:
        raise UsageError(
            "a cluster.yml, or the folder of an inventory that has one",
            found=found[:200],
            do="name it: rayserve plan inventories/demo",
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


def make_plan(files: Files) -> Planned:
    """Read the spec and what it names, and plan.

    Raises:
        SpecError, EngineArgumentError, DoesNotFitError: there is no plan for this spec.
    """
    read = read_spec(files)
    spec = read.spec
    if picks(spec):
        plan = pick(_compare(read))
    else:
        plan = build_plan(
            spec,
            model_config(read.folder / spec.model.config),
            read.sha256,
            draft_config=read.draft_config,
            digests=_digests(spec, read.folder, read.recorded),
        )
    source = files.spec.name
    return Planned(
        plan,
        {
            files.plan: plan_text(plan, source),
            files.serve: serve_text(serve_config(plan), source),
        },
    )


def compare_candidates(files: Files) -> Comparison:
    """All checkpoints of a spec, the best first.

    Raises:
        SpecError: the spec is wrong, or names no candidates.
    """
    read = read_spec(files)
    if not read.spec.model.candidates:
        raise SpecError(
            "`model.candidates`, the checkpoints to compare",
            found="none",
            do="list them, each with name, path or hf_id, and config (docs/candidates.md)",
            where=read.spec.where("model"),
        )
    return _compare(read).comparison


@dataclass(frozen=True)
class Read:
    """A spec with absolute paths, and what lies beside it."""

    spec: ClusterSpec
    folder: Path
    sha256: str
    draft_config: dict[str, Any] | None
    recorded: dict[str, str]
    """Digests of small files that the last plan has."""


def read_spec(files: Files) -> Read:
    """The spec of an environment.

    Raises:
        SpecError: it cannot be read, or is wrong.
    """
    raw = _read(files.spec)
    spec = parse_spec(_text(raw, files.spec), str(files.spec))
    folder = files.spec.resolve().parent
    spec = absolute_paths(spec, str(folder))
    draft = spec.speculative.config if spec.speculative is not None else ""
    return Read(
        spec,
        folder,
        hashlib.sha256(raw).hexdigest(),
        model_config(folder / draft) if draft else None,
        _recorded(files.plan),
    )


def _compare(read: Read) -> Compared:
    """Every checkpoint of a spec; a config.json that cannot be read is told in its row."""
    spec = read.spec
    found = [] if picks(spec) else [_checkpoint(SERVED, spec, read)]
    for index, candidate in enumerate(spec.model.candidates):
        found.append(_checkpoint(candidate.name, spec.serving(index), read))
    return compare(found, read.sha256, draft_config=read.draft_config)


def _checkpoint(name: str, spec: ClusterSpec, read: Read) -> Checkpoint:
    config, problem = None, None
    try:
        config = model_config(read.folder / spec.model.config)
    except SpecError as error:
        problem = error
    return Checkpoint(name, spec, config, _digests(spec, read.folder, read.recorded), problem)


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
    text = _text(_read(Path(path)), Path(path))
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
        return path.read_bytes().decode("utf-8", "backslashreplace") if path.is_file() else ""
    except OSError as error:
        raise HostError(
            "to read what is to be replaced",
            found=f"{str(path)[:200]}: {error.strerror or type(error).__name__}",
            do="correct its owner and mode, or write elsewhere with --out",
        ) from None


def write_all(texts: dict[Path, str]) -> None:
    """Write every file, or none: a failure puts back what was there.

    Raises:
        HostError: a folder or file cannot be written.
    """
    # A link stays a link: what it points to is replaced.
    texts = {Path(os.path.realpath(path)): text for path, text in texts.items()}
    drafts = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in texts}
    done: list[Path] = []
    try:
        before = {path: path.read_bytes() if path.is_file() else None for path in texts}
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(drafts[path], text.encode())
        for path, draft in drafts.items():
            if before[path] is not None:
                shutil.copymode(path, draft)
            draft.replace(path)
            done.append(path)
    except OSError as error:
        raise HostError(
            "to write what was planned",
            found=str(error)[:300],
            do="make the folder writable, or write elsewhere with --out (the page: --html)",
        ) from None
    finally:
        for path in done if len(done) < len(texts) else ():  # also where Ctrl-C came between
            old = before[path]
            with contextlib.suppress(OSError):
                path.unlink() if old is None else _write(path, old)
        for draft in drafts.values():
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> bytes:
    """The bytes of a regular file of at most MAX_BYTES."""
    do = "check its owner and mode"
    try:
        # Without waiting: a pipe that nobody writes to would hold us up.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            data = file.read(MAX_BYTES + 1) if regular else b""
        problem = "" if regular else "no regular file"
    except (OSError, ValueError) as error:
        problem = (error.strerror if isinstance(error, OSError) else None) or str(error)
    else:
        if len(data) > MAX_BYTES:
            problem, do = f"more than {MAX_BYTES // 2**20} MiB", "name the right file"
    if problem:
        where = Where(str(path)[:200])
        raise SpecError("a file that can be read", found=problem, do=do, where=where)
    return data


def _text(raw: bytes, path: Path) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(
            "text in UTF-8",
            found=f"byte 0x{raw[error.start]:02x}",
            do="save the file as UTF-8",
            where=Where(str(path), raw.count(b"\n", 0, error.start) + 1),
        ) from None


def _digests(spec: ClusterSpec, folder: Path, recorded: dict[str, str]) -> dict[str, str]:
    """SHA-256 of the small files that define a replica.

    Files of the hosts are read where the plan is made on a host. Elsewhere the digest that plan.yml
    has of them stays, so that a plan is the same wherever it is made again.
    """
    found = dict(recorded)
    places = {path: Path(path) for path in host_files(spec)}
    places[model_config_path(spec)] = folder / spec.model.config
    for name, place in places.items():
        with contextlib.suppress(OSError):  # not here, or not for us to read
            if place.is_file():
                found[name] = hashlib.sha256(place.read_bytes()).hexdigest()
    return found


def _recorded(plan: Path) -> dict[str, str]:
    try:
        known = read_plan(str(plan)).replica.content if plan.is_file() else []
    except (PlanError, SpecError, OSError):
        return {}  # it is about to be written anew
    return {item.name: str(item.value) for item in known}


def model_config(path: Path) -> dict[str, Any] | None:
    """The content of a model's config.json; None where there is no such file.

    Raises:
        SpecError: it cannot be read, or is no JSON object.
    """
    try:
        if not path.is_file():
            return None
    except OSError as error:
        raise SpecError(
            "a model's config.json that can be read",
            found=error.strerror or str(error),
            do="correct model.config, or the owner and mode of its folder",
            where=Where(str(path)[:200]),
        ) from None
    try:
        data = json.loads(_text(_read(path), path))
    except json.JSONDecodeError as error:
        raise SpecError(
            "JSON in a model's config.json",
            found=error.msg,
            do="copy config.json from the checkpoint, unchanged",
            where=Where(str(path), error.lineno),
        ) from None
    except (ValueError, RecursionError) as error:
        raise SpecError(
            "numbers and nesting as in a model's config.json",
            found=str(error)[:200],
            do="copy config.json from the checkpoint, unchanged",
            where=Where(str(path)),
        ) from None
    if not isinstance(data, dict):
        raise SpecError(
            "a JSON object in a model's config.json",
            found=f"a {type(data).__name__}",
            do="copy config.json from the checkpoint, unchanged",
            where=Where(str(path), 1),
        )
    return data
