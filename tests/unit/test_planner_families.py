"""Each family holds as many parameters as its published checkpoints say they do.

The totals are those that the model hub counts in the files of a checkpoint, recalled like the sizes
beside them and not read again here; that a layout and a wrong recollection should agree to the last
digit is unlikely. A layout that forgets a bias, a norm or a matrix differs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rayserve.errors import SpecError
from rayserve.planner.kv.caches import layer_caches
from rayserve.planner.kv.layers import CacheKind
from rayserve.planner.profile import read_profile
from rayserve.planner.weights.architecture import read_architecture
from rayserve.planner.weights.facts import UnknownModelError
from rayserve.planner.weights.modules import Linear
from rayserve.planner.weights.names import canonical
from rayserve.planner.weights.tensors import Place, layer_parameters, stage_weights
from tests.unit.published_models import (
    FALCON_H1,
    FILE,
    GEMMA3_4B,
    GRANITE_H,
    INTERNVL,
    LLAVA,
    PUBLISHED,
    config,
    parameters,
)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_family_holds_the_published_number_of_parameters(name):
    """To the last one."""
    content, published = PUBLISHED[name]
    assert parameters(content) == published


def test_the_last_layer_of_clip_is_not_loaded():
    """LLaVA reads the layer before it: the checkpoint's 7,063,427,072 less that layer and a norm."""
    layer = 4 * 1024 * 1024 + 4 * 1024 + 8 * 1024 * 1024 + 4096 + 1024 + 4 * 1024
    assert parameters(LLAVA) == 7_063_427_072 - layer - 2048


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_ranks_hold_their_share_of_every_family(name):
    """Two ranks hold what one does but for the allocator's last segment, and a tenth more at most:
    tables, norms, a single KV head.
    """
    model = read_architecture(PUBLISHED[name][0], FILE)
    (whole,), (half,) = stage_weights(model, Place(1)), stage_weights(model, Place(2))
    assert 0.99 * whole <= 2 * half <= 1.1 * whole + 2**24


def test_a_layer_of_attention_beside_mamba_keeps_both():
    """Falcon-H1 has keys, values and a state in each layer."""
    (kept,) = layer_caches(read_architecture(FALCON_H1, FILE), tensor=1, pipeline=1)
    kinds = [layer.kind for layer in kept]
    assert kinds == [CacheKind.MAMBA, CacheKind.FULL] * 36


def test_granite_4_keeps_keys_and_values_in_four_layers_of_forty():
    """The others keep a state of fixed size; its single group of B and C is repeated on every rank."""
    model = read_architecture(GRANITE_H, FILE)
    (kept,) = layer_caches(model, tensor=2, pipeline=1)
    assert [layer.kind for layer in kept].count(CacheKind.FULL) == 4
    projection = next(m for m in model.layers[0].modules if m.name.endswith("in_proj"))
    assert projection.local(2)[1] == (4096, 4096, 128, 128, 64)


def test_a_part_of_a_config_takes_its_class_defaults():
    """Gemma 3 writes down neither vocabulary nor heads; what the file says, null included, stays."""
    text = canonical(GEMMA3_4B)["text_config"]
    assert (text["vocab_size"], text["num_key_value_heads"], text["hidden_size"]) == (
        262208,
        4,
        2560,
    )
    silent = {**GEMMA3_4B, "text_config": {**GEMMA3_4B["text_config"], "vocab_size": None}}
    assert canonical(silent)["text_config"]["vocab_size"] is None
    assert read_profile(GEMMA3_4B, FILE).vocab == 262208


def test_a_config_of_one_part_is_not_filled():
    """There a missing figure is a mistake, and is said."""
    content = config("LlamaForCausalLM", 4096, 32, 32, 11008, 32000)
    del content["vocab_size"]
    with pytest.raises(SpecError, match="vocab_size"):
        read_architecture(content | {"model_type": "llama"}, FILE)


def test_a_language_model_that_is_not_known_makes_the_whole_unknown():
    """InternVL takes many; not all are laid out."""
    content = {**INTERNVL, "llm_config": {**INTERNVL["llm_config"], "architectures": ["Strange"]}}
    with pytest.raises(UnknownModelError, match="language model"):
        read_architecture(content, FILE)


@pytest.mark.parametrize(
    "kind, kv_heads, head_dim",
    [("qwen3_moe", 4, 128), ("mixtral", 8, 128), ("gemma2", 4, 256), ("llama", 64, 128)],
)
def test_heads_that_a_whole_config_leaves_out_are_those_of_its_class(kind, kv_heads, head_dim):
    """Transformers reads them so; Llama's class takes as many KV heads as heads, whatever its default."""
    silent = {
        "model_type": kind,
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 1024,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
    }
    profile = read_profile(silent, FILE)
    assert (profile.kv_heads, profile.head_dim) == (kv_heads, head_dim)
    attention = read_architecture(silent, FILE).layers[0].attention
    assert attention.kv_heads == kv_heads
    stated = read_profile({**silent, "num_key_value_heads": 2, "head_dim": 64}, FILE)
    assert (stated.kv_heads, stated.head_dim) == (2, 64)


SILENT = {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 6144,
    "vocab_size": 1024,
    "max_position_embeddings": 32768,
}
"""What no config leaves out."""


def test_the_width_of_an_expert_that_a_whole_config_leaves_out_is_that_of_its_class():
    """Qwen3-MoE's class holds 768, not the width of a dense layer; a stated one is taken."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    silent = {**SILENT, **experts, "model_type": "qwen3_moe"}
    silent["architectures"] = ["Qwen3MoeForCausalLM"]
    for content, width in ((silent, 768), ({**silent, "moe_intermediate_size": 512}, 512)):
        assert read_architecture(content, FILE).layers[0].mlp.expert_width == width
        assert read_profile(content, FILE).expert_intermediate == width


def test_a_window_that_a_whole_config_leaves_out_is_that_of_its_class():
    """Mistral's class holds 4,096; null, as later checkpoints state, is none."""
    silent = {**SILENT, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    for content, window in ((silent, 4096), ({**silent, "sliding_window": None}, 0)):
        found = read_architecture(content, FILE).layers
        assert {layer.attention.window for layer in found} == {window}


@pytest.mark.parametrize("kind, tied", [("cohere2", True), ("gemma2", True), ("qwen3", False)])
def test_an_output_that_a_whole_config_leaves_out_is_tied_as_in_its_class(kind, tied):
    """The rough estimate of a model that is not laid out counts one matrix, not two, where it is."""
    silent = {**SILENT, "model_type": kind, "architectures": ["ArceeForCausalLM"]}
    assert read_profile(silent, FILE).tied_embeddings is tied
    stated = {**silent, "tie_word_embeddings": not tied}
    assert read_profile(stated, FILE).tied_embeddings is not tied


def test_the_table_of_defaults_names_its_types():
    """Every part that a composite config may leave silent has an entry."""
    data = Path(__file__).parents[2] / "rayserve" / "data" / "config-defaults.json"
    content = json.loads(data.read_text("utf-8"))
    assert set(content["inner"].values()) <= set(content["defaults"])
    assert all(entry["hidden_size"] > 0 for entry in content["defaults"].values())


QWEN3_NEXT = config(
    "Qwen3NextForCausalLM",
    2048,
    48,
    16,
    5120,
    151936,
    2,
    head_dim=256,
    num_experts=512,
    num_experts_per_tok=10,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    linear_num_value_heads=32,
    linear_num_key_heads=16,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
)


def test_qwen3_next_guesses_with_a_layer_of_full_attention():
    """One layer with experts, a projection of 2 x 2048 to 2048 and three norms beside it."""
    model = read_architecture(QWEN3_NEXT, FILE)
    (draft,) = model.draft
    assert draft.attention.kind == "full"
    full = layer_parameters(model.layers[3])
    assert layer_parameters(draft) == full + 2 * 2048 * 2048 + 3 * 2048
    assert {m.name.split(".")[0] for m in draft.modules if isinstance(m, Linear)} == {"mtp"}
    assert parameters(QWEN3_NEXT) == 79_674_391_296
