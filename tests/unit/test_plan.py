"""Is a plan refused when it is not one, and does its revision name exactly what restarts a model?"""

from __future__ import annotations

import copy

import pytest

from rayserve.errors import PlanError
from rayserve.plan import PLAN_KEY, DoorPlan, parse_plan
from tests.golden_specs import GOLDEN
from tests.yaml_text import load_yaml

PATH = GOLDEN / "one-host-w4a16.plan.yml"


@pytest.fixture
def data() -> dict:
    """The content of a golden plan.yml."""
    return copy.deepcopy(load_yaml(PATH.read_text()))


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


@pytest.mark.parametrize(
    "name, value",
    [("A;id", "1"), ("", "1"), ("Ä", "1"), ("A\n", "1"), ("A", None), ("A", [1]), ("A", {"b": 1}),
     ("A", "1\nB=2"), ("A", "\0"), ("A", "\u2028"), ("A", "\x1b[2J")],
)  # fmt: skip
def test_an_environment_that_is_no_environment_is_refused(data, name, value):
    """What a shell or systemd would read as more than one variable stands in no plan."""
    data[PLAN_KEY]["environment"].append({"name": name, "value": value})
    with pytest.raises(PlanError, match="environment"):
        parse_plan(data, "plan.yml")


@pytest.mark.parametrize("value", [10**6000, "\ud800"], ids=["digits", "surrogate"])
def test_a_replica_that_has_no_hash_is_refused(data, value):
    """What JSON cannot carry is a wrong plan, not a traceback."""
    data[PLAN_KEY]["replica"]["engine_args"].append({"name": "seed", "value": value})
    with pytest.raises(PlanError):
        parse_plan(data, "plan.yml")


def test_an_environment_names_a_variable_once(data):
    """The second of two values would win unseen."""
    data[PLAN_KEY]["environment"] *= 2
    with pytest.raises(PlanError, match="once"):
        parse_plan(data, "plan.yml")


def test_a_wrong_value_is_shown_in_short(data):
    """However large the value, the message is not."""
    data[PLAN_KEY]["name"] = [["x" * 100] * 1000] * 100_000
    with pytest.raises(PlanError) as caught:
        parse_plan(data, "plan.yml")
    assert len(caught.value.found) <= 80
