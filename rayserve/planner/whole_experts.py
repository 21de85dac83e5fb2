"""What would a replica be that keeps its experts whole, where only that lets it use more of a host?

Slices of an expert may be too narrow for a format's blocks or groups; whole experts are not cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rayserve.errors import RayserveError
from rayserve.planner.choices import limits_of
from rayserve.planner.fit import Fit
from rayserve.planner.memory.simple import Cut
from rayserve.planner.obstacles import Obstacles
from rayserve.planner.sizing import Sizing, size
from rayserve.planner.timing import Timing, read_timing, spread
from rayserve.planner.wishes import expected
from rayserve.spec import ClusterSpec, NodePool

ARGUMENT = "enable_expert_parallel"


@dataclass(frozen=True)
class Replica:
    """A replica as it was sized."""

    cut: Cut
    sizing: Sizing
    timing: Timing | None

    def figures(self, spec: ClusterSpec) -> dict[str, str]:
        """Tokens of its KV cache, and how soon the next token of a lone request comes."""
        memory, limits = self.sizing.memory, limits_of(self.sizing)
        told = {"KV cache": f"{memory.kv_tokens:,} tokens"} if memory is not None else {}
        if self.timing is not None:
            prompt, output = expected(spec, limits.length)
            token = self.timing.token(self.cut, limits, 1, prompt + output // 2)
            told["a token alone"] = spread(token.total)
        return told


def whole_experts(
    spec: ClusterSpec, pool: NodePool, config: Mapping[str, Any], fit: Fit | None, now: Replica
) -> str:
    """How to use more GPUs of a host than `now` does, with what comes of it; empty: not so.

    Only told and never chosen: no logged start with expert parallelism was at hand to check its memory.
    """
    architecture = fit.architecture if fit is not None else None
    chosen = spec.parallelism.tensor == "auto" and ARGUMENT not in spec.engine_args
    if fit is None or architecture is None or not chosen or now.cut.tensor == pool.gpus_per_host:
        return ""
    whole = spec.model_copy(update={"engine_args": {**spec.engine_args, ARGUMENT: True}})
    obstacles = Obstacles(whole, architecture, config, fit.gpu)
    cut = Cut(max(obstacles.tensor_sizes(pool), default=1), now.cut.pipeline)
    if cut.tensor <= now.cut.tensor:
        return ""
    wider = Fit(whole, fit.profile, architecture, fit.gpu, fit.checkpoint_bytes)
    timing = read_timing(wider)
    try:
        obstacles.check(pool, cut)
        there = Replica(cut, size(whole, fit.profile, wider, cut, timing), timing)
    except RayserveError:
        return ""
    old = now.figures(spec)
    better = ", ".join(
        f"{name} {value} in place of {old[name]}" for name, value in there.figures(spec).items()
    )
    return (
        f"`engine_args: {{{ARGUMENT}: true}}`, which keeps experts whole and so allows tensor "
        f"{cut.tensor}: {better}; calculated, and not checked against any real start"
    )
