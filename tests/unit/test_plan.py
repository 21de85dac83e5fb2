"""Is a plan refused when it is not one, and does its revision name exactly what restarts a model?"""

from __future__ import annotations

import copy

import pytest
import yaml

from rayserve.errors import PlanError
from rayserve.plan import PLAN_KEY, DoorPlan, parse_plan
from tests.golden_specs import GOLDEN

PATH = GOLDEN / "one-host-w4a16.plan.yml"


@pytest.fixture
def data() -> dict:
    """The content of a golden plan.yml."""
    return copy.deepcopy(yaml.safe_load(PATH.read_text()))


def test_a_plan_reads_back_as_it_was_written(data):
    """What `as_dict` gives parses to the same plan."""
    plan = parse_plan(data, "plan.yml")
    assert parse_plan({PLAN_KEY: plan.as_dict()}, "plan.yml") == plan


@pytest.mark.parametrize("document", [None, [], "text", {}, {"rayserve_cluster": {}}])
def test_another_document_is_not_a_plan(document):
    """The message names the key that a plan has."""
    with pytest.raises(PlanError, match=PLAN_KEY):
        parse_plan(document, "plan.yml")


def test_an_edit_of_the_replica_by_hand_is_noticed(data):
    """The revision is the replica's hash."""
    data[PLAN_KEY]["replica"]["placement"]["tensor_parallel_size"] = 4
    with pytest.raises(PlanError, match="revision"):
        parse_plan(data, "plan.yml")


def test_an_unknown_key_is_named_with_its_path(data):
    """The place of the key is in the message."""
    data[PLAN_KEY]["door"]["max_qeued"] = 3
    with pytest.raises(PlanError, match=r"door\.max_qeued"):
        parse_plan(data, "plan.yml")


def test_the_revision_ignores_what_changes_live(data):
    """Another door is the same revision."""
    data[PLAN_KEY]["door"]["max_queued"] += 1
    assert parse_plan(data, "plan.yml").revision == data[PLAN_KEY]["revision"]


def test_the_revision_ignores_the_reasons(data):
    """A reason that is worded anew does not restart a model."""
    data[PLAN_KEY]["replica"]["engine_args"][0]["reason"] = "worded anew"
    assert parse_plan(data, "plan.yml").revision == data[PLAN_KEY]["revision"]


def test_a_closed_door_admits_nobody():
    """It is what a replica has until Serve hands it its limits."""
    assert not DoorPlan.closed().admit
