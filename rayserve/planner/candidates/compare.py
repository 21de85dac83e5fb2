"""What does each checkpoint give on this hardware? One plan each, through the same build.

A checkpoint that cannot be planned becomes a row that says why; it never stops the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayserve.errors import DoesNotFitError, RayserveError
from rayserve.plan import NamedValue, Plan
from rayserve.planner.build import build_plan
from rayserve.planner.candidates.look import Checkpoint, Look
from rayserve.planner.candidates.rank import ranked
from rayserve.planner.candidates.record import CandidateRow, Comparison
from rayserve.spec import SERVED, SPEC_KEY, ClusterSpec, serving_pool


@dataclass(frozen=True)
class Compared:
    """The comparison, and what it was made from."""

    comparison: Comparison
    checkpoints: tuple[Checkpoint, ...]
    plans: dict[str, Plan]
    """Of each checkpoint that has one, by name."""
    errors: dict[str, RayserveError]
    """Of the checkpoints that have none, in the order of the file."""


def compare(
    checkpoints: Sequence[Checkpoint],
    sha256: str,
    *,
    draft_config: Mapping[str, Any] | None = None,
) -> Compared:
    """All checkpoints of a spec, the best first; see `rank` for what best means.

    Args:
        checkpoints: of one spec, in the order of the file, at least one.
        sha256: of the spec file.
        draft_config: as of `build_plan`.

    Raises:
        RayserveError: none can be served, for a mistake in the spec that no checkpoint changes.
    """
    looks: dict[str, Look] = {}
    for order, one in enumerate(checkpoints):
        plan, error = None, one.problem
        if error is None:
            try:
                plan = build_plan(
                    one.spec,
                    one.config,
                    sha256,
                    draft_config=draft_config,
                    digests=one.digests,
                    checkpoint=one.stored,
                )
            except RayserveError as refused:
                error = refused
        looks[one.name] = Look(one, order, plan, error)
    _check_spec(list(looks.values()))
    places = ranked([look.standing() for look in looks.values() if look.plan is not None])
    rows = [looks[own.name].row(rank, reason) for rank, (own, reason) in enumerate(places, 1)]
    served = SERVED if SERVED in looks else rows[0].name if rows else ""
    rows += [look.refused() for look in looks.values() if look.plan is None]
    rows = [row.model_copy(update={"served": row.name == served}) for row in rows]
    return Compared(
        _comparison(checkpoints[0].spec, rows),
        tuple(checkpoints),
        {name: look.plan for name, look in looks.items() if look.plan is not None},
        {name: look.error for name, look in looks.items() if look.error is not None},
    )


def _check_spec(looks: Sequence[Look]) -> None:
    """Refuse a spec that fails with every checkpoint for one reason, which is not about checkpoints."""
    if any(look.plan is not None for look in looks):
        return
    errors = [look.error for look in looks if look.error is not None]
    common = [error for error in errors if not isinstance(error, DoesNotFitError)]
    common = [error for error in common if not _about_checkpoint(error)]
    if common and len({str(error) for error in common}) == 1:
        raise common[0]


def _about_checkpoint(error: RayserveError) -> bool:
    key = error.where.key if error.where is not None else None
    return key is None or key.startswith(f"{SPEC_KEY}.model")


def best(compared: Compared) -> NamedValue:
    """The name of the checkpoint to serve, and why it is the one.

    Raises:
        DoesNotFitError: none can be served.
    """
    rows = compared.comparison.rows
    first = rows[0]
    if not first.rank:
        raise _none(compared)
    others = [
        f"{row.name}: {row.reason if row.rank else row.verdict.partition(':')[0]}"
        for row in rows[1:]
    ]
    reason = "; ".join([f"rank 1 of {len(rows)} candidates: {first.reason}", *others])
    return NamedValue(name="checkpoint", value=first.name, reason=reason)


def _none(compared: Compared) -> DoesNotFitError:
    """Why there is nothing to pick; the advice is that of the checkpoint with the smallest weights."""
    rows, errors = compared.comparison.rows, compared.errors
    large = [row for row in rows if row.weights_bytes]
    nearest = min(large, key=lambda row: row.weights_bytes) if large else rows[-1]
    error = errors[nearest.name]
    return DoesNotFitError(
        "a candidate that can be served",
        found="; ".join(f"{row.name} {row.verdict}" for row in rows),
        do=f"{nearest.name}: {error.do}" if error.do else "see `rayserve plan --candidates`",
        where=error.where,
    )


def _comparison(spec: ClusterSpec, rows: list[CandidateRow]) -> Comparison:
    pool = serving_pool(spec)
    return Comparison(
        name=spec.name,
        aim=spec.aim,
        gpu=pool.gpu,
        gpus=pool.hosts * pool.gpus_per_host,
        prompt_tokens=spec.workload.prompt_tokens,
        output_tokens=spec.workload.output_tokens,
        ttft_slo_ms=spec.slo.ttft_ms,
        tpot_slo_ms=spec.slo.tpot_ms,
        accuracy_weight=spec.model.accuracy_weight,
        rows=rows,
    )
