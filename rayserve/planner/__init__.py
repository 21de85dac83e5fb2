"""Does it fit, and how is it laid out? `build_plan` turns a spec into a plan; pure.

`build_curves` computes what more a page shows of one.
"""

from __future__ import annotations

from rayserve.planner.build import build_curves, build_plan

__all__ = ["build_curves", "build_plan"]
