"""More replicas than the hosts hold: does each remedy plan, as the refusal words it?"""

from __future__ import annotations

import json
import re

import pytest

from rayserve.errors import DoesNotFitError
from rayserve.plan import Plan
from rayserve.planner.views.parts import is_proven
from tests.bad_specs import ROOT
from tests.plans import merged, planned
from tests.yaml_text import load_yaml

CONFIGS = ROOT / "tests" / "golden" / "configs"
SMALL = json.loads((CONFIGS / "llama-8b.json").read_text())
LARGE = json.loads((CONFIGS / "llama-405b.json").read_text())
PACKED = json.loads((CONFIGS / "llama-405b-w4a16.json").read_text())
BASE = """\
rayserve_cluster:
  name: test
  node_pools: [{name: gpu, hosts: 1, gpu: A100-80GB-SXM, gpus_per_host: 8}]
  model: {path: /m, served_name: chat, config: config.json}
  limits: {max_model_len: 16384}
  endpoint: {host: 0.0.0.0, api_key_file: /etc/rayserve/api_keys}
"""
CUT = r"(parallelism: \{tensor: \d+, pipeline: \d+\})"


def text(changes: str, hosts: int = 1) -> str:
    """The spec with sections of YAML put in the place of its own."""
    spec = load_yaml(BASE.replace("hosts: 1", f"hosts: {hosts}"))
    spec["rayserve_cluster"] |= load_yaml(changes)
    return merged(json.dumps(spec))


def plan(model, changes: str, hosts: int = 1) -> Plan:
    """The plan of it."""
    return planned(text(changes, hosts), model)


CASES = [
    (PACKED, 1, "replicas: {min: 2, max: 2}\n"),
    (PACKED, 1, "replicas: {max: 3}\n"),
    (PACKED, 1, "replicas: {min: 2, max: 2}\nparallelism: {tensor: 8}\n"),
    (SMALL, 1, "replicas: {min: 3, max: 5}\n"),
    (SMALL, 1, "replicas: {min: 9, max: 9}\n"),
    (LARGE, 3, "replicas: {min: 2, max: 2}\n"),
    (PACKED, 2, "replicas: {min: 3, max: 4}\nparallelism: {tensor: 8, pipeline: 2}\n"),
]


@pytest.mark.parametrize("model, hosts, add", CASES)
def test_each_remedy_of_too_many_replicas_plans_when_it_is_followed(model, hosts, add):
    """Fewer replicas, a smaller cut and more hosts: what is told to be written gets a plan."""
    with pytest.raises(DoesNotFitError) as raised:
        plan(model, add, hosts)
    do = raised.value.do
    fewer = re.search(r"write (?:max: (\d+)|(replicas: \{min: \d+, max: \d+\}))", do)
    more = re.search(r"take (\d+) such hosts", do)
    assert fewer is not None, do
    assert more is not None, do
    rest = "".join(line for line in add.splitlines(True) if not line.startswith("replicas"))
    written = re.sub(r"max: \d+", f"max: {fewer[1]}", add) if fewer[1] else f"{fewer[2]}\n{rest}"
    assert plan(model, written, hosts).scaling.min_replicas >= 1
    wanted = load_yaml(add)["replicas"]["max"]
    assert plan(model, add, int(more[1])).scaling.max_replicas == wanted
    with pytest.raises(DoesNotFitError):
        plan(model, add, int(more[1]) - 1)
    if cut := re.search(CUT, do):
        replicas = "".join(line for line in add.splitlines(True) if line.startswith("replicas"))
        made = plan(model, f"{cut[1]}\n{replicas}", hosts)
        assert made.scaling.max_replicas == wanted
        assert is_proven(made) is (f"{cut[1]}, where only" not in do)


def test_min_comes_down_with_max_only_where_it_must():
    """A min above what fits is written too: max alone would be refused for being below it."""
    with pytest.raises(DoesNotFitError) as both:
        plan(PACKED, "replicas: {min: 2, max: 2}\n")
    assert both.value.do.startswith("write replicas: {min: 1, max: 1}, or ")
    with pytest.raises(DoesNotFitError) as one:
        plan(PACKED, "replicas: {max: 2}\n")
    assert one.value.do.startswith("write max: 1, or ")


def test_a_smaller_cut_is_told_only_where_the_hosts_hold_all_replicas_of_it():
    """8B goes on half of the GPUs twice; nine replicas on eight GPUs go on no cut."""
    with pytest.raises(DoesNotFitError) as two:
        plan(SMALL, "replicas: {min: 2, max: 2}\n")
    assert "parallelism: {tensor: 4, pipeline: 1}" in two.value.do
    with pytest.raises(DoesNotFitError) as nine:
        plan(SMALL, "replicas: {max: 9}\n")
    assert "parallelism" not in nine.value.do
