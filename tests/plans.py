"""The plan of a spec, made once for all the tests that look at it.

One of a model of 405B takes a third of a second, and dozens of tests ask for the same.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import yaml

from rayserve.plan import Plan
from rayserve.planner import build_plan
from rayserve.spec import parse_spec
from tests.yaml_text import load_yaml

SHA256 = "0" * 64


@functools.cache
def merged(text: str) -> str:
    """A spec's text as YAML itself writes it, so that every value stands on a line of its own."""
    return yaml.safe_dump(load_yaml(text))


def planned(text: str, model: Mapping[str, Any]) -> Plan:
    """The plan of a spec's text and the content of a config.json."""
    return _planned(text, json.dumps(model))


@functools.lru_cache(maxsize=256)
def _planned(text: str, model: str) -> Plan:
    return build_plan(parse_spec(text, "cluster.yml"), json.loads(model), SHA256)
