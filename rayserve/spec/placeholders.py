"""Which values did `rayserve convert` leave for a person to fill in?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rayserve.documents import Loc
from rayserve.spec.model import ClusterSpec

PLACEHOLDER = "REPLACE-ME"
"""Stands in every text that a command line does not tell: alone, or as a folder of a path."""


def find_placeholder(spec: ClusterSpec) -> tuple[Loc, str] | None:
    """The first text of a spec that still holds a placeholder, and its location."""
    return next(_held(spec.model_dump(), ()), None)


def _held(value: Any, loc: Loc) -> Iterator[tuple[Loc, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _held(inner, (*loc, str(key)))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _held(inner, (*loc, index))
    elif isinstance(value, str) and PLACEHOLDER in value:
        yield loc, value
