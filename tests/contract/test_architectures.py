"""The families that the planner lays out are those that the installed vLLM serves."""

from __future__ import annotations

import pytest

from rayserve.planner.weights.families import FAMILIES

pytestmark = pytest.mark.contract


def test_every_family_is_served_or_its_end_is_known():
    """An architecture without an end is in vLLM's registry; one with an end left it there and then."""
    from vllm.model_executor.models import registry

    served = set(registry._VLLM_MODELS) | set(registry._TRANSFORMERS_SUPPORTED_MODELS)
    gone = registry._PREVIOUSLY_SUPPORTED_MODELS
    for name, family in FAMILIES.items():
        if family.until == (0, 0):
            assert name in served, name
            continue
        assert name not in served, name
        major, minor = (int(part) for part in gone[name].split(".")[:2])
        # vLLM names the last version that had it
        assert family.until == (major, minor), name


def test_defaults_of_config_classes_are_those_of_the_installed_transformers():
    """The committed table, word for word."""
    from scripts.config_defaults import PATH, text

    assert PATH.read_text("utf-8") == text()
