"""Where does the page of a plan go, and what is it made from?

The plan itself comes from rayserve.planning; here the same files are read for what more the page shows:
curves, and the comparison of the candidates where a spec has some.
"""

from __future__ import annotations

import os
from pathlib import Path

from rayserve import planning
from rayserve.errors import UsageError
from rayserve.inventory import Files, current
from rayserve.plan import Plan
from rayserve.planner import build_curves
from rayserve.planner.candidates import Comparison
from rayserve.planner.views.page import page
from rayserve.spec import ClusterSpec, picks


def path_of(name: str, files: Files) -> Path:
    """The file of the page: a regular one of its own, in a folder that is there.

    Raises:
        UsageError: it would be something else, or take the place of something else.
    """
    path = Path(name)
    problem = ""
    try:
        taken = {
            os.path.realpath(one) for one in (files.spec, files.plan, files.serve, files.starts)
        }
        if not path.parent.is_dir():
            problem = f"no folder {path.parent}"
        elif path.exists() and not path.is_file():
            problem = f"{path} is a folder" if path.is_dir() else f"{path} is no regular file"
        elif os.path.realpath(path) in taken:
            problem = f"{path} is read or written for the plan"
        elif path.is_file() and not current(path)[:15].lower().startswith("<!doctype html"):
            problem = f"{path} is no page, and is not replaced"
    except (OSError, ValueError) as error:  # a name that is too long, or that has a NUL in it
        problem = str(error)
    if problem:
        raise UsageError(
            "a file for the page, in a folder that is there",
            found=problem[:200],
            do="name it: --html plan.html",
        )
    return path


def text_of(files: Files, plan: Plan) -> str:
    """The page of the plan that these files give.

    Raises:
        SpecError: a file was changed since, and is wrong now.
    """
    read = planning.read_spec(files)
    comparison = None
    if read.spec.model.candidates:
        comparison = planning.compare_candidates(files)
    served = _served(read.spec, comparison)
    curves = build_curves(
        plan,
        served,
        planning.served_config(read, served, plan),
        draft_config=read.draft_config,
    )
    return page(plan, files.spec.name, curves=curves, comparison=comparison)


def _served(spec: ClusterSpec, comparison: Comparison | None) -> ClusterSpec:
    """The spec with the checkpoint that the plan serves."""
    if comparison is None or not picks(spec):
        return spec
    name = next(row.name for row in comparison.rows if row.served)
    names = [candidate.name for candidate in spec.model.candidates]
    return spec.serving(names.index(name))
