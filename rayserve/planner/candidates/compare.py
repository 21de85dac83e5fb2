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
from rayserve.spec import SERVED, ClusterSpec, serving_pool


@dataclass(frozen=True)
class Compared:
    """The comparison, and the plan of each checkpoint that has one, by name."""

    comparison: Comparison
    plans: dict[str, Plan]
    errors: dict[str, RayserveError]
    """Of the checkpoints that have none, in the order of the file."""


def compare(
    checkpoints: Sequence[Checkpoint],
    sha256: str,
    *,
    draft_config: Mapping[str, Any] | None = None,
    digests: Mapping[str, str] | None = None,
) -> Compared:
    """All checkpoints of a spec, the best first; see `rank` for what best means.

    Args:
        checkpoints: of one spec, in the order of the file, at least one.
        sha256: of the spec file.
        draft_config: as of `build_plan`.
        digests: as of `build_plan`, of every checkpoint.
    """
    looks: dict[str, Look] = {}
    for order, one in enumerate(checkpoints):
        plan, error = None, one.problem
        if error is None:
            try:
                plan = build_plan(
                    one.spec, one.config, sha256, draft_config=draft_config, digests=digests
                )
            except RayserveError as refused:
                error = refused
        looks[one.name] = Look(one, order, plan, error)
    places = ranked([look.standing() for look in looks.values() if look.plan is not None])
    rows = [looks[own.name].row(rank, reason) for rank, (own, reason) in enumerate(places, 1)]
    served = SERVED if SERVED in looks else rows[0].name if rows else ""
    rows += [look.refused() for look in looks.values() if look.plan is None]
    rows = [row.model_copy(update={"served": row.name == served}) for row in rows]
    return Compared(
        _comparison(checkpoints[0].spec, rows),
        {name: look.plan for name, look in looks.items() if look.plan is not None},
        {name: look.error for name, look in looks.items() if look.error is not None},
    )


def pick(compared: Compared) -> Plan:
    """The plan of the best checkpoint, with the choice and its reason.

    Raises:
        DoesNotFitError: none can be served.
        RayserveError: none can, all for one reason, which is not about a checkpoint.
    """
    rows = compared.comparison.rows
    best = rows[0]
    if not best.rank:
        raise _none(compared)
    others = [f"{row.name}: {row.reason}" for row in rows[1:]]
    reason = "; ".join([f"rank 1 of {len(rows)} candidates: {best.reason}", *others])
    chosen = NamedValue(name="checkpoint", value=best.name, reason=reason)
    plan = compared.plans[best.name]
    return plan.model_copy(update={"choices": [chosen, *plan.choices]})


def _none(compared: Compared) -> RayserveError:
    errors = list(compared.errors.values())
    first = errors[0]
    if all(str(error) == str(first) for error in errors):
        return first
    found = "; ".join(f"{row.name} {row.verdict}" for row in compared.comparison.rows)
    # The advice of the last one in the file that is too large is as good as any: it is a start.
    fitting = [error for error in errors if isinstance(error, DoesNotFitError)] or errors
    return DoesNotFitError(
        "a candidate that can be served",
        found=found,
        do=f"see `rayserve plan --candidates`; {fitting[-1].do}",
        where=fitting[-1].where,
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
