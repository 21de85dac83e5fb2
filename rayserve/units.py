"""How many bytes are a unit, and how much is a whole number of steps?"""

from __future__ import annotations

MIB = 2**20
GIB = 2**30


def round_up(value: int, step: int) -> int:
    """The least multiple of `step` that is not below `value`."""
    return -(-value // step) * step
