"""What is known of one checkpoint: its plan or why it has none, its format, quality and standing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rayserve.errors import DoesNotFitError, RayserveError
from rayserve.plan import FirstTokenTime, MemoryEstimate, NextTokenTime, Plan
from rayserve.planner.candidates.quality import quality_of, worst_published
from rayserve.planner.candidates.rank import Standing
from rayserve.planner.candidates.record import CandidateRow, Quality, Refusal, SloState, Traits
from rayserve.planner.candidates.traits import traits_of
from rayserve.planner.catalogue import Gpu, gpus
from rayserve.planner.memory.budget import Outcome
from rayserve.planner.support.precision import capability_of, table
from rayserve.planner.support.schemes import SIXTEEN, Scheme, schemes_of
from rayserve.planner.views.parts import verdict
from rayserve.planner.weights.architecture import Architecture, read_architecture
from rayserve.spec import ClusterSpec, serving_pool


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint to look at."""

    name: str
    spec: ClusterSpec
    """The spec with this checkpoint as its model (`ClusterSpec.serving`), paths absolute."""
    config: Mapping[str, Any] | None
    """Content of its config.json; None: there is no such file."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """As of `build_plan`."""
    stored: Mapping[str, int] = field(default_factory=dict)
    """As `checkpoint` of `build_plan`."""
    problem: RayserveError | None = None
    """Why config.json could not be read."""


class Look:
    """One checkpoint, with everything that its row and its rank follow from."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        order: int,
        plan: Plan | None,
        error: RayserveError | None,
    ) -> None:
        self.checkpoint, self.order = checkpoint, order
        self.plan, self.error = plan, error
        spec, config = checkpoint.spec, checkpoint.config or {}
        self.spec = spec
        self.gpu: Gpu | None = gpus().get(serving_pool(spec).gpu)
        self.schemes = schemes_of(_text(config))
        self.architecture = self._architecture()
        self.traits = self._traits()
        self.quality = self._quality()

    def _architecture(self) -> Architecture | None:
        """None where it is not known, or config.json is wrong: the build has told that."""
        one = self.checkpoint
        if one.problem is not None or one.config is None:
            return None
        where = one.spec.where("model", "config")
        try:
            return read_architecture(one.config, where, dtype=one.spec.precision.dtype)
        except RayserveError:
            return None

    def _traits(self) -> Traits | None:
        if self.architecture is None:
            return None
        where = self.spec.where("model", "config")
        try:
            return traits_of(self.architecture, self.checkpoint.config or {}, where)
        except RayserveError:
            return None

    @property
    def _readable(self) -> bool:
        """config.json says enough to tell the format: what is broken has none."""
        return self.plan is not None or self.architecture is not None

    def _quality(self) -> Quality | None:
        if not self._readable:
            return None
        parameters = self.traits.parameters if self.traits is not None else 0
        return quality_of(self.schemes, parameters, weights_alone=bool(_instead(self)))

    # ── rank ──────────────────────────────────────────────────────────────────────────────────────
    def standing(self) -> Standing:
        """What decides the rank; only where there is a plan."""
        plan = self.plan
        assert plan is not None  # the caller has looked
        memory = plan.memory
        figure, text = self._figure()
        parameters = self.traits.parameters if self.traits is not None else 0
        quality = self.quality
        claimed = self.traits.claimed_positions if self.traits is not None else 0
        return Standing(
            name=self.checkpoint.name,
            sure=memory is None or _proven(memory),
            short=_max_model_len(plan) < _request_tokens(self.spec),
            slo=self._slo(),
            stretched=0 < claimed < _max_model_len(plan),
            figure=figure,
            figure_text=text,
            throughput=self.spec.aim == "throughput",
            recovery_percent=(
                quality.recovery_percent if quality is not None else worst_published(parameters)
            ),
            quality_known=quality is not None,
            accuracy_weight=self.spec.model.accuracy_weight,
            expected_concurrency=memory.expected_concurrency if memory is not None else 0,
            weights_bytes=memory.weights_bytes if memory is not None else 0,
            kv_bytes_per_token=memory.kv_bytes_per_token if memory is not None else 0,
            order=self.order,
        )

    def _figure(self) -> tuple[float, str]:
        """The aim's figure in ms, and in words with its range."""
        first, following = self._first_token(), self._next_token()
        if first is None or following is None:
            return math.inf, ""
        if self.spec.aim == "throughput":
            low, high = (1e3 * following.batch / ms for ms in (following.high_ms, following.low_ms))
            return (
                _middle(following) / following.batch,
                f"{low:.0f} to {high:.0f} tokens/s with {following.batch} requests",
            )
        tokens = self.spec.workload.output_tokens
        low, high = (
            (getattr(first, end) + tokens * getattr(following, end)) / 1e3
            for end in ("low_ms", "high_ms")
        )
        middle = _middle(first) + tokens * _middle(following)
        return middle, f"an answer takes {low:.1f} to {high:.1f} s"

    def _first_token(self) -> FirstTokenTime | None:
        """TTFT of the workload's prompt, nothing of it in the cache."""
        latency = self.plan.latency if self.plan is not None else None
        return latency.ttft[0] if latency is not None and latency.ttft else None

    def _next_token(self) -> NextTokenTime | None:
        """TPOT at the workload's length: of one request, or of as many as run at once."""
        most = self._in_flight() if self.spec.aim == "throughput" else 1
        return self._tpot(most)

    def _tpot(self, most: int) -> NextTokenTime | None:
        """The row of the largest batch up to `most`, else of the smallest."""
        plan = self.plan
        if plan is None or plan.latency is None or not plan.latency.tpot:
            return None
        first: dict[int, NextTokenTime] = {}
        for row in plan.latency.tpot:
            first.setdefault(row.batch, row)
        return first[max((batch for batch in first if batch <= most), default=min(first))]

    def _in_flight(self) -> int:
        plan = self.plan
        assert plan is not None  # asked of plans alone
        room = plan.memory.expected_concurrency if plan.memory is not None else math.inf
        return max(1, int(min(room, plan.door.max_in_flight)))

    def _slo(self) -> SloState:
        """Both promises against their ranges, TPOT with as many requests as run at once."""
        slo = self.spec.slo
        asked = [
            (promised, row)
            for promised, row in (
                (slo.ttft_ms, self._first_token()),
                (slo.tpot_ms, self._tpot(self._in_flight())),
            )
            if promised
        ]
        if not asked:
            return "not set"
        if any(row is None for _, row in asked):
            return "not known"
        if any(row.low_ms > promised for promised, row in asked if row is not None):
            return "missed"
        late = any(row.high_ms > promised for promised, row in asked if row is not None)
        return "may be missed" if late else "met"

    # ── rows ──────────────────────────────────────────────────────────────────────────────────────
    def row(self, rank: int, reason: str) -> CandidateRow:
        """The row of a checkpoint that can be served."""
        plan = self.plan
        assert plan is not None  # the caller has ranked it
        memory = plan.memory
        standing = self.standing()
        figures: dict[str, Any] = {}
        if not math.isinf(standing.figure):
            figures = {
                "figure_ms": round(standing.figure, 2),
                "cost_ms": round(standing.cost, 2),
            }
        if memory is not None:
            figures |= {
                "weights_bytes": memory.weights_bytes,
                "kv_bytes_per_token": memory.kv_bytes_per_token,
                "kv_tokens": memory.kv_tokens,
                "max_concurrency": memory.max_concurrency,
                "expected_concurrency": memory.expected_concurrency,
            }
        return self._row(
            rank,
            reason,
            verdict=verdict(plan),
            max_model_len=_max_model_len(plan),
            ttft=self._first_token(),
            tpot=self._next_token(),
            figure=standing.figure_text,
            slo=standing.slo,
            notes=plan.notes,
            **figures,
        )

    def refused(self) -> CandidateRow:
        """The row of a checkpoint that has no plan."""
        error = self.error
        assert error is not None  # there is a plan or an error
        too_large = isinstance(error, DoesNotFitError)
        why = f"{error.needed}; found {error.found}" if error.found else error.needed
        return self._row(
            0,
            error.do or why,
            verdict=f"{'does not fit' if too_large else 'refused'}: {why}",
            weights_bytes=error.weights_bytes if isinstance(error, DoesNotFitError) else 0,
            refusal=Refusal(
                error=type(error).__name__,
                needed=error.needed,
                found=error.found,
                do=error.do,
                where=str(error.where or ""),
            ),
        )

    def _row(self, rank: int, reason: str, **more: Any) -> CandidateRow:
        model = self.spec.model
        return CandidateRow(
            rank=rank,
            name=self.checkpoint.name,
            served=False,
            checkpoint=model.path or model.hf_id,
            reason=reason,
            format=self._format(),
            runs_as=_instead(self),
            quality=self.quality,
            traits=self.traits,
            **more,
        )

    def _format(self) -> str:
        if not self._readable:
            return ""
        if self.schemes:
            return " + ".join(f"{one.format or '?'} {one.method}".strip() for one in self.schemes)
        if self.architecture is not None:
            return self.architecture.dtype
        text = _text(self.checkpoint.config or {})
        return str(text.get("dtype") or text.get("torch_dtype") or "16-bit")


def _instead(look: Look) -> str:
    """What runs in place of the format on this chip; empty where it computes in it, or is not known."""
    if look.gpu is None or not look.gpu.nvidia:
        return ""
    capability = capability_of(look.gpu.compute_capability)
    found = dict.fromkeys(_substitute(scheme, capability) for scheme in look.schemes)
    return "; ".join(filter(None, found))


def _substitute(scheme: Scheme, capability: int) -> str:
    row = table().formats.get(scheme.format, {})
    native = row.get("native")
    computed = native is not None and capability >= native
    return "" if computed or scheme.activations == SIXTEEN else str(row.get("instead", ""))


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, Mapping) else config


def _proven(memory: MemoryEstimate) -> bool:
    """Memory follows vLLM's own sum, all of it is counted, and it fits at the low end."""
    return (
        memory.model == "exact"
        and not memory.uncounted
        and memory.verdict.startswith(Outcome.FITS.value)
    )


def _request_tokens(spec: ClusterSpec) -> int:
    return spec.workload.prompt_tokens + spec.workload.output_tokens


def _middle(row: FirstTokenTime | NextTokenTime) -> float:
    return (row.low_ms + row.high_ms) / 2


def _max_model_len(plan: Plan) -> int:
    return int(plan.replica.engine_arguments()["max_model_len"])
