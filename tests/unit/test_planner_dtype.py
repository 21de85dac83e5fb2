"""Is a type of activations that vLLM refuses beside quantized weights refused by the plan?"""

from __future__ import annotations

import pytest

from rayserve.errors import SpecError
from rayserve.planner.support.precision import check_type
from rayserve.planner.support.schemes import Scheme
from tests.unit.plan_of import MODEL, plan
from tests.unit.test_planner_remedies import LARGE, SMALL, length, refusal, surely
from tests.unit.test_planner_remedies import plan as planned

SEVENTY = {
    **LARGE,
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
}
"""Llama 70B in 16 bits."""


def compressed(bits: int, kind: str, activations: int = 0) -> dict[str, object]:
    """A compressed-tensors checkpoint of such weights."""
    group: dict[str, object] = {
        "targets": ["Linear"],
        "weights": {"num_bits": bits, "type": kind, "strategy": "channel", "symmetric": True},
    }
    if activations:
        inputs = {"num_bits": activations, "type": kind, "dynamic": True, "strategy": "token"}
        group["input_activations"] = inputs
    groups = {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", **groups}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
CHECKPOINTS = {
    "gptq": GPTQ,
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "modelopt_fp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    "w4a16": compressed(4, "int"),
    "w8a8-int": compressed(8, "int", 8),
    "w8a8-fp8": compressed(8, "float", 8),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_float32_beside_weights_that_are_computed_in_16_bits_is_refused(name):
    """The method refuses it, or the kernels do where it does not; what is told to write is planned."""
    model = {**MODEL, "quantization_config": CHECKPOINTS[name]}
    with pytest.raises(SpecError, match=r"compute type that .*: bfloat16 or float16") as caught:
        plan("  precision: {dtype: float32}\n", model=model)
    assert caught.value.do == "write dtype: bfloat16"
    assert plan(f"  precision: {{{caught.value.do.removeprefix('write ')}}}\n", model=model).memory


@pytest.mark.parametrize("name, refused", [("gptq", True), ("awq", True), ("w4a16", False)])
def test_without_a_gpu_the_method_alone_refuses_a_type(name, refused):
    """VllmConfig asks the method everywhere; compressed-tensors takes 32 bits where no CUDA kernel runs."""
    model = {**SMALL, "quantization_config": CHECKPOINTS[name]}
    add = "  precision: {dtype: float32}\n"
    if not refused:
        assert planned(model, "cpu", 1, add=add).memory is None
        return
    with pytest.raises(SpecError, match=f"a compute type that `{name}` takes"):
        planned(model, "cpu", 1, add=add)


@pytest.mark.parametrize("capability, told", [(75, "float16"), (80, "bfloat16")])
def test_the_type_that_is_told_is_one_of_the_chip(capability, told):
    """Below capability 8.0 there is no bfloat16."""
    found = check_type(Scheme("gptq", "int4"), dtype="float32", capability=capability)
    assert found.do == f"write dtype: {told}"


def test_weights_of_32_bits_that_do_not_fit_are_told_to_be_of_16():
    """Half the bits hold on the same GPUs, by a plan of it; where they hold neither, it is not told."""
    wide = "  precision: {dtype: float32}\n"
    long = f"{wide}{length(131072)}"
    assert refusal(SEVENTY, "A100-80GB-SXM", 4, add=long).startswith(
        "write dtype: auto, or write max"
    )
    assert surely(planned(SEVENTY, "A100-80GB-SXM", 4, add=length(131072)))
    assert refusal(SEVENTY, "A100-80GB-SXM", 2, add=wide).startswith("write dtype: auto")
    assert planned(SEVENTY, "A100-80GB-SXM", 2).memory
    do = refusal(SEVENTY, "A100-80GB-SXM", 1, add=wide)
    assert not do.startswith("write dtype")
    assert "checkpoint of 4 bits a weight in all linear layers, with dtype: auto" in do
