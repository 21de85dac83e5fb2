"""Does the planner know which models the pinned vLLM serves, and say it clearly?"""

from __future__ import annotations

import pytest

from rayserve.engine import check_served
from rayserve.engine.models import load_models
from rayserve.errors import SpecError, Where
from rayserve.planner.weights.architecture import FAMILIES

HERE = Where("config.json")


@pytest.mark.parametrize(
    "name",
    [
        "LlamaForCausalLM",
        "DeepseekV3ForCausalLM",
        "GPT2LMHeadModel",
        "Qwen3VLForConditionalGeneration",
    ],
)
def test_a_model_of_vllms_own_needs_no_word(name):
    """What vLLM serves with its own code passes in silence."""
    assert check_served([name], HERE) == ""


def test_another_ending_of_a_known_name_passes():
    """vLLM looks for a class of its own under the other endings of models that write."""
    assert check_served(["LlamaLMHeadModel"], HERE) == ""
    with pytest.raises(SpecError):
        check_served(["LlamaMaskedLM"], HERE)


def test_the_backend_for_transformers_is_named():
    """A model without code of vLLM's own runs with that of Transformers, which the plan says."""
    assert "Transformers" in check_served(["BitNetForCausalLM"], HERE)
    assert "Transformers" in check_served(["LlamaForCausalLM"], HERE, implementation="transformers")


@pytest.mark.parametrize(
    "names, found",
    [
        (["BertModel"], "which turns text into vectors"),
        (["Qwen2ForRewardModel"], "which classifies or scores"),
        (["WhisperForConditionalGeneration"], "which transcribes speech"),
        (["MedusaModel"], "a draft model"),
        (["XverseForCausalLM"], "vLLM 0.23.0 was the last to serve"),
        (["MBartForConditionalGeneration"], "which a plugin brings"),
        (["NoSuchForCausalLM"], "NoSuchForCausalLM"),
        ([], "no `architectures`"),
    ],
)
def test_a_model_that_is_not_served_is_refused_with_the_reason(names, found):
    """What it is, or when vLLM gave it up, is told."""
    with pytest.raises(SpecError) as caught:
        check_served(names, HERE)
    assert found in caught.value.found
    assert caught.value.do


def test_a_misspelt_name_gets_the_nearest():
    """A slip of the pen is told from an unknown model; a name of a megabyte costs nothing."""
    with pytest.raises(SpecError, match="of like name is Qwen3MoeForCausalLM"):
        check_served(["Qwen3MoEForCausalLM"], HERE)
    with pytest.raises(SpecError) as caught:
        check_served(["x" * 2**20], HERE)
    assert len(caught.value.message()) < 700


def test_a_plugin_may_bring_any_architecture():
    """Where the environment names plugins of vLLM, the plan only says that one must bring it."""
    assert "VLLM_PLUGINS" in check_served(["NoSuchForCausalLM"], HERE, plugins=True)
    with pytest.raises(SpecError):
        check_served(["BertModel"], HERE, plugins=True)


def test_an_implementation_that_does_not_write_is_refused():
    """Terratorch is for models that do not write."""
    with pytest.raises(SpecError, match="terratorch"):
        check_served(["LlamaForCausalLM"], HERE, implementation="terratorch")


def test_most_of_what_the_planner_lays_out_is_served():
    """Architectures that only earlier versions served are few, and are kept for their logs."""
    models = load_models()
    gone = [name for name in FAMILIES if name not in models.text | models.transformers]
    assert set(gone) <= models.removed.keys()
    assert len(gone) < 5
