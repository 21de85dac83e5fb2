"""How is a number of bytes written down that is not known exactly?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rayserve.units import GIB


@dataclass(frozen=True, slots=True)
class Range:
    """An uncertain number of bytes: lowest, expected and highest value, and what they rest on.

    Raises:
        ValueError: the three are not in ascending order.
    """

    low: int
    expected: int
    high: int
    basis: str = ""

    def __post_init__(self) -> None:
        if not self.low <= self.expected <= self.high:
            raise ValueError(f"not ascending: {self.low}, {self.expected}, {self.high}")

    @classmethod
    def exact(cls, value: int, basis: str = "") -> Range:
        """A number without doubt."""
        return cls(value, value, value, basis)

    @classmethod
    def gib(cls, low: float, expected: float, high: float, basis: str = "") -> Range:
        """From GiB."""
        return cls(int(low * GIB), int(expected * GIB), int(high * GIB), basis)

    def __add__(self, other: Range) -> Range:
        """Both at their worst, or both at their best; `combined` is narrower for independent ones."""
        basis = "; ".join(dict.fromkeys(text for text in (self.basis, other.basis) if text))
        return Range(
            self.low + other.low, self.expected + other.expected, self.high + other.high, basis
        )

    def scaled(self, low: float, high: float) -> Range:
        """The same expectation, its ends multiplied: low <= 1 <= high."""
        return Range(int(self.low * low), self.expected, math.ceil(self.high * high), self.basis)

    @property
    def width(self) -> int:
        """Bytes from the low to the high end."""
        return self.high - self.low


def combined(terms: Sequence[Range]) -> Range:
    """The sum of terms that err independently: deviations add up as the root of their squares."""
    expected = sum(term.expected for term in terms)
    below = math.hypot(*(term.expected - term.low for term in terms))
    above = math.hypot(*(term.high - term.expected for term in terms))
    return Range(math.floor(expected - below), expected, math.ceil(expected + above))
