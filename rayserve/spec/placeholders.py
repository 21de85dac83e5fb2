"""Which values are left for a person to fill in, by `rayserve convert` or by an example?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rayserve.documents import Loc
from rayserve.spec.model import ClusterSpec

PLACEHOLDER = "REPLACE-ME"
"""Stands in every text that a command line does not tell: alone, or as a folder of a path."""
USUAL = re.compile(
    r"(?<![a-z0-9])(?:(?:change|replace|fill)[-_ ]?me|path[/_-]to|your[-_ ]\w+)(?![a-z0-9])"
    r"|\A(?:todo|fixme|tbd)\Z",
    re.IGNORECASE,
)
"""What documentation and templates write in the place of a value."""


def find_placeholder(spec: ClusterSpec) -> tuple[Loc, str] | None:
    """The first text of a spec that still holds a placeholder, and its location."""
    return next(
        ((loc, text) for loc, text in texts(spec.model_dump()) if unfilled(text)),
        None,
    )


def unfilled(text: str) -> bool:
    """Whether a text is, or holds, what stands for something that a person must write."""
    return PLACEHOLDER in text or USUAL.search(text) is not None


def names(data: object, loc: Loc = ()) -> Iterator[tuple[Loc, str]]:
    """Every key of a mapping in a document, with its place."""
    items = data.items() if isinstance(data, dict) else ()
    for key, value in items:
        yield (*loc, str(key)), str(key)
        yield from names(value, (*loc, str(key)))
    for index, value in enumerate(data if isinstance(data, list) else ()):
        yield from names(value, (*loc, index))


def texts(value: Any, loc: Loc = ()) -> Iterator[tuple[Loc, str]]:
    """Every text in plain data, with its location."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from texts(inner, (*loc, str(key)))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from texts(inner, (*loc, index))
    elif isinstance(value, str):
        yield loc, value
