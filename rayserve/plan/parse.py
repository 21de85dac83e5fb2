"""Is this plan.yml a plan, and unchanged since it was written?"""

from __future__ import annotations

import re
import unicodedata

from pydantic import ValidationError

from rayserve.documents import brief
from rayserve.errors import PlanError, Where
from rayserve.plan.model import PLAN_KEY, Plan
from rayserve.plan.record import NamedValue

Scalar = str | bool | int | float


def parse_plan(data: object, path: str) -> Plan:
    """A plan from the parsed content of plan.yml.

    Raises:
        PlanError: there is no `rayserve_plan`, a field is wrong, the environment could not be that
            of a process, or the replica was edited by hand.
    """
    if not isinstance(data, dict) or PLAN_KEY not in data:
        raise PlanError(
            f"a plan with the top-level key `{PLAN_KEY}`",
            found="another document",
            do="write it with `rayserve plan`",
            where=Where(path),
        )
    try:
        plan = Plan.model_validate(data[PLAN_KEY])
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise PlanError(
            first["msg"],
            found=brief(first["input"]),
            do="write the plan again with `rayserve plan`; it is not edited by hand",
            where=Where(path, key=f"{PLAN_KEY}.{key}"),
        ) from None
    _check_environment(plan.environment, path)
    try:
        revision = plan.replica.revision
    except ValueError as error:  # a value that JSON cannot carry, as a number of 5000 digits
        raise PlanError(
            "a replica of plain values",
            found=str(error)[:80],
            do="write the plan again with `rayserve plan`; it is not edited by hand",
            where=Where(path, key=f"{PLAN_KEY}.replica"),
        ) from None
    if plan.revision != revision:
        raise PlanError(
            f"revision {revision}, the hash of the plan's replica",
            found=brief(plan.revision),
            do="write the plan again with `rayserve plan`; it is not edited by hand",
            where=Where(path, key=f"{PLAN_KEY}.revision"),
        )
    return plan


ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Control characters, lone surrogates, and what else ends a line.
UNPRINTABLE = frozenset({"Cc", "Cs", "Zl", "Zp"})


def _check_environment(environment: list[NamedValue], path: str) -> None:
    """Refuse what a shell or systemd would read as something other than one variable."""
    seen: set[str] = set()
    for index, item in enumerate(environment):
        if ENVIRONMENT_NAME.fullmatch(item.name) is None:
            needed, found = "names of letters, digits and underscores", brief(item.name)
        elif item.name in seen:
            needed, found = "each name once", f"{item.name} again"
        elif not isinstance(item.value, Scalar):
            needed, found = f"a text or a number as {item.name}", brief(item.value)
        elif any(unicodedata.category(sign) in UNPRINTABLE for sign in _text(item.value)):
            needed, found = f"one line of text as {item.name}", brief(item.value)
        else:
            seen.add(item.name)
            continue
        raise PlanError(
            f"an environment with {needed}",
            found=found,
            do="write the plan again with `rayserve plan`; it is not edited by hand",
            where=Where(path, key=f"{PLAN_KEY}.environment.{index}"),
        )


def _text(value: Scalar) -> str:
    try:
        return str(value)
    except ValueError:  # an integer with more digits than Python writes
        return "\0"
