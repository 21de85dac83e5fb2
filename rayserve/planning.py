"""What do the spec of an environment and the files beside it give? Reads them, and plans.

cluster.yml, config.json, headers of the checkpoint, starts.jsonl ──▶ planner ──▶ plan.yml, serve.yml
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayserve.errors import PlanError, RayserveError, SpecError, Where
from rayserve.files import read_bytes, read_config
from rayserve.inventory import MAX_BYTES, Files, decoded, read_plan
from rayserve.plan import NamedValue, Plan, ReplicaPlan
from rayserve.planner import build_plan
from rayserve.planner.candidates import Checkpoint, Compared, Comparison, best, compare
from rayserve.planner.catalogue import Gpu, find_gpu
from rayserve.planner.evidence import sift, unused
from rayserve.planner.render import plan_text, serve_text
from rayserve.serve_config import serve_config
from rayserve.sources import Sources
from rayserve.spec import SERVED, ClusterSpec, absolute_paths, parse_spec, picks, serving_pool
from rayserve.starts import LEDGER, MOST_STARTS, Ledger, newest, read_starts, starts_text
from rayserve.targets import check_targets, inputs

Say = Callable[[str], None]
PINNED = (
    "the commit that `{name}` was when this was planned, and that every host loads; a changed "
    "cluster.yml is planned from what it is then, unless the commit is written there"
)


def _quiet(_line: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Planned:
    """A plan and the texts of its files."""

    plan: Plan
    texts: dict[Path, str]
    told: tuple[str, ...]
    """What became of the starts in files that were named."""
    read: Read
    inputs: tuple[Path, ...]
    """All files that it is made from."""
    checkpoint: Checkpoint
    """What is served, and what was read of it."""
    _compared: Compared | None

    def comparison(self) -> Comparison | None:
        """All checkpoints of the spec, the best first; None: it names no candidates."""
        if not self.read.spec.model.candidates:
            return None
        return (self._compared or _compare(self.read)).comparison


@dataclass(frozen=True)
class Read:
    """A spec with absolute paths, and what lies beside it."""

    spec: ClusterSpec
    """With the commit of the draft model that was read, where that is an id without `config`."""
    sha256: str
    draft_revision: str
    """As the file has it."""
    draft_config: Mapping[str, Any] | None
    sources: Sources
    """Where its checkpoints are read from."""


def _read(files: Files, say: Say) -> Read:
    raw = read_bytes(files.spec, MAX_BYTES)
    spec = parse_spec(decoded(raw, files.spec), str(files.spec))
    folder = files.spec.resolve().parent
    spec = absolute_paths(spec, str(folder))
    sha256, before = hashlib.sha256(raw).hexdigest(), _recorded(files.plan)
    unchanged = before is not None and before.spec_sha256 == sha256
    sources = Sources(spec, folder, before=before, unchanged=unchanged, say=say)
    written = spec.speculative.revision if spec.speculative is not None else ""
    spec, draft_config = sources.drafted(spec)
    return Read(spec, sha256, written, draft_config, sources)


def make_plan(files: Files, ledgers: Sequence[str] = (), *, say: Say = _quiet) -> Planned:
    """Read the spec, what it names and what lies beside it, and plan.

    Args:
        files: of the environment.
        ledgers: files of starts from the hosts, whose comparable starts are added to those beside the
            spec. The plan is made from the latter, so that it is the same wherever it is made again.
        say: takes a line of progress, where something is fetched.

    Raises:
        SpecError, EngineArgumentError, DoesNotFitError: there is no plan for this spec.
        UsageError: a file of the plan would take the place of another (rayserve.targets).
        HostError: what it names cannot be fetched.
    """
    read = _read(files, say)
    made_from = inputs(files, read.spec, ledgers)
    targets = [files.plan, files.serve, *([files.starts] if ledgers else [])]
    check_targets(targets, files, made_from)
    chosen: list[NamedValue] = []
    plan: Plan | None = None
    compared: Compared | None = None
    if picks(read.spec):
        compared = _compare(read)
        chosen = [best(compared)]
        plan = compared.plans[str(chosen[0].value)]
        one = next(item for item in compared.checkpoints if item.name == chosen[0].value)
    else:
        one = _checkpoint(SERVED, read.spec, read.sources)
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
    chosen += _pinned(read, one)
    plan = plan.model_copy(update={"choices": [*chosen, *plan.choices]})
    source = files.spec.name
    texts = {
        files.plan: plan_text(plan, source),
        files.serve: serve_text(serve_config(plan), source),
    }
    if ledgers:
        texts[files.starts] = starts_text(kept.starts)
    return Planned(plan, texts, told, read, made_from, one, compared)


def compare_candidates(files: Files, *, say: Say = _quiet) -> Comparison:
    """All checkpoints of a spec, the best first.

    Raises:
        SpecError: the spec is wrong, or names no candidates.
    """
    read = _read(files, say)
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
    spec, sources = read.spec, read.sources
    found = [] if picks(spec) else [_checkpoint(SERVED, spec, sources)]
    for index, candidate in enumerate(spec.model.candidates):
        found.append(_checkpoint(candidate.name, spec.serving(index), sources))
    return compare(found, read.sha256, draft_config=read.draft_config)


def _checkpoint(name: str, spec: ClusterSpec, sources: Sources) -> Checkpoint:
    try:
        found = sources.read(spec)
    except RayserveError as error:
        # Without its frames, which hold all that was read.
        return Checkpoint(name, spec, None, problem=error.with_traceback(None))
    return Checkpoint(name, found.spec, found.config, found.digests, found.stored)


def _pinned(read: Read, one: Checkpoint) -> list[NamedValue]:
    """The commits that were read, where the spec names none: what is served is what was planned."""
    spec, guess = one.spec, one.spec.speculative
    written = {item.name: item.revision for item in read.spec.model.candidates}
    rows = [
        (
            "model.revision",
            written.get(one.name, read.spec.model.revision),
            spec.model.revision,
        ),
        (
            "speculative.revision",
            read.draft_revision,
            guess.revision if guess is not None else "",
        ),
    ]
    return [
        NamedValue(name=key, value=commit, reason=PINNED.format(name=named or "main"))
        for key, named, commit in rows
        if commit != named
    ]


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
