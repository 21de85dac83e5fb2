"""Does it fit, and how is it laid out? `build_plan` turns a spec into a plan; pure."""

from __future__ import annotations

from rayserve.planner.build import build_plan

__all__ = ["build_plan"]
