"""Is a type of activations that vLLM refuses beside quantized weights refused by the plan?"""

from __future__ import annotations

import pytest

from rayserve.errors import SpecError
from tests.unit.plan_of import MODEL, plan
from tests.unit.test_planner_remedies import LARGE, length, refusal, surely
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


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
    ],
)
def test_float32_beside_weights_that_are_computed_in_16_bits_is_refused(quantization):
    """vLLM would refuse to start; in 16 bits the same checkpoint is planned."""
    model = {**MODEL, "quantization_config": quantization}
    with pytest.raises(SpecError, match="16 bits") as caught:
        plan("  precision: {dtype: float32}\n", model=model)
    assert caught.value.do == "write dtype: auto"
    assert plan("  precision: {dtype: bfloat16}\n", model=model).memory is not None


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
