"""How is a figure written for people? Few digits, a unit, and its range where it has one."""

from __future__ import annotations

import json
from typing import Any

from rayserve.units import GIB

KIB_TOKENS = 1024


def gib(size_bytes: int) -> str:
    """A size in GiB with one decimal, without its unit."""
    return f"{size_bytes / GIB:.1f}"


def gib_range(low_bytes: int, high_bytes: int) -> str:
    """Both ends in GiB; empty where they read alike."""
    return between(gib(low_bytes), gib(high_bytes))


def between(low: str, high: str) -> str:
    """Both ends of a range in words; empty where they read alike."""
    return f"{low} to {high}" if low != high else ""


def number(value: float) -> str:
    """No more digits than mean something: whole from 10 on."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def milliseconds(duration_ms: float) -> str:
    """No more digits than mean something, and seconds from one second on."""
    if duration_ms >= 1000:
        return f"{number(duration_ms / 1000)} s"
    return f"{number(duration_ms)} ms"


def milliseconds_range(low_ms: float, high_ms: float) -> str:
    """Both ends, with the unit once where it is the same."""
    low, high = milliseconds(low_ms), milliseconds(high_ms)
    if low == high:
        return low
    return (
        f"{low.split()[0]} to {high}" if low.split()[1] == high.split()[1] else f"{low} to {high}"
    )


def milliseconds_tick(duration_ms: float) -> str:
    """A round duration, for the tick of an axis."""
    return f"{duration_ms / 1000:g} s" if duration_ms >= 1000 else f"{duration_ms:g} ms"


def sequences(count: float) -> str:
    """How many sequences run at once."""
    return f"{count:,.0f}" if count >= 100 else f"{count:.1f}"


def short_tokens(tokens: float) -> str:
    """A number of tokens for the tick of an axis: 16384 is 16k."""
    if tokens >= KIB_TOKENS**2 and tokens % KIB_TOKENS**2 == 0:
        return f"{tokens / KIB_TOKENS**2:g}M"
    return f"{tokens / KIB_TOKENS:g}k" if tokens >= KIB_TOKENS else f"{tokens:g}"


def plain(value: Any) -> str:
    """A value of an engine argument as a person would write it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
