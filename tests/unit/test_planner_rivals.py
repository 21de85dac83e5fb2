"""Are the other tools' formulas theirs, and does the comparison judge everybody by the same cases?"""

from __future__ import annotations

import pytest

from benchmarks.planner_cases import case_inputs
from benchmarks.planner_checkpoint import Checkpoint, case_checkpoint
from benchmarks.planner_formulas import gpustack, hf_mem, llm_d_planner
from rayserve.units import GIB
from tests.unit.rival_questions import (
    LLAMA,
    LLAMA_BYTES,
    STARTED,
    config,
    percent,
    question,
)

# ── the checkpoint that every tool is given ─────────────────────────────────────────────────────


def test_a_checkpoint_put_together_has_the_published_bytes():
    """Llama-3.1-8B: every tensor of its files, neither padded nor with vLLM's tables."""
    found = case_checkpoint(case_inputs(STARTED, LLAMA), "x")
    assert found.elements == (("BF16", LLAMA_BYTES // 2),)
    assert found.size_bytes == LLAMA_BYTES


def test_flags_of_the_engine_do_not_change_the_checkpoint():
    """Neither another dtype nor FP8 made while loading is in the files."""
    for flags in ({"dtype": "float32"}, {"quantization": "fp8"}):
        found = case_checkpoint(case_inputs({**STARTED, **flags}, LLAMA), "x")
        assert found.size_bytes == LLAMA_BYTES


def test_a_packed_checkpoint_counts_words_of_32_bits():
    """GPTQ of 4 bits and 128: matrices, zero points and order in I32, scales and the rest in bf16."""
    case = {**STARTED, "model": "x/Llama-3.1-8B-quantized.w4a16", "quantization": "gptq"}
    stored = dict(case_checkpoint(case_inputs(case, LLAMA), "x").elements)
    weights = 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    order = 32 * (3 * 4096 + 14336)
    assert stored["I32"] == weights // 8 + weights // 128 // 8 + order
    assert stored["BF16"] == 2 * 128256 * 4096 + (32 * 2 + 1) * 4096 + weights // 128


# ── llm-d-planner: the formula gives what its own report printed ────────────────────────────────


def test_llm_d_planner_errs_as_it_published_for_llama():
    """accuracy_report.md, Llama-3.1-8B on one GPU: -0.22 %, +153.97 %, -3.47 %, -3.48 % of 58.11x."""
    found = llm_d_planner(question())
    assert percent(found.weights_gib, 14.99) == -0.22
    assert percent(found.activation_gib, 1.89) == 153.97
    assert percent(found.kv_gib, 58.11) == -3.47
    assert percent(found.concurrency, 58.11) == pytest.approx(-3.48, abs=0.011)
    assert found.request_gib == 1.0  # 2 x 32 x 8 x 128 x 2 bytes x 8192
    assert found.fits


def test_llm_d_planner_errs_as_it_published_on_two_ranks():
    """The same model with TP 2, 7.51 GiB each: -0.42 %; 0.6 GiB beside torch, and half the activation."""
    found = llm_d_planner(question(ranks=2, tensor=2))
    assert percent(found.weights_gib, 7.51) == -0.42
    assert found.kv_gib == pytest.approx(80 * 0.95 - LLAMA_BYTES / GIB / 2 - 4.8 / 2 - 0.6)


def test_llm_d_planner_takes_latent_attention_for_plain_unless_it_is_deepseeks():
    """Kimi-VL: 16 heads of 128 instead of a latent of 576, which its report counts as -87.31 %."""
    kimi = config(
        architectures=["KimiVLForConditionalGeneration"], num_hidden_layers=27, hidden_size=2048,
        num_attention_heads=16, num_key_value_heads=16, head_dim=None, kv_lora_rank=512,
        qk_rope_head_dim=64, num_experts_per_tok=6,
    )  # fmt: skip
    plain = llm_d_planner(question(config=kimi))
    latent = llm_d_planner(question(config={**kimi, "architectures": ["DeepseekV3ForCausalLM"]}))
    assert plain.request_gib == 2 * 27 * 16 * 128 * 2 * 8192 / GIB
    assert latent.request_gib == 27 * 576 * 2 * 8192 / GIB
    assert plain.activation_gib == 8.0


@pytest.mark.parametrize(
    "quantization, stored, weights",
    [
        # FP8 by the method's name, bf16 as stored
        ({"quant_method": "fp8"}, (("BF16", 10), ("F8_E4M3", 100)), 20 + 100),
        # compressed-tensors by the bits of its first group
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8}}},
            },
            (("BF16", 10), ("I8", 100)),
            20 + 100,
        ),
        # packed words are four bytes and stay four
        ({"quant_method": "gptq", "bits": 4}, (("I32", 100), ("BF16", 10)), 400 + 20),
        ({"quant_method": "mxfp4"}, (("U8", 100), ("BF16", 10)), 100 + 20),
    ],
)
def test_llm_d_planner_counts_bytes_by_type(quantization, stored, weights):
    """Types of two bytes and more as stored, smaller ones by the quantization."""
    asked = question(config=config(quantization_config=quantization), checkpoint=Checkpoint(stored))
    assert llm_d_planner(asked).weights_gib == pytest.approx(weights / GIB)


def test_llm_d_planner_does_not_answer_where_its_code_counts_nothing():
    """int(4 bits / 8) is 0 bytes: NVFP4 has no answer rather than a wrong one."""
    nvfp4 = config(quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})
    found = llm_d_planner(question(config=nvfp4, checkpoint=Checkpoint((("U8", 100),))))
    assert found.weights_gib is None
    assert found.fits is None
    assert "modelopt" in found.silent


def test_llm_d_planner_says_nothing_of_a_gpu_or_length_that_is_not_known():
    """The weights have an answer, the cache that is left has none."""
    for unknown in ({"catalogue_gib": 0}, {"max_model_len": 0}):
        found = llm_d_planner(question(**unknown))
        assert found.weights_gib
        assert found.kv_gib is None
        assert found.fits is None


def test_llm_d_planner_refuses_what_leaves_no_request():
    """16 GiB: 15.2 less 14.96, 4.8 and 0.15 is nothing."""
    found = llm_d_planner(question(catalogue_gib=16))
    assert found.kv_gib == 0
    assert found.fits is False


# ── hf-mem ──────────────────────────────────────────────────────────────────────────────────────


def test_hf_mem_counts_all_layers_of_a_plain_model():
    """2 x 32 layers x 8192 tokens x 8 heads x 128 x 2 bytes: 1 GiB."""
    found = hf_mem(question())
    assert found.request_gib == 1.0
    assert found.weights_gib == LLAMA_BYTES / GIB
    assert found.kv_gib is None
    assert found.concurrency is None


def test_hf_mem_caps_windows_only_where_all_layers_slide():
    """Beside full layers, by `layer_types` or by the pattern, a window is taken to keep everything."""
    kinds = ["full_attention", "sliding_attention"] * 16
    by_kind = hf_mem(question(config=config(layer_types=kinds, sliding_window=1024)))
    by_pattern = hf_mem(question(config=config(sliding_window_pattern=2, sliding_window=1024)))
    alone = hf_mem(question(config=config(layer_types=["x"] * 32, sliding_window=1024)))
    assert by_kind.request_gib == by_pattern.request_gib == 1.0
    assert alone.request_gib == 1024 / 8192


@pytest.mark.parametrize(
    "kv_cache_dtype, quantization, stored, share",
    [
        ("fp8", None, "BF16", 0.5),
        ("bfloat16", None, "BF16", 1.0),
        ("auto", {"quant_method": "compressed-tensors"}, "F8_E4M3", 1.0),
        ("auto", {"quant_method": "fp8"}, "F8_E4M3", 0.5),  # takes FP8 weights for an FP8 cache
        ("auto", {"quant_method": "fp8"}, "BF16", None),
        ("auto", {"quant_method": "gptq"}, "I32", None),
        ("int8_per_token_head", None, "BF16", None),
    ],
)
def test_hf_mem_chooses_the_type_of_the_cache(kv_cache_dtype, quantization, stored, share):
    """By the flag, else by the checkpoint; some it refuses, and then only the weights are answered."""
    asked = question(
        config=config(quantization_config=quantization),
        kv_cache_dtype=kv_cache_dtype,
        checkpoint=Checkpoint(((stored, 100),)),
    )
    found = hf_mem(asked)
    assert found.request_gib == share
    assert bool(found.silent) == (share is None)
    assert found.weights_gib


def test_hf_mem_is_read_as_fitting_where_its_total_is_not_above_the_memory():
    """14.96 GiB and 1: in 16 GiB and not in 15.9; no GPU, no verdict."""
    assert hf_mem(question(total_gib=16.0)).fits
    assert hf_mem(question(total_gib=15.9)).fits is False
    assert hf_mem(question(total_gib=0.0)).fits is None


# ── gpustack ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "billions, gib",
    [(0.4940, 3.1), (7.6156, 19.0), (72.7062, 164.5)],
)
def test_gpustack_claims_what_its_docstring_says(billions, gib):
    """0.5B requires 3.1 GiB, 7B 19.0, 72B 164.5 (Qwen2.5 in bf16): files x 1.2 + 2 GiB."""
    stored = Checkpoint((("BF16", int(billions * 1e9)),))
    assert gpustack(question(checkpoint=stored, total_gib=gib + 0.1, utilization=1.0)).fits
    assert not gpustack(question(checkpoint=stored, total_gib=gib - 0.1, utilization=1.0)).fits


def test_gpustack_has_its_own_default_and_no_cache():
    """0.9 of the memory where no share is given, and nothing said of the KV cache."""
    need = (LLAMA_BYTES * 1.2 + 2 * GIB) / GIB
    assert gpustack(question(utilization=None, total_gib=need / 0.9 + 0.1)).fits
    assert not gpustack(question(utilization=None, total_gib=need / 0.9 - 0.1)).fits
    found = gpustack(question())
    assert (found.request_gib, found.kv_gib, found.concurrency) == (None, None, None)


# ── the comparison ──────────────────────────────────────────────────────────────────────────────


# ── hf-mem itself ───────────────────────────────────────────────────────────────────────────────
