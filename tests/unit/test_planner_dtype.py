"""Is a type of activations that vLLM refuses beside quantized weights refused by the plan?"""

from __future__ import annotations

import pytest

from rayserve.errors import SpecError
from tests.unit.plan_of import MODEL, plan


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
