"""A config.json becomes layers, formats and a clear refusal where it cannot."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayserve.errors import SpecError
from rayserve.planner.weights.architecture import FAMILIES
from rayserve.planner.weights.facts import UnknownModelError
from rayserve.planner.weights.formats import RELEASE, Target
from rayserve.planner.weights.modules import Rotary, local_kv_heads
from rayserve.planner.weights.stages import stage_layers, stage_range
from rayserve.planner.weights.tensors import (
    Place,
    allocations,
    layer_parameters,
    stage_weights,
)
from tests.unit.architectures import DEEPSEEK, LLAMA, NEMOTRON, NEXT, linear, read


def test_a_llama_layer_has_fused_projections():
    """Queries, keys and values are one matrix with replicated heads, gate and up another."""
    layer = read(LLAMA).layers[0]
    assert linear(layer, "qkv_proj").local(16) == (4096, (256, 128, 128))
    assert linear(layer, "gate_up_proj").local(2) == (4096, (14336 // 2, 14336 // 2))
    assert linear(layer, "down_proj").local(2) == (14336 // 2, (4096,))


@pytest.mark.parametrize(
    "kv_heads,tensor,heads",
    [(8, 1, 8), (8, 4, 2), (8, 8, 1), (8, 16, 1), (4, 8, 1), (16, 4, 4), (1, 4, 1)],
)
def test_kv_heads_are_replicated_beyond_one_a_rank(kv_heads, tensor, heads):
    """A rank has its share of the KV heads, and never less than one."""
    assert local_kv_heads(kv_heads, tensor) == heads


def test_latent_attention_keeps_one_latent_a_token():
    """MLA's cache is the latent and the rotated part; the latent's projection is whole everywhere."""
    model = read(DEEPSEEK)
    mixing = model.layers[0].attention
    assert (mixing.kind, mixing.latent_size, mixing.rope_size) == ("mla", 512, 64)
    assert linear(model.layers[0], "fused_qkv_a_proj").local(8) == (7168, (1536, 576))
    assert linear(model.layers[0], "q_b_proj").local(8) == (1536, (128 * 192 // 8,))


def test_dense_layers_come_before_experts():
    """The first three layers of DeepSeek-V3 have an MLP, the others experts and a shared one."""
    model = read(DEEPSEEK)
    assert [layer.mlp.experts for layer in model.layers[:4]] == [0, 0, 0, 256]
    assert model.layers[3].mlp.shared_width == 2048
    assert len(model.draft) == 1


def test_an_indexer_adds_its_own_cache():
    """A sparse model keeps an index key and its scale beside the latent."""
    model = read(DEEPSEEK | {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64})
    assert model.layers[0].attention.index_size == 132


def test_three_of_four_layers_of_qwen3_next_attend_linearly():
    """Every fourth layer keeps the whole context and gates its output."""
    model = read(NEXT)
    kinds = [layer.attention.kind for layer in model.layers[:4]]
    assert kinds == ["linear", "linear", "linear", "full"]
    assert model.layers[0].attention.state.conv_channels == 2 * 16 * 128 + 32 * 128
    assert sum(linear(model.layers[3], "qkv_proj").outputs) == (2 * 16 + 2 * 2) * 256


def test_the_letters_of_nemotron_h_name_the_layers():
    """M is Mamba-2, * attention, - an MLP; each layer is only one of them."""
    kinds = [layer.attention.kind for layer in read(NEMOTRON).layers]
    assert kinds == ["mamba", "none", "mamba", "full", "none", "mamba"]


def test_gemma3_slides_in_five_of_six_layers_with_a_rotation_of_its_own():
    """The scaled table of the full layers is larger than the one of sliding layers."""
    model = read(
        LLAMA
        | {
            "architectures": ["Gemma3ForCausalLM"],
            "head_dim": 256,
            "sliding_window": 1024,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        }
    )
    kinds = [layer.attention.kind for layer in model.layers[:6]]
    assert kinds == ["sliding"] * 5 + ["full"]
    tables = [
        next(module for module in model.layers[at].modules if isinstance(module, Rotary))
        for at in (0, 5)
    ]
    assert [table.positions for table in tables] == [131072, 8 * 131072]
    assert model.tied


def test_llama4_chunks_where_positions_rotate():
    """Every fourth layer sees everything and has no rotation."""
    model = read(
        LLAMA
        | {
            "architectures": ["Llama4ForConditionalGeneration"],
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 8192,
        }
    )
    assert [layer.attention.kind for layer in model.layers[:4]] == ["chunked"] * 3 + ["full"]
    assert not any(isinstance(module, Rotary) for module in model.layers[3].modules)
    assert model.tower
    assert "vision_config.hidden_size" in model.assumed


def test_a_stated_vision_config_is_not_assumed():
    """What the config says of its tower replaces what is known of published ones."""
    config = LLAMA | {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "vision_config": {"num_hidden_layers": 2, "hidden_size": 1152},
    }
    few, many = read(config), read(config | {"vision_config": {"num_hidden_layers": 27}})
    assert len(few.tower) < len(many.tower)
    assert "vision_config.hidden_size" not in few.assumed
    assert "vision_config.patch_size" in few.assumed


def test_gemma4_shares_caches_and_has_two_head_sizes():
    """The last layers read the cache of the last layer of their kind that has one."""
    model = read(
        LLAMA
        | {
            "architectures": ["Gemma4ForCausalLM"],
            "num_hidden_layers": 12,
            "head_dim": 256,
            "global_head_dim": 512,
            "sliding_window": 1024,
            "num_kv_shared_layers": 4,
            "hidden_size_per_layer_input": 256,
        }
    )
    assert [layer.attention.shares_cache_of for layer in model.layers[6:]] == [-1, -1, 7, 7, 7, 5]
    assert [layer.attention.key_size for layer in model.layers[4:6]] == [256, 512]


def test_a_text_model_inside_a_multimodal_one_is_found():
    """`text_config` holds the language model's figures."""
    inner = {key: value for key, value in LLAMA.items() if key != "architectures"}
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": inner}
    assert len(read(config).layers) == 32


@pytest.mark.parametrize("names", [["BertModel"], [], ["StableDiffusionPipeline"]])
def test_an_unknown_architecture_is_said_to_be_unknown(names):
    """No layout is guessed for a name that is not in the table."""
    with pytest.raises(UnknownModelError, match="architecture"):
        read(LLAMA | {"architectures": names})


@pytest.mark.parametrize(
    "value", [-1, 0, math.nan, math.inf, True, "32", 32.5, 2**40, [32], {"a": 1}]
)
@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "vocab_size"])
def test_a_figure_that_cannot_be_is_refused(name, value):
    """Neither signs, fractions, words nor absurd sizes pass."""
    with pytest.raises(SpecError, match=name):
        read(LLAMA | {name: value})


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**6},
        {"layer_types": ["full_attention"], "sliding_window": 8},
        {"layer_types": 3},
        {"layer_types": [1] * 32},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": [3]},
        {"rope_scaling": [1]},
        {"rope_scaling": {"rope_type": 3}},
        {"rope_scaling": {"rope_type": "yarn", "factor": -4}},
        {"rope_scaling": {"rope_type": "linear", "factor": "8"}},
        {"tie_word_embeddings": "yes"},
        {"attention_bias": 1},
        {"torch_dtype": "int3"},
        {"torch_dtype": 16},
        {"text_config": []},
        {"quantization_config": "fp8"},
        {"quantization_config": {"quant_method": "awq", "bits": 64}},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]}},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
        {"quantization_config": {"quant_method": "fp8", "ignored_layers": 3}},
        {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": []}},
    ],
)
def test_a_malformed_config_is_refused(change):
    """Whatever stands in a config.json ends in an error of ours."""
    with pytest.raises(SpecError):
        read(LLAMA | change)


@pytest.mark.parametrize(
    "layers,pipeline,expected",
    [
        (32, 1, (32,)),
        (32, 4, (8, 8, 8, 8)),
        (33, 4, (8, 8, 9, 8)),
        (126, 4, (31, 32, 32, 31)),
        (61, 2, (31, 30)),
        (35, 4, (9, 9, 9, 8)),
        (61, 4, (15, 15, 16, 15)),
        (7, 3, (2, 3, 2)),
        (8, 3, (3, 3, 2)),
    ],
)
def test_layers_that_do_not_divide_go_before_the_last_stage(layers, pipeline, expected):
    """vLLM's partition: the remainder is spread from the last but one stage backwards."""
    assert stage_layers(layers, pipeline) == expected
    covered = [i for stage in range(pipeline) for i in stage_range(layers, pipeline, stage)]
    assert covered == list(range(layers))


def test_every_family_names_a_tower_that_exists():
    """A family with a tower has its published figures."""
    from rayserve.planner.weights.architecture import TOWERS
    from rayserve.planner.weights.vision import PUBLISHED

    towers = {family.tower for family in FAMILIES.values() if family.tower}
    assert towers == set(TOWERS) == set(PUBLISHED)


EVERYTHING = LLAMA | DEEPSEEK | NEXT | NEMOTRON | {"num_local_experts": 8, "sliding_window": 128}
EVERYTHING |= {"num_key_value_heads": 8, "global_head_dim": 512, "num_kv_shared_layers": 2}
EVERYTHING |= {"moe_num_experts": 8, "moe_k": 2, "mamba_n_heads": 32, "mamba_d_state": 16}
EVERYTHING |= {
    "ffn_config": {"moe_num_experts": 8, "moe_top_k": 2, "ffn_hidden_size": 512},
    "attn_config": {"kv_n_heads": 8},
    "model_type": "llama",
}
STRANGE = [
    None,
    -1,
    0,
    1,
    2.5,
    math.nan,
    math.inf,
    True,
    "",
    "x",
    [],
    [1],
    ["x"],
    {},
    {"a": 1},
    2**70,
]


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_is_laid_out_and_replayed(name):
    """Each architecture of the table yields layers, and weights on every stage of a cut."""
    kinds = {"layer_types": ["mamba", "attention"] * 3} if "Granite" in name else {}
    model = read(EVERYTHING | {"architectures": [name]} | kinds)
    assert len(model.layers) == 6
    assert all(size > 0 for size in stage_weights(model, Place(4, 2, draft=True)))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.sampled_from(
        [
            *sorted(EVERYTHING),
            "rope_scaling",
            "rope_parameters",
            "layer_types",
            "vision_config",
            "no_rope_layers",
            "quantization_config",
            "mlp_only_layers",
            "vision_feature_layer",
            "partial_rotary_factor",
        ]
    ),
    st.sampled_from(STRANGE),
)
def test_no_strange_value_ends_in_a_traceback(name, key, value):
    """Whatever one key holds, the answer is a model that can be replayed or an error of ours."""
    config = EVERYTHING | {"architectures": [name]} | {key: value}
    try:
        model = read(config)
    except SpecError:
        return
    assert stage_weights(model, Place(2, 2))


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(name for name in FAMILIES if FAMILIES[name].tower)),
    st.dictionaries(
        st.sampled_from(["hidden_size", "depth", "patch_size", "image_size", "num_hidden_layers"]),
        st.sampled_from(STRANGE),
    ),
)
def test_no_strange_tower_ends_in_a_traceback(name, tower):
    """The same for what a config says of its vision tower."""
    try:
        model = read(EVERYTHING | {"architectures": [name], "vision_config": tower})
    except SpecError:
        return
    assert stage_weights(model, Place(2))


def test_a_guessing_layer_is_loaded_on_the_last_stage_only():
    """Its weights come on top there, and only where it is asked for."""
    model = read(DEEPSEEK | {"num_hidden_layers": 6})
    without, with_draft = (stage_weights(model, Place(8, 2, draft=d)) for d in (False, True))
    assert with_draft[0] == without[0]
    assert with_draft[1] > without[1]


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
FORMATS = [
    None,
    BLOCKS,
    {"quant_method": "fp8", "activation_scheme": "static"},
    {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True},
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True},
    {"quant_method": "mxfp4"},
]


def made_twice(model, place):
    """Names of tensors that are made while one of the same name lives, or given back and do not."""
    live, wrong = set(), []
    for name, size in allocations(model, place):
        if (name in live) != (size == RELEASE):
            wrong.append(name)
        (live.discard if size == RELEASE else live.add)(name)
    return wrong


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_no_two_tensors_of_a_rank_share_a_name(name):
    """In any format, on old and new chips, with guessing layers, each step names one tensor alone."""
    kinds = {"layer_types": ["mamba", "attention"] * 3} if "Granite" in name else {}
    for stored in FORMATS:
        config = EVERYTHING | {"architectures": [name], "num_nextn_predict_layers": 2} | kinds
        model = read(config | ({"quantization_config": stored} if stored else {}))
        for capability in (8.0, 9.0, 10.0):
            for stage in (0, 1):
                place = Place(4, 2, stage, draft=True, target=Target(capability))
                assert made_twice(model, place) == [], (stored, capability)


def test_a_guessing_layer_of_fp8_blocks_is_repacked_on_an_older_chip():
    """DeepSeek-V3's takes the same on a chip that repacks FP8, whatever the number of stages."""
    model = read(DEEPSEEK | {"quantization_config": BLOCKS})
    for pipeline in (1, 2, 4):
        place = Place(8, pipeline, draft=True, target=Target(8.0))
        with_draft = stage_weights(model, place)[-1]
        without = stage_weights(model, replace(place, draft=False))[-1]
        assert with_draft - without == pytest.approx(layer_bytes(model, place), rel=0.02)


def layer_bytes(model, place):
    """Bytes of the guessing layer on one rank, each tensor by itself, after it was repacked."""
    names = {module.name for module in model.draft[0].modules if not isinstance(module, Rotary)}
    steps = allocations(model, replace(place, stage=place.pipeline - 1))
    kept = {
        name: size
        for name, size in steps
        if any(name == one or name.startswith(f"{one}.") for one in names)
    }
    return sum(size for size in kept.values() if size != RELEASE)


def test_a_guessing_layer_stays_unquantized_where_its_own_name_is_listed():
    """Lists of unquantized matrices know it by the index after the model's last layer."""
    names = ["model.layers.61"]
    listed = read(DEEPSEEK | {"quantization_config": BLOCKS | {"modules_to_not_convert": names}})
    place = Place(8, draft=True, target=Target(9.0))
    everywhere = read(DEEPSEEK | {"quantization_config": BLOCKS})
    more = stage_weights(listed, place)[0] - stage_weights(everywhere, place)[0]
    eighth = layer_parameters(everywhere.draft[0]) / 8
    assert more == pytest.approx(eighth, rel=0.05)  # one more byte each
