"""What does a config.json say under a name? A typed reader for the code that lays out one family.

`support.figures` has judged the file as a whole by then; a caller that has not asked it gets an error
from here, too, and never a wrong type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rayserve.engine.models import UNCHANGED
from rayserve.errors import SpecError, Where

MOST = 2**31 - 1
"""No size of a published model is above it; larger figures would only make the plan slow."""


class UnknownModelError(SpecError):
    """The architecture or the format of the weights is not one that the planner can lay out."""


class Facts:
    """The figures of one level of a config.json, checked as they are read.

    Every reader raises SpecError where the value is not what its name promises: a bool, text, NaN,
    a negative or absurdly large number.
    """

    def __init__(self, data: Mapping[str, Any], where: Where) -> None:
        self.data = data
        self.where = where

    def has(self, name: str) -> bool:
        """Whether the key is there and not null."""
        return self.data.get(name) is not None

    def count(self, *names: str, default: int = 0, most: int = MOST) -> int:
        """The first of `names` that is set, a whole number above 0.

        Raises:
            SpecError: none is set and there is no default.
        """
        value = self.optional(*names, most=most) or default
        if not value:
            raise SpecError(
                f"`{names[0]}` in the model's config.json",
                found="nothing" if not self.has(names[0]) else "0",
                do=UNCHANGED,
                where=self.where,
            )
        return value

    def optional(self, *names: str, most: int = MOST) -> int:
        """The first of `names` that is set, a whole number from 0 on; 0 where none is."""
        for name in names:
            value = self.data.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
                raise self.wrong(name, f"a whole number from 0 to {most}", value)
            return value
        return 0

    def number(self, name: str, default: float, *, most: float = float(MOST)) -> float:
        """A finite number above 0."""
        value = self.data.get(name)
        if value is None:
            return default
        wrong = isinstance(value, bool) or not isinstance(value, int | float)
        if wrong or not math.isfinite(value) or not 0 < value <= most:
            raise self.wrong(name, "a number above 0", value)
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """A yes or no."""
        value = self.data.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false", value)
        return value

    def text(self, name: str, default: str = "") -> str:
        """A word."""
        value = self.data.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(name, "a text", value)
        return value

    def inner(self, *names: str) -> Facts | None:
        """The first of `names` that is set, a mapping."""
        for name in names:
            value = self.data.get(name)
            if value is None:
                continue
            if not isinstance(value, Mapping):
                raise self.wrong(name, "a mapping", value)
            return Facts(value, self.where)
        return None

    def words(self, name: str) -> tuple[str, ...]:
        """A list of words; empty where it is not set."""
        value = self.data.get(name)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
            raise self.wrong(name, "a list of texts", value)
        return tuple(value)

    def counts(self, name: str, *, least: int = 0) -> tuple[int, ...]:
        """A list of whole numbers; empty where it is not set."""
        value = self.data.get(name)
        if value is None:
            return ()
        good = isinstance(value, list | tuple) and all(
            isinstance(item, int) and not isinstance(item, bool) and least <= item <= MOST
            for item in value
        )
        if not good:
            raise self.wrong(name, "a list of whole numbers", value)
        return tuple(value)

    def wrong(self, name: str, needed: str, value: object) -> SpecError:
        """The error that says what `name` should have been."""
        return SpecError(
            f"`{name}` in config.json to be {needed}",
            found=repr(value)[:80],
            do=UNCHANGED,
            where=self.where,
        )
