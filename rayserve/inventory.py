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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rayserve.errors import HostError, PlanError, SpecError, UsageError, Where
from rayserve.plan import Plan, parse_plan
from rayserve.planner import build_plan
from rayserve.planner.content import host_files, model_config_path
from rayserve.planner.render import plan_text, serve_text
from rayserve.serve_config import serve_config
from rayserve.spec import ClusterSpec, absolute_paths, parse_spec

GROUP_VARS = Path("group_vars", "all")
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
    if path.is_dir():
        inside = path / GROUP_VARS / "cluster.yml"
        path = inside if inside.is_file() else path / "cluster.yml"
    if not path.is_file():
        raise UsageError(
            "a cluster.yml, or the folder of an inventory that has one",
            found=f"no file at {path}",
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
    raw = _read(files.spec)
    spec = parse_spec(_text(raw, files.spec), str(files.spec))
    folder = files.spec.resolve().parent
    spec = absolute_paths(spec, str(folder))
    draft = spec.speculative.config if spec.speculative is not None else ""
    plan = build_plan(
        spec,
        _config(folder / spec.model.config),
        hashlib.sha256(raw).hexdigest(),
        draft_config=_config(folder / draft) if draft else None,
        digests=_digests(spec, folder, files.plan),
    )
    source = files.spec.name
    return Planned(
        plan,
        {
            files.plan: plan_text(plan, source),
            files.serve: serve_text(serve_config(plan), source),
        },
    )


def read_plan(path: str) -> Plan:
    """The plan in a plan.yml.

    Raises:
        PlanError: it is no plan, or was edited by hand.
    """
    try:
        data = yaml.load(_text(_read(Path(path)), Path(path)), Loader=_Loader)  # noqa: S506
    except yaml.YAMLError as error:
        raise PlanError(
            "YAML",
            found=str(error).splitlines()[0],
            do="write the plan again with `rayserve plan`",
            where=Where(path),
        ) from None
    return parse_plan(data, path)


def current(path: Path) -> str:
    """The text of a file; empty when there is none."""
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def write_all(texts: dict[Path, str]) -> None:
    """Write every file, or none: a failure puts back what was there.

    Raises:
        HostError: a folder or file cannot be written.
    """
    before = {path: path.read_bytes() if path.is_file() else None for path in texts}
    drafts = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in texts}
    done: list[Path] = []
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(drafts[path], text.encode())
        for path, draft in drafts.items():
            draft.replace(path)
            done.append(path)
    except OSError as error:
        for path in done:
            old = before[path]
            path.unlink() if old is None else _write(path, old)
        raise HostError(
            "to write the plan and the Serve config",
            found=str(error),
            do="make the folder writable, or write elsewhere with --out",
        ) from None
    finally:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SpecError(
            "a file that can be read",
            found=error.strerror or str(error),
            do="check its owner and mode",
            where=Where(str(path)),
        ) from None


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


def _digests(spec: ClusterSpec, folder: Path, plan: Path) -> dict[str, str]:
    """SHA-256 of the small files that define a replica.

    Files of the hosts are read where the plan is made on a host. Elsewhere the digest that plan.yml
    has of them stays, so that a plan is the same wherever it is made again.
    """
    found = _recorded(plan)
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
    except (PlanError, SpecError):
        return {}  # it is about to be written anew
    return {item.name: str(item.value) for item in known}


def _config(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        data = json.loads(_text(_read(path), path))
    except json.JSONDecodeError as error:
        raise SpecError(
            "JSON in a model's config.json",
            found=error.msg,
            do="copy config.json from the checkpoint, unchanged",
            where=Where(str(path), error.lineno),
        ) from None
    if not isinstance(data, dict):
        raise SpecError(
            "a JSON object in a model's config.json",
            found=f"a {type(data).__name__}",
            do="copy config.json from the checkpoint, unchanged",
            where=Where(str(path), 1),
        )
    return data
