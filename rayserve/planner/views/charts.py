"""How does a curve become a picture that also tells how sure it is?

Each chart is one SVG that takes its colours from the page's style sheet, so that it follows light and
dark, and carries a title and a description for those who do not see it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rayserve.planner.views.markup import Markup, element, joined

WIDTH, HEIGHT = 480.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 66.0, 22.0, 18.0, 52.0
MOST_TICKS = 8
STEPS = (1, 2, 5)


@dataclass(frozen=True)
class Point:
    """A value with its range, at one place of the horizontal axis."""

    x: float
    low: float
    high: float
    bound: float = math.nan
    """What nothing beats; NaN: not known."""
    expected: float = math.nan
    """NaN: only the range is known."""


@dataclass(frozen=True)
class Series:
    """One curve, drawn as a band from low to high."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high`, logarithmic or from zero."""

    title: str
    low: float
    high: float
    ticks: tuple[float, ...]
    label: Callable[[float], str]
    log: bool = True

    def share(self, value: float) -> float:
        """Where a value lies, from 0 at the axis's low end to 1 at its high one.

        A logarithmic axis has no place for zero: it lies at the low end.
        """
        if self.log:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Limit:
    """A line across the chart: a limit or a promise."""

    value: float
    label: str


def doubling_axis(title: str, values: Iterable[float], label: Callable[[float], str]) -> Axis:
    """A logarithmic axis with ticks at powers of two, or at its ends where there is none between."""
    known = list(values)
    low, high = min(known), max(known)
    if high <= low:
        low, high = low / 2, high * 2
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    every = max(1, math.ceil((last - first + 1) / MOST_TICKS))
    ticks = tuple(2.0**power for power in range(last, first - 1, -every))
    return Axis(title, low, high, ticks or (low, high), label)


def decade_axis(title: str, values: Iterable[float], label: Callable[[float], str]) -> Axis:
    """A logarithmic axis with ticks at 1, 2 and 5 of each decade, as many as there is room for."""
    known = [value for value in values if value > 0]
    low, high = min(known), max(known)
    # A decade more at either end: the logarithm of a power of ten may be off by a bit.
    first, last = math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1
    marks = [step * 10.0**power for power in range(first, last + 1) for step in STEPS]
    low = max(mark for mark in marks if mark <= low)
    high = min(mark for mark in marks if mark >= high)
    if high <= low:
        high = low * 10
    ticks = [mark for mark in marks if low <= mark <= high]
    if len(ticks) > MOST_TICKS:
        decades = [10.0**power for power in range(first, last + 1)]
        ticks = [mark for mark in decades if low <= mark <= high]
        ticks = ticks[:: -(-len(ticks) // MOST_TICKS)]
    return Axis(title, low, high, tuple(ticks), label)


def zero_axis(title: str, values: Iterable[float], label: Callable[[float], str]) -> Axis:
    """A linear axis from zero, with some five round ticks."""
    most = max(values)
    rough = most / 5 or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(size * power for size in (*STEPS, 10) if size * power >= rough)
    count = math.ceil(most / step) or 1
    return Axis(
        title,
        0.0,
        count * step,
        tuple(step * place for place in range(count + 1)),
        label,
        log=False,
    )


def chart(
    name: str,
    *,
    title: str,
    description: str,
    series: Sequence[Series],
    across: Axis,
    up: Axis,
    limit: Limit | None = None,
) -> Markup:
    """The picture of some curves. `name` makes its ids unique on the page."""
    pieces = [
        element("title", title, id=f"{name}-title"),
        element("desc", description, id=f"{name}-desc"),
        _grid(across, up),
    ]
    pieces += [
        _curve(one.points, across, up, number) for number, one in enumerate(series, 1) if one.points
    ]
    if limit is not None:
        pieces.append(_limit(limit, up))
    return element(
        "svg",
        *pieces,
        class_="chart",
        role="img",
        viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
        aria_labelledby=f"{name}-title {name}-desc",
    )


def legend(series: Sequence[Series]) -> Markup:
    """The names of the curves, each with its colour."""
    items = [
        element("li", element("i", class_=f"swatch s{number}", aria_hidden="true"), one.name)
        for number, one in enumerate(series, 1)
    ]
    return element("ul", *items, class_="legend")


def _x(axis: Axis, value: float) -> float:
    return LEFT + axis.share(value) * (WIDTH - LEFT - RIGHT)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - axis.share(value) * (HEIGHT - TOP - BOTTOM)


def _grid(across: Axis, up: Axis) -> Markup:
    floor = HEIGHT - BOTTOM
    pieces = []
    for value in up.ticks:
        y = _y(up, value)
        pieces += [
            element("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y),
            element("text", up.label(value), x=LEFT - 8, y=y + 4, text_anchor="end"),
        ]
    for value in across.ticks:
        x = _x(across, value)
        pieces += [
            element("line", class_="tick", x1=x, x2=x, y1=floor, y2=floor + 5),
            element("text", across.label(value), x=x, y=floor + 20, text_anchor="middle"),
        ]
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    pieces += [
        element("line", class_="axis", x1=LEFT, x2=WIDTH - RIGHT, y1=floor, y2=floor),
        element("text", across.title, class_="name", x=middle, y=HEIGHT - 8, text_anchor="middle"),
    ]
    return element("g", *pieces, aria_hidden="true")


def _curve(points: Sequence[Point], across: Axis, up: Axis, number: int) -> Markup:
    """The band, its edges, the expectation where there is one, and the bound."""
    high = [(point.x, point.high) for point in points]
    low = [(point.x, point.low) for point in points]
    expected = [(point.x, point.expected) for point in points if not math.isnan(point.expected)]
    bound = [(point.x, point.bound) for point in points if not math.isnan(point.bound)]
    lines = [
        _line([*high, *reversed(low)], across, up, f"band s{number}", closed=True),
        *([] if expected else [_line(edge, across, up, f"edge s{number}") for edge in (high, low)]),
        _line(expected, across, up, f"line s{number}"),
        _line(bound, across, up, f"bound s{number}"),
    ]
    return element("g", joined(lines), aria_hidden="true")


def _line(
    points: Sequence[tuple[float, float]],
    across: Axis,
    up: Axis,
    kind: str,
    *,
    closed: bool = False,
) -> Markup:
    if not points:
        return Markup()
    steps = " L".join(f"{_x(across, x):.1f} {_y(up, y):.1f}" for x, y in points)
    return element("path", class_=kind, d=f"M{steps}{'Z' if closed else ''}")


def _limit(limit: Limit, up: Axis) -> Markup:
    y = _y(up, limit.value)
    above = y - 6 if y > TOP + 16 else y + 15
    return element(
        "g",
        element("line", class_="limit", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y),
        element("text", limit.label, class_="limit", x=LEFT + 6, y=above),
        aria_hidden="true",
    )
