"""What do the real starts show of a replica, and of every other that is proposed in its place?

They choose nothing (ADR 0054): they narrow the memory of what was chosen, or show that it does not fit.
What they refuse is not told to anybody as a remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rayserve.engine import VLLM_VERSION
from rayserve.errors import RayserveError
from rayserve.plan import LoraAdapter, ReplicaPlan
from rayserve.planner.arguments import engine_args, frontend_args
from rayserve.planner.content import content
from rayserve.planner.environment import replica_environment
from rayserve.planner.evidence import Evidence, evidence
from rayserve.planner.fit import Fit
from rayserve.planner.lengths import Try
from rayserve.planner.settled import Attempt, Settled, Weights, attempts
from rayserve.planner.sizing import judged
from rayserve.spec import ClusterSpec
from rayserve.starts import Ledger

WARMUP_TOKENS = 64
"""Prompt of the warm-up: long enough to be a real prefill on every attention kernel."""
OTHER_CUT = "The comparable starts had another cut: they narrow no term of the memory."
SIMPLE_TAKES_NONE = "The simple estimate takes from real starts no more than the GPU's total."


def proven(weights: Weights, digests: Mapping[str, str], ledger: Ledger) -> Attempt:
    """Tries other specs of the same model, as a plan of each with these starts would."""
    plain = attempts(weights)
    if not ledger.starts:
        return plain

    def attempt(spec: ClusterSpec) -> Settled | None:
        made = plain(spec)
        if made is None:
            return None
        try:
            return prove(made, digests, ledger, None)[0]
        except RayserveError:
            return None

    return attempt


def prove(
    made: Settled, digests: Mapping[str, str], ledger: Ledger, attempt: Try | None
) -> tuple[Settled, ReplicaPlan, Evidence]:
    """The replica with the memory that its comparable starts narrowed, its plan, and those starts.

    `attempt` plans what notes and a refusal tell people to write; None: nobody reads them.

    Raises:
        EngineArgumentError: an argument or variable that vLLM does not take.
        DoesNotFitError: the starts show that its limits do not fit.
    """
    replica = replica_plan(made, digests)
    found = evidence(ledger, replica, made.gpu)
    if made.fit is None:
        return made, replica, found
    if made.architecture is not None:
        found = found.believed(made.cut, made.fit.weights(made.cut))
    return _narrowed(made, made.fit, found, attempt), replica, found


def replica_plan(made: Settled, digests: Mapping[str, str]) -> ReplicaPlan:
    """What a replica is started with."""
    spec, gpu, sizing = made.spec, made.gpu, made.sizing
    return ReplicaPlan(
        device="cpu" if gpu is None else "cuda",
        model=spec.model.path or spec.model.hf_id,
        model_source="path" if spec.model.path else "hub",
        served_model_name=spec.model.served_name,
        vllm_version=VLLM_VERSION,
        engine_args=engine_args(spec, made.profile, gpu, sizing),
        frontend_args=frontend_args(spec),
        lora_adapters=[LoraAdapter(name=a.name, path=a.path) for a in spec.lora.adapters],
        env=replica_environment(spec, gpu),
        placement=made.placement,
        start_method=spec.scheduling.start_method,
        start_timeout_s=spec.timeouts.start_s,
        warmup_prompt_tokens=min(WARMUP_TOKENS, max(1, sizing.max_model_len.value // 2)),
        state_dir=spec.state_dir,
        content=content(spec, digests),
    )


def _narrowed(made: Settled, fit: Fit, found: Evidence, attempt: Try | None) -> Settled:
    """With the estimate that the starts narrowed, and a note where they narrowed none."""
    if not found.starts:
        return made
    measured = found.measured(fit.facts, made.cut)
    if measured:
        held = fit.checkpoint_bytes
        narrow = Fit(made.spec, made.profile, fit.architecture, fit.gpu, held, starts=measured)
        sizing = judged(made.sizing, made.profile, narrow, made.cut, attempt)
        made = replace(made, fit=narrow, sizing=sizing)
    if made.sizing.memory is not None and made.sizing.memory.calibrated:
        return made
    why = OTHER_CUT if fit.architecture is not None else SIMPLE_TAKES_NONE
    return replace(made, sizing=replace(made.sizing, notes=(*made.sizing.notes, why)))
