"""Where does the page of a plan go, and what is it made from?

Nothing is read anew: what rayserve.planning read for the plan gives the curves too, and the comparison of
the candidates where a spec has some.
"""

from __future__ import annotations

import os
from pathlib import Path

from rayserve.errors import UsageError
from rayserve.inventory import current
from rayserve.planner import build_curves
from rayserve.planner.views.page import page
from rayserve.planning import Planned


def path_of(name: str, planned: Planned) -> Path:
    """The file of the page: a regular one of its own, in a folder that is there.

    Raises:
        UsageError: it would be something else, or take the place of something else.
    """
    path = Path(name)
    problem = ""
    try:
        taken = {os.path.realpath(one) for one in (*planned.inputs, *planned.texts)}
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


def text_of(planned: Planned, source: str) -> str:
    """The page of a plan; `source`: the name of the file that it was made from."""
    one = planned.checkpoint
    curves = build_curves(
        planned.plan, one.spec, one.config, draft_config=planned.read.draft_config
    )
    return page(planned.plan, source, curves=curves, comparison=planned.comparison())
