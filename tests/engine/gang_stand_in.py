"""Stands in for the engine where vLLM's CPU build cannot run: it takes a gang and checks it."""

# No `from __future__ import annotations` here: Serve reads the annotation of `build`.
# ruff: noqa: I002

from pydantic import BaseModel
from ray import serve

from rayserve.plan import Placement, ReplicaPlan
from rayserve.serve_config import replica_options
from rayserve.serving.guards import check_gang, check_stages


class Args(BaseModel):
    """The gang to take."""

    placement: Placement


class Gang:
    """A replica that holds its gang and does nothing with it."""

    def __init__(self, placement: Placement) -> None:
        check_gang(placement)
        check_stages(placement)

    def __call__(self) -> str:
        return "held"


def build(args: Args) -> serve.Application:
    """The stand-in with a real replica's options."""
    replica = ReplicaPlan(
        device="cpu",
        model="none",
        served_model_name="none",
        vllm_version="0.0.0",
        engine_args=[],
        placement=args.placement,
        start_timeout_s=60,
        warmup_prompt_tokens=1,
        state_dir="/nonexistent",
    )
    return serve.deployment(Gang).options(**replica_options(replica)).bind(args.placement)
