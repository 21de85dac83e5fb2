"""What does a rule say of a spec that breaks it?"""

from __future__ import annotations

from dataclasses import dataclass

from rayserve.documents import Loc

CLOUD_SCHEMES = ("s3://", "gs://", "abfss://", "azure://", "http://", "https://", "hf://")
"""Where weights may lie that an engine does not read from."""


@dataclass(frozen=True)
class Problem:
    """A rule that a spec breaks; `loc` is relative to `rayserve_cluster`."""

    loc: Loc
    needed: str
    found: str
    do: str
