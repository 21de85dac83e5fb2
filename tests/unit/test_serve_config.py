"""Does the plan reach Serve whole, with what may change live kept apart from what restarts?"""

from __future__ import annotations

import pytest

from rayserve.plan import NamedValue, Plan, parse_plan
from rayserve.serve_config import (
    live_options,
    missing_environment,
    replica_options,
    serve_config,
)
from tests.golden_specs import GOLDEN
from tests.yaml_text import load_yaml


def plan_named(name: str) -> Plan:
    """A golden plan."""
    path = GOLDEN / f"{name}.plan.yml"
    return parse_plan(load_yaml(path.read_text()), str(path))


@pytest.fixture
def one_host() -> Plan:
    """The 405B case on one host."""
    return plan_named("one-host-w4a16")


@pytest.fixture
def two_hosts() -> Plan:
    """A replica across two hosts."""
    return plan_named("two-hosts-bf16")


def test_a_replica_on_one_host_holds_its_gang_in_one_bundle(one_host):
    """One STRICT_PACK bundle of all GPUs, and the actor holds exactly these."""
    options = replica_options(one_host.replica)
    assert options["placement_group_strategy"] == "STRICT_PACK"
    assert [bundle["GPU"] for bundle in options["placement_group_bundles"]] == [8]
    assert options["ray_actor_options"]["num_gpus"] == 8


def test_a_replica_across_hosts_leaves_the_gpus_to_its_workers(two_hosts):
    """One-GPU bundles, as vLLM's Ray executor demands, and an actor that holds none of them."""
    options = replica_options(two_hosts.replica)
    bundles = options["placement_group_bundles"]
    assert {bundle["GPU"] for bundle in bundles} == {1}
    assert len(bundles) == two_hosts.replica.placement.gpus
    assert options["ray_actor_options"]["num_gpus"] == 0


def test_application_and_route_are_named_by_revision(one_host):
    """Two revisions can stand beside each other in one Serve config."""
    (application,) = serve_config(one_host)["applications"]
    assert application["name"] == f"{one_host.name}-{one_host.revision}"
    assert application["route_prefix"] == f"/{one_host.revision}"


def test_what_may_change_live_is_not_among_the_arguments(one_host):
    """Editing door, scaling or timeouts leaves `args` alone, whose change would restart the model."""
    changed = one_host.model_copy(
        update={
            "door": one_host.door.model_copy(update={"max_queued": 7}),
            "scaling": one_host.scaling.model_copy(update={"upscale_delay_s": 77.0}),
            "timeouts": one_host.timeouts.model_copy(update={"drain_s": 777.0}),
            "environment": [
                item.model_copy(update={"value": "999"}) if item.name.endswith("_S") else item
                for item in one_host.environment
            ],
        }
    )
    before, after = serve_config(one_host), serve_config(changed)
    assert before["applications"][0]["args"] == after["applications"][0]["args"]
    assert before["applications"][0]["deployments"] != after["applications"][0]["deployments"]


def test_autoscaling_stands_in_the_override_also_where_the_number_is_fixed(one_host):
    """The first override of a deployment that had none restarts it, so it stands from day one."""
    (application,) = serve_config(one_host)["applications"]
    config = application["deployments"][0]["autoscaling_config"]
    assert config["min_replicas"] == config["max_replicas"] == 1


def test_serves_own_queue_bound_lies_beyond_the_doors(one_host):
    """The door must be the one to refuse: Serve's refusal is plain text."""
    options = live_options(one_host)
    doors = one_host.door.max_in_flight + one_host.door.max_queued
    assert options["max_ongoing_requests"] > doors
    assert options["max_queued_requests"] > 0


@pytest.mark.parametrize(
    "environ, missing",
    [
        ({}, ["A=1", "B=x", "C="]),
        ({"A": "1", "C": "9"}, ["B=x"]),
        ({"A": "2", "B": "x", "C": "9"}, ["A=1"]),
        ({"A": "1", "B": "x", "C": "3", "D": "4"}, []),
    ],
)
def test_missing_environment_names_what_lacks_or_differs(environ, missing):
    """Each assignment that the environment does not hold, and nothing else."""
    required = [NamedValue(name=n, value=v) for n, v in [("A", 1), ("B", "x"), ("C", "")]]
    assert missing_environment(required, environ) == missing


def test_a_path_in_the_environment_is_each_nodes_own():
    """That it is set is asked for, not where the command lies."""
    required = [NamedValue(name="A_PATH", value="command")]
    assert missing_environment(required, {"A_PATH": "/opt/bin/command"}) == []
    assert missing_environment(required, {}) == ["A_PATH=command"]
