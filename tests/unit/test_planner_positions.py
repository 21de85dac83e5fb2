"""May the positions of a model be stretched, and is a context told only where it can be had?"""

from __future__ import annotations

import pytest

from rayserve.errors import SpecError
from rayserve.planner.support.rope import check_rope_types
from tests.unit.architectures import DEEPSEEK
from tests.unit.plan_of import MODEL, plan

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALED = {**MODEL, "rope_scaling": LLAMA3, "max_position_embeddings": 131072}
PLAIN = {**MODEL, "rope_scaling": None, "max_position_embeddings": 32768}


def stretch(factor: float, trained: int) -> str:
    """The fragment of a spec."""
    return (
        f"  rope_scaling: {{rope_type: yarn, factor: {factor}, "
        f"original_max_position_embeddings: {trained}}}\n"
    )


@pytest.mark.parametrize(
    "model, factor, trained",
    [(SCALED, 4, 8192), (SCALED, 16, 8192), (PLAIN, 2, 8192)],
)
def test_a_stretch_that_does_not_lengthen_the_context_is_refused(model, factor, trained):
    """rope_scaling replaces what config.json says, so one that ends at fewer positions, or at those that
    the model's own scaling reaches, takes something and gives nothing.
    """
    with pytest.raises(SpecError, match="to more than the model's own") as caught:
        plan(stretch(factor, trained), model=model)
    assert caught.value.where.key == "rayserve_cluster.rope_scaling"
    assert f"{model['max_position_embeddings']:,} positions without it" in caught.value.do


def test_more_trained_positions_than_the_model_has_are_refused():
    """The stretch would start beyond what was trained; the model's own number plans."""
    with pytest.raises(SpecError, match="at most 131072 trained positions") as caught:
        plan(stretch(4, 1048576), model=SCALED)
    key = "rayserve_cluster.rope_scaling.original_max_position_embeddings"
    assert caught.value.where.key == key
    assert caught.value.do == "write 131072"
    assert plan(stretch(4, 131072), model=SCALED)


@pytest.mark.parametrize("factor", [129, 1e15])
def test_a_factor_beyond_any_published_one_is_refused(factor):
    """A slip of the pen gives no table of positions that fills the GPU."""
    with pytest.raises(SpecError, match="128") as caught:
        plan(stretch(factor, 32768), model=PLAIN)
    assert caught.value.where.key == "rayserve_cluster.rope_scaling.factor"
    assert plan(stretch(128, 32768), model=PLAIN)


def test_a_stretch_over_a_scaling_of_the_checkpoint_is_told():
    """Where the context does grow, a note says that the trained scaling goes; without one it is silent."""
    made = plan(stretch(2, 131072), model=SCALED)
    assert any("takes the place of llama3 (factor 8)" in note for note in made.notes)
    silent = plan(stretch(4, 32768), model=PLAIN)
    assert not any("takes the place of" in note for note in silent.notes)


@pytest.mark.parametrize(
    "rope",
    [
        {"type": "mrope", "mrope_section": [16, 24, 24]},
        {"type": "xdrope", "alpha": 1000.0, "xdrope_section": [16, 16, 16, 16]},
        {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}},
    ],
)
def test_positions_that_one_scaling_cannot_replace_are_not_stretched(rope):
    """Sections of three dimensions, and a base for each kind of layer, would be lost."""
    with pytest.raises(SpecError, match="of one kind"):
        plan(stretch(4, 131072), model={**SCALED, "rope_scaling": rope})


@pytest.mark.parametrize("key", ["mrope_section", "xdrope_section"])
def test_sections_beside_the_scaling_are_seen(key):
    """vLLM reads them from the config itself too."""
    with pytest.raises(SpecError, match="of one kind"):
        plan(stretch(4, 131072), model={**PLAIN, key: [16, 24, 24]})


@pytest.mark.parametrize("model, told", [(PLAIN, True), (SCALED, False)])
def test_only_a_model_without_a_scaling_of_its_own_is_told_to_stretch(model, told):
    """A remedy names rope_scaling where a plan of it would keep what the checkpoint was trained with."""
    with pytest.raises(SpecError, match="own limit") as caught:
        plan(model=model, **{"max_model_len: 16384": "max_model_len: 600000"})
    assert ("rope_scaling" in caught.value.do) is told


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    "rope, needed",
    [
        ({"rope_type": "nope", "factor": 4}, "a rope_type in config.json that vLLM"),
        ({"type": "nope", "factor": 4}, "a rope_type in config.json that vLLM"),
        ({"rope_type": "yarn"}, "`factor` beside rope_type yarn"),
        ({"rope_type": "linear", "factor": None}, "`factor` beside rope_type linear"),
        ({"rope_type": "llama3", "factor": 8}, "`low_freq_factor` and `high_freq_factor`"),
        ({"type": "su", "short_factor": [1.0]}, "`long_factor` beside rope_type su"),
        ({**YARN, "type": "linear"}, "one type of scaling"),
        ({"full_attention": {"rope_type": "yarn"}}, "`factor` beside rope_type yarn"),
    ],
)
def test_a_scaling_of_config_json_that_vllm_does_not_read_is_refused(rope, needed):
    """An unknown type, or one without its figures, ends the engine as it loads the model."""
    with pytest.raises(SpecError, match=needed) as caught:
        plan(model={**PLAIN, "rope_scaling": rope})
    assert caught.value.where.key == "rayserve_cluster.model.config"


@pytest.mark.parametrize(
    "rope", [None, {}, YARN, LLAMA3, {"type": "dynamic", "alpha": 1000.0}, {"rope_theta": 500000.0}]
)
def test_a_scaling_that_vllm_reads_is_planned(rope):
    """Old names and keys that stand in for others are no fault."""
    assert plan(model={**PLAIN, "rope_scaling": rope})


def test_a_plugin_may_bring_a_scaling_of_its_own():
    """What it adds is not known here."""
    env = "  env: {VLLM_PLUGINS: mine}\n"
    assert plan(env, model={**PLAIN, "rope_scaling": {"rope_type": "nope", "factor": 4}})


KIMI = {
    "architectures": ["KimiVLForConditionalGeneration"],
    "text_config": {"model_type": "kimi_k2"},
}
PANGU = {"architectures": ["PanguEmbeddedForCausalLM"]}
THREE = {"mrope_interleaved": True, "mrope_section": [16, 24, 24]}


@pytest.mark.parametrize(
    "model, rope",
    [
        (DEEPSEEK, {"rope_type": "nope", "factor": 40}),
        (KIMI, {"type": "nope", "factor": 40}),
        (PANGU, {"rope_type": "nope", **THREE}),
        ({**PANGU, "kv_lora_rank": 512}, {"rope_type": "nope"}),
        ({**PANGU, "param_sink_number": 128}, {"rope_type": "nope"}),
    ],
)
def test_a_type_that_the_model_sets_itself_may_be_any(model, rope):
    """DeepSeek's and Pangu's models in vLLM put a type of their own in place of the stated one."""
    check_rope_types({**model, "rope_scaling": rope}, None)
    with pytest.raises(SpecError, match="that vLLM"):
        check_rope_types({"architectures": ["LlamaForCausalLM"], "rope_scaling": rope}, None)


@pytest.mark.parametrize(
    "model, rope, needed",
    [
        (DEEPSEEK, {"rope_type": "nope"}, "`factor`"),
        (DEEPSEEK, {"rope_type": "dynamic", "alpha": 1000.0}, "`factor`"),
        (DEEPSEEK, {"rope_type": "llama3", "factor": 8}, "`low_freq_factor` and"),
        (PANGU, {"rope_type": "nope", "mrope_interleaved": True}, "`mrope_section`"),
        (PANGU, {"rope_type": "nope", "factor": 4}, "a rope_type in config.json that vLLM"),
        ({"architectures": 3}, {"rope_type": "nope"}, "a rope_type in config.json that vLLM"),
    ],
)
def test_what_the_set_type_needs_is_asked(model, rope, needed):
    """The type that a model sets cannot do without its figures, nor the stated one without its own."""
    with pytest.raises(SpecError, match=needed):
        check_rope_types({**model, "rope_scaling": rope}, None)


@pytest.mark.parametrize("factor, lacking", [(None, ["yarn"]), (40, [])])
def test_deepseek_without_a_scaling_needs_no_factor(factor, lacking):
    """Types that read as `default` are left as they are; any other cannot do without it."""
    refused = []
    for kind in ("default", "yarn"):
        try:
            check_rope_types(
                {**DEEPSEEK, "rope_scaling": {"rope_type": kind, "factor": factor}}, None
            )
        except SpecError:
            refused.append(kind)
    assert refused == lacking
