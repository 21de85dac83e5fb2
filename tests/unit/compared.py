"""The checkpoints of the case `candidates`, compared."""

from __future__ import annotations

import functools
import json

from rayserve.planner.candidates import (
    Checkpoint,
    compare,
)
from rayserve.spec import ClusterSpec, parse_spec
from tests.bad_specs import ROOT

CASE = ROOT / "tests" / "cases" / "candidates"
TEXT = (CASE / "cluster.yml").read_text()
CONFIGS = {path.stem: json.loads(path.read_text()) for path in (CASE / "configs").glob("*.json")}
SHA = "0" * 64


def spec_of(*changes: tuple[str, str]) -> ClusterSpec:
    """The spec of the 405B case, with texts replaced."""
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return parse_spec(text, "cluster.yml")


def checkpoints(spec: ClusterSpec, **configs) -> list[Checkpoint]:
    """The candidates of a spec with the case's config files; `configs` takes their place by name."""
    found = []
    for index, one in enumerate(spec.model.candidates):
        config = {**CONFIGS, **configs}.get(one.name)
        found.append(Checkpoint(one.name, spec.serving(index), config))
    return found


def compared(*changes: tuple[str, str], **configs):
    """The comparison of the 405B case, with changes."""
    if not configs:
        return _compared(changes)
    return compare(checkpoints(spec_of(*changes), **configs), SHA)


@functools.cache
def _compared(changes: tuple[tuple[str, str], ...]):
    return compare(checkpoints(spec_of(*changes)), SHA)


def row(found, name: str):
    """One row by name."""
    return next(one for one in found.comparison.rows if one.name == name)
