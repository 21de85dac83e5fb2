"""Which modules does a list in a quantization config mean, by their names?"""

from __future__ import annotations

import contextlib
import fnmatch
import re
from collections.abc import Iterator

EXACT, PART, WILDCARD = "exact", "part", "wildcard"
"""How the names of a list are compared; each method has its own way."""


class Names:
    """Names of modules, plain or with wildcards, and regular expressions after "re:".

    Broken expressions match nothing.
    """

    def __init__(self, patterns: tuple[str, ...], matching: str) -> None:
        self._plain = frozenset(one for one in patterns if not one.startswith("re:"))
        self._parts = tuple(self._plain) if matching == PART else ()
        wild = self._plain if matching == WILDCARD else ()
        self._wild = [(_literal(one), one) for one in wild if set(one) & set("*?[")]
        self._expressions = []
        for pattern in patterns:
            if pattern.startswith("re:"):
                with contextlib.suppress(re.error, RecursionError, OverflowError):
                    self._expressions.append(re.compile(pattern[3:]))

    def match(self, name: str) -> bool:
        """Whether one of them is the name, a module above it, or matches it."""
        names = _spellings(name)
        if any(above in self._plain for each in names for above in _ancestors(each)):
            return True
        text = "\0".join(names)
        close = [pattern for literal, pattern in self._wild if literal in text]
        if any(fnmatch.fnmatchcase(each, pattern) for pattern in close for each in names):
            return True
        if any(expression.match(each) for expression in self._expressions for each in names):
            return True
        return any(part in text for part in self._parts)


def _literal(pattern: str) -> str:
    """The longest text that every name has which the wildcard matches: cheaper to look for."""
    return max(re.split(r"[*?]", pattern.partition("[")[0]), key=len)


def _ancestors(name: str) -> Iterator[str]:
    """The name and every module that contains it."""
    yield name
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _spellings(name: str) -> tuple[str, ...]:
    """A module's name as text-only and as multimodal checkpoints write it."""
    if not name.startswith("model."):
        return (name, f"model.{name}")
    inner = name.removeprefix("model.")
    return (
        name,
        f"language_model.{name}",
        f"model.language_model.{inner}",
        f"backbone.{inner}",
    )
