"""A Serve deployment that stands in for the engine where a test is about Serve's control of it.

It holds a gang, streams at a fixed pace, drains, and reports its load as the real replica does, but
needs no model and starts in a second. Imported by Ray's workers as `tests.engine.stand_in`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse

from rayserve.autoscaling import ReplicaLoad, report
from rayserve.plan import ScalingPlan

TICK_S = 0.1


class Engine:
    """Streams `ticks` lines, the first with its process id, the last with `done`."""

    def __init__(self) -> None:
        self._plan: ScalingPlan | None = None
        self._in_flight = 0

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take the scaling plan, now and after each edit."""
        self._plan = ScalingPlan.model_validate(user_config["scaling"])

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Open streams as load, without any time to first token."""
        assert self._plan is not None
        running = float(self._in_flight)
        return report(ReplicaLoad(running, running, 0.0, 0.0, float("nan")), self._plan)

    async def __call__(self, request: Request) -> StreamingResponse:
        """Serve's entry."""
        ticks = int(request.query_params["ticks"])
        return StreamingResponse(self._lines(ticks), media_type="text/plain")

    async def _lines(self, ticks: int) -> AsyncIterator[str]:
        self._in_flight += 1
        try:
            yield f"pid {os.getpid()}\n"
            for number in range(ticks):
                await asyncio.sleep(TICK_S)
                yield f"tick {number}\n"
            yield "done\n"
        finally:
            self._in_flight -= 1


def build(args: dict[str, Any]) -> Any:
    """An application of one stand-in whose replicas hold `args["gpus"]` logical GPUs each."""
    from ray import serve

    gpus = args["gpus"]
    return (
        serve.deployment(name="Engine")(Engine)
        .options(
            ray_actor_options={"num_cpus": 0, "num_gpus": gpus},
            placement_group_bundles=[{"GPU": gpus}],
            placement_group_strategy="STRICT_PACK",
        )
        .bind()
    )
