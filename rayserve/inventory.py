"""Where do spec, model config, plan and Serve config lie, and how are they read and written?

inventories/<env>/hosts.yml                     Ansible's inventory: pass this file, not the folder
inventories/<env>/group_vars/all/cluster.yml    the spec
inventories/<env>/group_vars/all/plan.yml       the plan, beside it
inventories/<env>/group_vars/all/starts.jsonl   real starts, collected from the hosts
inventories/<env>/serve.yml                     the Serve config, where Ansible reads no variables
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rayserve.errors import HostError, PlanError, SpecError, UsageError, Where
from rayserve.files import read_bytes, read_checkpoint, read_config
from rayserve.plan import Plan, ReplicaPlan, parse_plan
from rayserve.planner import build_plan
from rayserve.planner.catalogue import CPU, Gpu, find_gpu
from rayserve.planner.content import host_files, model_config_path
from rayserve.planner.evidence import sift, unused
from rayserve.planner.render import plan_text, serve_text
from rayserve.serve_config import serve_config
from rayserve.spec import ClusterSpec, absolute_paths, parse_spec, serving_pool
from rayserve.starts import LEDGER, MOST_STARTS, Ledger, newest, read_starts, starts_text

GROUP_VARS = Path("group_vars", "all")
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


@dataclass(frozen=True)
class Planned:
    """A plan and the texts of its files."""

    plan: Plan
    texts: dict[Path, str]
    told: tuple[str, ...] = ()
    """What became of the starts in files that were named."""


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


def make_plan(files: Files, ledgers: Sequence[str] = ()) -> Planned:
    """Read the spec, what it names and what lies beside it, and plan.

    `ledgers`: files of starts from the hosts, whose comparable starts are added to those beside the
    spec. The plan is made from the latter, so that it is the same wherever it is made again.

    Raises:
        SpecError, EngineArgumentError, DoesNotFitError: there is no plan for this spec.
    """
    raw = read_bytes(files.spec, MAX_BYTES)
    spec = parse_spec(_text(raw, files.spec), str(files.spec))
    folder = files.spec.resolve().parent
    spec = absolute_paths(spec, str(folder))
    draft = spec.speculative.config if spec.speculative is not None else ""
    config = read_config(folder / spec.model.config)
    draft_config = read_config(folder / draft) if draft else None
    before = _recorded(files.plan)
    digests = _digests(spec, folder, before)
    build = functools.partial(
        build_plan,
        spec,
        config,
        hashlib.sha256(raw).hexdigest(),
        draft_config=draft_config,
        digests=digests,
        checkpoint=_checkpoint(spec, folder, before, digests),
    )
    kept = _kept(files)
    told: tuple[str, ...] = ()
    if ledgers:
        # What is comparable depends on the replica, and no start changes that.
        kept, told = _collected(kept, ledgers, build().replica, find_gpu(spec, serving_pool(spec)))
    plan = build(ledger=kept)
    source = files.spec.name
    texts = {
        files.plan: plan_text(plan, source),
        files.serve: serve_text(serve_config(plan), source),
    }
    if ledgers:
        texts[files.starts] = starts_text(kept.starts)
    return Planned(plan, texts, told)


def _kept(files: Files) -> Ledger:
    """The starts beside the spec."""
    there = files.starts.is_symlink() or files.starts.exists()
    return _starts(files.starts) if there else Ledger()


def _collected(
    kept: Ledger, ledgers: Sequence[str], replica: ReplicaPlan, gpu: Gpu | None
) -> tuple[Ledger, tuple[str, ...]]:
    """The kept starts and the comparable ones of further files, and what became of the others."""
    told = [f"{LEDGER}: {fault}: dropped" for fault in kept.faults]
    starts = kept.starts
    for name in ledgers:
        found = _starts(Path(name))
        same, others = sift(found.starts, replica, gpu)
        known = {start.text() for start in starts}
        fresh = [start for start in same if start.text() not in known]
        left = unused(others, found.faults)
        told.append(
            f"{name}: {len(same)} comparable starts, {len(fresh)} of them new"
            + (f"; not used: {left}" if left else "")
        )
        starts = newest([*starts, *fresh])
    return Ledger(starts), tuple(told)


def _starts(path: Path) -> Ledger:
    return read_starts(read_bytes(path, MAX_BYTES, shorten=f"keep its end: tail -n {MOST_STARTS}"))


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
    text = _text(read_bytes(Path(path), MAX_BYTES), Path(path))
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
            "to write the plan and the Serve config",
            found=str(error)[:300],
            do="make the folder writable, or write elsewhere with --out",
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


def _digests(spec: ClusterSpec, folder: Path, before: Plan | None) -> dict[str, str]:
    """SHA-256 of the small files that define a replica.

    Files of the hosts are read where the plan is made on a host. Elsewhere the digest that the plan
    `before` has of them stays, so that a plan is the same wherever it is made again.
    """
    known = before.replica.content if before is not None else []
    found = {item.name: str(item.value) for item in known}
    places = {path: Path(path) for path in host_files(spec)}
    places[model_config_path(spec)] = folder / spec.model.config
    for name, place in places.items():
        with contextlib.suppress(OSError):  # not here, or not for us to look at
            if place.is_file() and os.access(place, os.R_OK):
                found[name] = hashlib.sha256(read_bytes(place, MAX_BYTES)).hexdigest()
    return found


def _checkpoint(
    spec: ClusterSpec, folder: Path, before: Plan | None, digests: Mapping[str, str]
) -> Mapping[str, int]:
    """Bytes of the checkpoint's tensors by type, from the headers of its files; empty: not known.

    As with the digests, what the plan `before` has of them stays where they are not at hand, as long
    as the model's config.json is the same.
    """
    if serving_pool(spec).gpu == CPU:  # no GPU memory to prove
        return {}
    places = [(folder / spec.model.config).parent]
    if spec.model.path:
        places.append(Path(spec.model.path))
    found: Mapping[str, int] = next(filter(None, map(read_checkpoint, places)), {})
    name = model_config_path(spec)
    if found or before is None:
        return found
    same = any(
        item.name == name and item.value == digests.get(name) for item in before.replica.content
    )
    return {item.name: item.value for item in before.checkpoint} if same else {}


def _recorded(path: Path) -> Plan | None:
    """The plan on disk; None: there is none, or what is there is about to be written anew."""
    try:
        return read_plan(str(path)) if path.is_file() else None
    except (PlanError, SpecError, OSError):
        return None


def read_model_config(path: str) -> Mapping[str, Any]:
    """The content of a model's config.json.

    Raises:
        SpecError: there is none, or it is not that of a model that generates text.
    """
    config = read_config(Path(path))
    if config is None:
        raise SpecError(
            "a model's config.json",
            found="no such file",
            do="name config.json of the checkpoint",
            where=Where(path[:200]),
        )
    return config
