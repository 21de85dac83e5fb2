"""What do the spec of an environment and the files beside it give? Reads them, and plans.

cluster.yml, config.json, headers of the checkpoint, starts.jsonl ──▶ planner ──▶ plan.yml, serve.yml
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayserve.errors import PlanError, SpecError, Where
from rayserve.files import read_bytes, read_checkpoint, read_config
from rayserve.inventory import MAX_BYTES, Files, decoded, read_plan
from rayserve.plan import NamedValue, Plan, ReplicaPlan
from rayserve.planner import build_plan
from rayserve.planner.candidates import Checkpoint, Compared, Comparison, best, compare
from rayserve.planner.catalogue import CPU, Gpu, find_gpu
from rayserve.planner.content import host_files, model_config_path
from rayserve.planner.evidence import sift, unused
from rayserve.planner.render import plan_text, serve_text
from rayserve.serve_config import serve_config
from rayserve.spec import SERVED, ClusterSpec, absolute_paths, parse_spec, picks, serving_pool
from rayserve.starts import LEDGER, MOST_STARTS, Ledger, newest, read_starts, starts_text


@dataclass(frozen=True)
class Planned:
    """A plan and the texts of its files."""

    plan: Plan
    texts: dict[Path, str]
    told: tuple[str, ...] = ()
    """What became of the starts in files that were named."""


@dataclass(frozen=True)
class Read:
    """A spec with absolute paths, and what lies beside it."""

    spec: ClusterSpec
    folder: Path
    sha256: str
    draft_config: Mapping[str, Any] | None
    before: Plan | None
    """The plan on disk; None: there is none, or what is there is about to be written anew."""


def read_spec(files: Files) -> Read:
    """The spec of an environment.

    Raises:
        SpecError: it cannot be read, or is wrong.
    """
    raw = read_bytes(files.spec, MAX_BYTES)
    spec = parse_spec(decoded(raw, files.spec), str(files.spec))
    folder = files.spec.resolve().parent
    spec = absolute_paths(spec, str(folder))
    draft = spec.speculative.config if spec.speculative is not None else ""
    named = spec.where("speculative", "config")
    return Read(
        spec,
        folder,
        hashlib.sha256(raw).hexdigest(),
        read_config(folder / draft, named=named) if draft else None,
        _recorded(files.plan),
    )


def make_plan(files: Files, ledgers: Sequence[str] = ()) -> Planned:
    """Read the spec, what it names and what lies beside it, and plan.

    `ledgers`: files of starts from the hosts, whose comparable starts are added to those beside the
    spec. The plan is made from the latter, so that it is the same wherever it is made again.

    Raises:
        SpecError, EngineArgumentError, DoesNotFitError: there is no plan for this spec.
    """
    read = read_spec(files)
    chosen: list[NamedValue] = []
    plan: Plan | None = None
    if picks(read.spec):
        compared = _compare(read)
        chosen = [best(compared)]
        plan = compared.plans[str(chosen[0].value)]
        one = next(item for item in compared.checkpoints if item.name == chosen[0].value)
    else:
        one = _checkpoint(SERVED, read.spec, read)
    if one.problem is not None:
        raise one.problem
    build = functools.partial(
        build_plan,
        one.spec,
        one.config,
        read.sha256,
        draft_config=read.draft_config,
        digests=one.digests,
        checkpoint=one.stored,
    )
    kept = _kept(files)
    told: tuple[str, ...] = ()
    if ledgers:
        # What is comparable depends on the replica, and no start changes that.
        gpu = find_gpu(one.spec, serving_pool(one.spec))
        kept, told = _collected(kept, ledgers, (plan or build()).replica, gpu)
    if plan is None or kept != Ledger():
        plan = build(ledger=kept)
    plan = plan.model_copy(update={"choices": [*chosen, *plan.choices]})
    source = files.spec.name
    texts = {
        files.plan: plan_text(plan, source),
        files.serve: serve_text(serve_config(plan), source),
    }
    if ledgers:
        texts[files.starts] = starts_text(kept.starts)
    return Planned(plan, texts, told)


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


# ── checkpoints ─────────────────────────────────────────────────────────────────────────────────


def _compare(read: Read) -> Compared:
    """Every checkpoint of a spec; a config.json that cannot be read is told in its row."""
    spec = read.spec
    found = [] if picks(spec) else [_checkpoint(SERVED, spec, read)]
    for index, candidate in enumerate(spec.model.candidates):
        found.append(_checkpoint(candidate.name, spec.serving(index), read))
    return compare(found, read.sha256, draft_config=read.draft_config)


def _checkpoint(name: str, spec: ClusterSpec, read: Read) -> Checkpoint:
    config, problem = None, None
    stored: Mapping[str, int] = {}
    digests = _digests(spec, read.folder, read.before)
    try:
        written = spec.where("model", "config")
        config = read_config(read.folder / spec.model.config, named=written)
        stored = _stored(spec, read, digests)
    except SpecError as error:
        problem = error.with_traceback(None)  # its frames hold all that was read
    return Checkpoint(name, spec, config, digests, stored, problem)


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


def _stored(spec: ClusterSpec, read: Read, digests: Mapping[str, str]) -> Mapping[str, int]:
    """Bytes of the checkpoint's tensors by type, from the headers of its files; empty: not known.

    As with the digests, what the plan on disk has of them stays where they are not at hand, as long
    as the model's config.json is the same.
    """
    if serving_pool(spec).gpu == CPU:  # no GPU memory to prove
        return {}
    places = [(read.folder / spec.model.config).parent]
    if spec.model.path:
        places.append(Path(spec.model.path))
    found: Mapping[str, int] = next(filter(None, map(read_checkpoint, places)), {})
    name, before = model_config_path(spec), read.before
    if found or before is None:
        return found
    same = any(
        item.name == name and item.value == digests.get(name) for item in before.replica.content
    )
    return {item.name: item.value for item in before.checkpoint} if same else {}


def _recorded(path: Path) -> Plan | None:
    try:
        return read_plan(str(path)) if path.is_file() else None
    except (PlanError, SpecError, OSError):
        return None


# ── starts ──────────────────────────────────────────────────────────────────────────────────────


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
        if not found.starts:
            raise SpecError(
                f"lines of starts, as a replica writes them into its {LEDGER}",
                found=found.faults[0] if found.faults else "an empty file",
                do=f"name the {LEDGER} of a host's state_dir (docs/starts.md)",
                where=Where(name[:200]),
            )
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
