"""Is the format of each matrix read from the quantization config, and a strange one told?"""

from __future__ import annotations

import pytest

from rayserve.errors import SpecError
from rayserve.planner.weights.facts import UnknownModelError
from rayserve.planner.weights.modules import Experts, Linear
from tests.unit.architectures import DEEPSEEK, LLAMA, linear, read


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "magic"},
        {},
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        {"quant_method": "compressed-tensors"},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"a": {"weights": {"num_bits": 3, "type": "int"}}},
        },
    ],
)
def test_an_unknown_format_is_said_to_be_unknown(quantization):
    """No size is guessed for a method that the planner cannot lay out."""
    with pytest.raises(UnknownModelError):
        read(LLAMA | {"quantization_config": quantization})


@pytest.mark.parametrize("flag", ["awq", "gptq_marlin", "bitsandbytes", "compressed-tensors"])
def test_a_method_that_reads_its_own_checkpoints_is_refused_without_one(flag):
    """vLLM finds no description of the format and stops; so does the plan, naming what works."""
    with pytest.raises(SpecError, match=f"quantized with {flag}") as refused:
        read(LLAMA, quantization=flag)
    assert not isinstance(refused.value, UnknownModelError)
    assert "fp8" in refused.value.do


def test_a_format_made_while_loading_that_is_not_laid_out_is_said_to_be_unknown():
    """vLLM takes the flag, so it is no refusal, but the sizes are not known."""
    with pytest.raises(UnknownModelError, match="quantization"):
        read(LLAMA, quantization="mxfp8")


MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        **{f"model.layers.0.self_attn.{p}_proj": {"quant_algo": "FP8"} for p in "qkvo"},
        **{
            f"model.layers.0.mlp.{p}_proj": {"quant_algo": "W4A16_NVFP4"}
            for p in ("gate", "up", "down")
        },
        "lm_head": {"quant_algo": "W4A16_NVFP4"},
    },
    "ignore": ["mtp*"],
}


def test_mixed_precision_gives_each_matrix_its_own_format():
    """Fused matrices take that of their parts; what is not named stays in 16 bits."""
    model = read(LLAMA | {"quantization_config": MIXED})
    formats = model.quantization
    kinds = [
        formats.storage(
            linear(model.layers[index], name).name, linear(model.layers[index], name).parts
        )
        for index, name in ((0, "qkv_proj"), (0, "gate_up_proj"), (0, "down_proj"), (1, "qkv_proj"))
    ]
    assert [kind and kind.kind for kind in kinds] == ["fp8", "nvfp4", "nvfp4", None]
    assert isinstance(model.tail[-1], Linear)  # the head is quantized too


@pytest.mark.parametrize(
    "layers", [None, {}, {"a": {"quant_algo": "Q4_K"}}, {"a": {}}, [], {"a": 3}]
)
def test_mixed_precision_of_a_strange_kind_is_no_traceback(layers):
    """Without names, or with a format that is not laid out, nothing is guessed."""
    with pytest.raises(SpecError):
        read(LLAMA | {"quantization_config": MIXED | {"quantized_layers": layers}})


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}


def test_gptq_may_leave_modules_or_give_them_other_bits():
    """`dynamic` of GPTQModel: a minus excludes, anything else overrides, the first match counts."""
    rules = {"-:.*\\.down_proj": {}, "+:.*\\.layers\\.1\\..*": {"bits": 8, "group_size": -1}}
    model = read(LLAMA | {"quantization_config": GPTQ | {"dynamic": rules}})
    found = {
        (index, name): model.quantization.storage(
            linear(model.layers[index], name).name, linear(model.layers[index], name).parts
        )
        for index in (0, 1)
        for name in ("qkv_proj", "down_proj")
    }
    assert found[0, "down_proj"] is None
    assert found[1, "down_proj"] is None
    assert (found[0, "qkv_proj"].bits, found[0, "qkv_proj"].group) == (4, 128)
    assert (found[1, "qkv_proj"].bits, found[1, "qkv_proj"].group) == (8, 0)


@pytest.mark.parametrize("listed", [["gate"], ["mlp.gate"], ["gate_proj"]])
@pytest.mark.parametrize("bits", [{"quant_method": "awq"}, {"quant_method": "gptq", "sym": True}])
def test_a_router_in_the_list_leaves_no_expert_unquantized(bits, listed):
    """vLLM looks for AWQ's and GPTQ's names in `mlp.experts`, not in the matrices of an expert."""
    packed = {"bits": 4, "group_size": 128, "modules_to_not_convert": listed, **bits}
    formats = read(DEEPSEEK | {"quantization_config": packed}).quantization
    parts = ("gate_proj", "up_proj", "down_proj")
    assert formats.storage("model.layers.5.mlp.experts", parts, expert=True) is not None
    named = read(
        DEEPSEEK | {"quantization_config": packed | {"modules_to_not_convert": ["experts"]}}
    )
    assert named.quantization.storage("model.layers.5.mlp.experts", parts, expert=True) is None


def test_experts_of_gptq_are_quantized_whatever_parts_are_listed():
    """`modules_in_block_to_quantize` is asked for matrices, not for experts."""
    listed = GPTQ | {"modules_in_block_to_quantize": [["self_attn.o_proj"]]}
    formats = read(DEEPSEEK | {"quantization_config": listed}).quantization
    parts = ("gate_proj", "up_proj", "down_proj")
    assert formats.storage("model.layers.5.mlp.experts", parts, expert=True).bits == 4


def test_gptq_of_some_modules_leaves_the_others():
    """`modules_in_block_to_quantize` lists what a checkpoint holds in few bits."""
    listed = {"modules_in_block_to_quantize": [["mlp.gate_proj", "mlp.up_proj"]]}
    model = read(LLAMA | {"quantization_config": GPTQ | listed})
    layer = model.layers[0]
    assert model.quantization.storage(linear(layer, "qkv_proj").name) is None
    gate = linear(layer, "gate_up_proj")
    assert model.quantization.storage(gate.name, gate.parts).bits == 4


def test_ignored_modules_stay_unquantized():
    """Names, prefixes and patterns in the lists of every method are honoured, for parts as for wholes."""
    ignore = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp", "re:.*layers\\.2\\..*down.*"]
    formats = read(
        LLAMA | {"quantization_config": {"quant_method": "fp8", "ignored_layers": ignore}}
    ).quantization
    parts = ("q_proj", "k_proj", "v_proj")
    assert formats.storage("model.layers.0.self_attn.qkv_proj", parts) is None
    assert formats.storage("model.layers.1.mlp.down_proj") is None
    assert formats.storage("model.layers.2.mlp.down_proj") is None
    assert formats.storage("model.layers.10.mlp.down_proj") is not None
    assert formats.storage("model.layers.3.self_attn.qkv_proj", parts) is not None


def test_only_the_experts_of_gpt_oss_are_in_four_bits():
    """mxfp4 leaves attention, router and embeddings as they are."""
    model = read(
        LLAMA
        | {
            "architectures": ["GptOssForCausalLM"],
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "quantization_config": {"quant_method": "mxfp4"},
        }
    )
    layer = model.layers[0]
    experts = next(module for module in layer.modules if isinstance(module, Experts))
    assert model.quantization.storage(experts.name, experts.parts, expert=True).kind == "mxfp4"
    assert model.quantization.storage(linear(layer, "qkv_proj").name) is None
    assert layer.attention.sinks
