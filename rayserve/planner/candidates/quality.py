"""How much of a model's accuracy does a number format leave? As published, with the source.

The figures of `data/quantization-quality.yml` are those of the published model whose size is nearest,
on a logarithmic scale: larger models lose less. Nothing is interpolated, and a format that nobody was
found to have measured has no figure.
"""

from __future__ import annotations

import functools
import importlib.resources
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from rayserve.planner.candidates.record import Quality
from rayserve.planner.support.schemes import SIXTEEN, Scheme

UNQUANTIZED = Quality(recovery_percent=100, low_percent=100, high_percent=100, model="")
REDUCED = (
    "measured with activations quantized too; this chip leaves them in 16 bits, which loses no more"
)
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Published:
    """The content of the file."""

    sources: Mapping[str, Mapping[str, Any]]
    benchmarks: Mapping[str, str]
    formats: Mapping[str, Sequence[Mapping[str, Any]]]


@functools.lru_cache(maxsize=1)
def published() -> Published:
    """The committed figures."""
    file = importlib.resources.files("rayserve").joinpath("data", "quantization-quality.yml")
    return Published(**yaml.load(file.read_text("utf-8"), Loader=_Loader))  # noqa: S506  (a safe loader)


def quality_of(
    schemes: Sequence[Scheme], parameters: int, *, weights_alone: bool = False
) -> Quality | None:
    """What is published of a checkpoint's format; None: nothing.

    Args:
        schemes: the checkpoint's, none of an unquantized one. One of several formats has no figure.
        parameters: of the model; 0 where they are not known, which takes the worst size.
        weights_alone: the chip leaves activations in 16 bits, whatever the format says.
    """
    if not schemes:
        return UNQUANTIZED
    keys = {_key(scheme) for scheme in schemes}
    rows = published().formats.get(keys.pop(), ()) if len(keys) == 1 else ()
    if not rows:
        return None
    quantized = schemes[0].activations != SIXTEEN
    return _summary(_nearest(rows, parameters), REDUCED if quantized and weights_alone else "")


def worst_published(parameters: int) -> float:
    """The lowest recovery of any format at the nearest size, in percent: what an unknown one may be."""
    found = [_summary(_nearest(rows, parameters), "") for rows in published().formats.values()]
    return min(quality.recovery_percent for quality in found)


def _key(scheme: Scheme) -> str:
    """The format's key in the file: a method's own figures where it has some."""
    own = f"{scheme.format}@awq"
    return own if "awq" in scheme.method and own in published().formats else scheme.format


def _nearest(rows: Sequence[Mapping[str, Any]], parameters: int) -> list[Mapping[str, Any]]:
    """The rows of one model: of the nearest size, or of the smallest where the size is not known."""
    billions = parameters / 1e9

    def distance(row: Mapping[str, Any]) -> float:
        size = float(row["size"])
        return abs(math.log(size / billions)) if billions else size

    model = min(rows, key=distance)["model"]
    return [row for row in rows if row["model"] == model]


def _summary(rows: Sequence[Mapping[str, Any]], note: str) -> Quality:
    known = published()
    values = [float(row["recovery"]) for row in rows]
    source = known.sources[rows[0]["source"]]
    return Quality(
        recovery_percent=round(sum(min(100.0, value) for value in values) / len(values), 2),
        low_percent=min(values),
        high_percent=max(values),
        model=str(rows[0]["model"]),
        benchmarks=[known.benchmarks[row["benchmark"]] for row in rows],
        source=str(rows[0]["source"]),
        published=f"{source['title']}, {source['year']}, {source['where']}",
        note=note,
    )
