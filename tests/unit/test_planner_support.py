"""Does the planner know what a chip, a cut and a host cannot do, and the nearest value that works?"""

from __future__ import annotations

import dataclasses

import pytest

from rayserve.planner.support.precision import (
    Attention,
    backends_for,
    capability_of,
    check_precision,
    formats_that_run,
    kv_cache_dtypes_for,
    table,
)
from rayserve.planner.support.schemes import ONLINE, Scheme, contradicted, schemes_of

FP8, BLOCKS = Scheme("fp8", "fp8", "fp8"), Scheme("fp8", "fp8_block", "fp8", block=(128, 128))
W4A16 = Scheme("compressed-tensors", "int4", group=128)
INT8 = Scheme("compressed-tensors", "int8", "int8")
NVFP4 = Scheme("modelopt_fp4", "nvfp4", "nvfp4", group=16)
MXFP4 = Scheme("mxfp4", "mxfp4", group=32)


PLAIN = Attention()


def judge(scheme=None, *, chip, kv="auto", dtype="bfloat16", attention=(PLAIN,)):
    """The findings about one scheme on one chip."""
    schemes = (scheme,) if scheme is not None else ()
    return check_precision(
        schemes, dtype=dtype, kv_cache_dtype=kv, attention=attention, compute_capability=chip
    )


def levels(findings):
    """The levels of findings, in order."""
    return [item.level for item in findings]


# ── formats ───────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "scheme, chip, level",
    [
        (FP8, 8.0, "note"), (FP8, 8.9, ""), (FP8, 9.0, ""), (FP8, 7.0, "refuse"),
        (BLOCKS, 8.0, "note"), (BLOCKS, 8.9, "note"), (BLOCKS, 9.0, ""),
        (W4A16, 7.0, "refuse"), (W4A16, 8.0, "note"), (W4A16, 9.0, "note"),
        (INT8, 8.0, ""), (INT8, 9.0, ""), (INT8, 10.0, "warn"), (INT8, 12.0, "warn"),
        (NVFP4, 8.0, "note"), (NVFP4, 9.0, "note"), (NVFP4, 10.0, ""), (NVFP4, 12.0, ""),
        (MXFP4, 7.5, "refuse"), (MXFP4, 8.0, "note"), (MXFP4, 9.0, "note"), (MXFP4, 10.0, ""),
        (Scheme("quark", "fp8", "fp8"), 8.0, "refuse"), (Scheme("quark", "fp8", "fp8"), 9.0, ""),
        (Scheme("modelopt", "fp8", "fp8"), 7.5, "refuse"),
        (Scheme("compressed-tensors", "int4", "fp8", 128), 8.0, "refuse"),
        (Scheme("compressed-tensors", "int4", "fp8", 128), 9.0, ""),
        (Scheme("compressed-tensors", "int4", "fp8", 128), 10.0, "refuse"),
        (Scheme("fp_quant"), 9.0, "refuse"), (Scheme("torchao"), 8.0, ""),
    ],
)  # fmt: skip
def test_a_format_on_a_chip(scheme, chip, level):
    """Each format is computed, runs in another way with a note, or is refused, as in vLLM."""
    dtype = "bfloat16" if chip >= 8 else "float16"
    if scheme.method == "mxfp4":
        dtype = "bfloat16"
    found = [f for f in judge(scheme, chip=chip, dtype=dtype) if f.key[-1] != "dtype"]
    assert levels(found) == ([level] if level else [])


def test_fp8_on_an_a100_says_what_runs_instead():
    """The note names the capability that it lacks, Marlin, and what that gains and does not."""
    (note,) = judge(FP8, chip=8.0)
    assert "8.9" in note.needed
    assert "Marlin" in note.found
    assert "half the memory" in note.found
    assert "no faster than bfloat16" in note.found
    assert note.source.endswith(":443")


def test_a_refused_format_names_chips_and_formats_that_work():
    """The way out of a refusal is a GPU, or a checkpoint that runs on this one."""
    (refusal,) = judge(Scheme("quark", "fp8", "fp8"), chip=8.0)
    assert "capability 8.9" in refusal.needed
    assert "A100" in refusal.found
    assert "L40S" in refusal.do
    assert "INT8 weights and activations" in refusal.do
    error = refusal.error()
    assert error.exit_code == 2
    assert error.do == refusal.do
    assert refusal.do in str(refusal)


def test_formats_that_a_chip_computes_come_first():
    """An A100 is offered INT8 before the formats that it only unpacks."""
    assert formats_that_run(80)[0] == "INT8 weights and activations"
    assert "FP8 weights and activations" in formats_that_run(90)[:3]
    assert "4-bit weights with FP8 activations" not in formats_that_run(100)


@pytest.mark.parametrize(
    "name, do",
    [
        ("bitsandbytes", "take a compressed-tensors, AWQ or GPTQ checkpoint of 4 bits"),
        ("marlin", "write gptq"),
        ("compresed-tensors", "write compressed-tensors"),
        ("xyz", "take one of: fp8,"),
    ],
)
def test_an_unknown_method_is_refused_with_the_nearest(name, do):
    """A method that this version lacks, or never had, names what to take."""
    (refusal,) = judge(Scheme(name), chip=9.0)
    assert refusal.level == "refuse"
    assert refusal.do.startswith(do)


@pytest.mark.parametrize(
    "scheme, expect",
    [
        (Scheme("gptq", "int3", group=128), "3 bits"),
        (Scheme("awq", "int8", group=128), "8 bits"),
        (Scheme("gptq", "int4", group=256), "group_size 128"),
        (Scheme("gptq", "int4", group=16), "group_size 32"),
        (Scheme("gptq", "int4", group=128, activation_order=True), "desc_act: false"),
    ],
)
def test_a_checkpoint_that_no_kernel_reads_is_refused(scheme, expect):
    """Widths, group sizes and activation order that vLLM no longer loads are named."""
    refusals = [item for item in judge(scheme, chip=8.0) if item.level == "refuse"]
    assert len(refusals) == 1
    assert expect in f"{refusals[0].found} {refusals[0].do}"


def test_deprecated_methods_and_compute_types():
    """A method on its way out gets a note, a compute type that it does not take a refusal."""
    assert "deprecated" in judge(Scheme("fbgemm_fp8", "fp8", "fp8"), chip=9.0)[0].found
    (refusal,) = judge(MXFP4, chip=10.0, dtype="float16")
    assert refusal.do == "write dtype: bfloat16"
    (old,) = judge(chip=7.5)
    assert old.do == "write dtype: float16"


def test_other_makers_gpus_are_not_judged():
    """Nothing is said of a GPU without an NVIDIA capability."""
    assert judge(Scheme("xyz"), chip=None) == ()


# ── KV cache ──────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "chip, kv, attention, level",
    [
        (8.0, "fp8", Attention(), "note"),
        (8.0, "fp8_e5m2", Attention(), "note"),
        (8.0, "fp8", Attention(head_dim=96), "refuse"),
        (8.0, "fp8", Attention(head_dim=64, sinks=True), "refuse"),
        (8.0, "fp8", Attention(head_dim=256, images=True), "refuse"),
        (8.0, "fp8", Attention("mla", 576), "refuse"),
        (8.0, "auto", Attention("mla", 576), ""),
        (8.0, "auto", Attention("sparse_mla", 576), "refuse"),
        (8.9, "fp8", Attention("mla", 576), ""),
        (8.9, "auto", Attention("sparse_mla", 576), "refuse"),
        (9.0, "auto", Attention("sparse_mla", 576), ""),
        (9.0, "fp8_ds_mla", Attention("sparse_mla", 576), ""),
        (9.0, "nvfp4_ds_mla", Attention("sparse_mla", 576), "refuse"),
        (10.0, "nvfp4_ds_mla", Attention("sparse_mla", 576), ""),
        (9.0, "fp8", Attention(), ""),
        (9.0, "fp8", Attention(head_dim=64, sinks=True), ""),
        (8.0, "nvfp4", Attention(), ""),
        (8.0, "nvfp4", Attention(head_dim=64), "refuse"),
        (8.0, "nvfp4_4over6", Attention(), "refuse"),
        (8.0, "int8_per_token_head", Attention(head_dim=96), ""),
        (8.0, "fp8_per_token_head", Attention(), "refuse"),
        (8.0, "turboquant_k8v4", Attention(), ""),
        (8.0, "turboquant_k8v4", Attention(sliding=True), "refuse"),
        (9.0, "fp8_inc", Attention(), "refuse"),
    ],
)
def test_a_kv_cache_type_on_a_chip(chip, kv, attention, level):
    """Types of KV cache stand or fall with the backends that read them."""
    assert levels(judge(chip=chip, kv=kv, attention=(attention,))) == ([level] if level else [])


def test_a_refused_kv_cache_type_lists_those_that_work():
    """Where every layer must agree, only types that all of them can use are offered."""
    layers = (Attention(head_dim=96), Attention(head_dim=128))
    (refusal,) = judge(chip=8.0, kv="fp8", attention=layers)
    assert "head dim 96" in refusal.needed
    assert refusal.do.startswith("write auto, or one of: turboquant_k8v4")
    assert "int8_per_token_head" in refusal.do
    assert "nvfp4" not in refusal.do


def test_sparse_attention_on_an_a100_names_the_chip_to_take():
    """No type of KV cache helps where the attention itself has no kernel."""
    (refusal,) = judge(chip=8.0, attention=(Attention("sparse_mla", 576),))
    assert refusal.key == ("node_pools",)
    assert "8.0" in refusal.found
    assert "H100" in refusal.do


def test_full_precision_on_mla_is_refused_with_the_type_that_works():
    """MLA has no kernel in 32 bits on any chip, but in bfloat16."""
    (refusal,) = judge(chip=9.0, dtype="float32", attention=(Attention("mla", 576),))
    assert refusal.do == "write dtype: bfloat16"
    assert judge(chip=9.0, dtype="float32") == ()


@pytest.mark.parametrize(
    "wrong, right", [("fp16", "float16"), ("fp8_e4m3fn", "fp8_e4m3"), ("q8", "auto")]
)
def test_a_misspelt_kv_cache_type_is_refused_with_the_right_one(wrong, right):
    """`fp16` was never a name of vLLM's; the nearest is named."""
    (refusal,) = judge(chip=8.0, kv=wrong)
    assert refusal.do == f"write {right}"


@pytest.mark.parametrize(
    "scheme, refused",
    [
        (FP8, True),
        (W4A16, False),
        (dataclasses.replace(W4A16, declares_kv_scales=True), True),
        (Scheme("gptq", "int4", group=128), False),
    ],
)
def test_e5m2_beside_a_checkpoint_with_kv_scales(scheme, refused):
    """fp8_e5m2 is refused where attention reads scales from the checkpoint, and only there."""
    found = judge(scheme, chip=8.0, kv="fp8_e5m2")
    assert any(item.found == "fp8_e5m2" for item in found) is refused


def test_backends_in_vllms_order():
    """The first backend that takes everything is the one that runs."""
    ask = {"dtype": "bfloat16", "kv": "auto"}
    assert backends_for(Attention(), **ask, capability=80)[0] == "FLASH_ATTN"
    assert backends_for(Attention(head_dim=80), **ask, capability=75)[0] == "TRITON_ATTN"
    assert backends_for(Attention("mla", 576), **ask, capability=80) == ("TRITON_MLA",)
    assert "fp8" in kv_cache_dtypes_for([Attention()], dtype="bfloat16", capability=80)
    assert [capability_of(number) for number in (8.0, 8.6, 8.9, 12.1)] == [80, 86, 89, 121]


def test_every_row_of_the_table_says_where_it_comes_from():
    """Methods, formats and backends each name a file of vLLM and a line."""
    known = table()
    rows = [*known.methods.values(), *known.formats.values(), *known.attention.values()]
    assert len(rows) > 50
    for row in rows:
        file, _, line = str(row["source"]).partition(":")
        assert file.endswith(".py")
        assert int(line) > 0


# ── schemes ───────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "config, expect",
    [
        ({}, ()),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, (FP8,)),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, (BLOCKS,)),
        ({"quant_method": "awq", "bits": 4, "group_size": 128},
         (Scheme("awq", "int4", group=128),)),
        ({"quant_method": "gptq", "bits": 8, "group_size": 64, "desc_act": True},
         (Scheme("gptq", "int8", group=64, activation_order=True),)),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": True},
         (Scheme("gptq", "int4"),)),
        ({"quant_method": "mxfp4"}, (MXFP4,)),
        ({"quant_method": "fbgemm_fp8"}, (Scheme("fbgemm_fp8", "fp8", "fp8"),)),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, (NVFP4,)),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8",
          "kv_cache_quant_algo": "FP8"}},
         (Scheme("modelopt", "fp8", "fp8", declares_kv_scales=True),)),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"},
         (Scheme("modelopt_mxfp8", "mxfp8", "mxfp8", 32),)),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"},
          "input_tensors": {"dtype": "fp8_e4m3"}}}, (Scheme("quark", "fp8", "fp8"),)),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, (Scheme("bitsandbytes"),)),
        ({"quant_method": "experts_int8"}, (ONLINE["experts_int8"],)),
        ({"quant_method": "compressed-tensors"}, (Scheme("compressed-tensors"),)),
    ],
)  # fmt: skip
def test_the_scheme_of_a_checkpoint(config, expect):
    """Method, widths, groups and blocks are read from what each kind of checkpoint writes."""
    found = schemes_of({"quantization_config": config} if config else {})
    assert found == expect


def group(weights, inputs=None):
    """A compressed-tensors configuration of one group."""
    return {"quant_method": "compressed-tensors", "format": "x",
            "config_groups": {"group_0": {"weights": weights, "input_activations": inputs}}}  # fmt: skip


FLOAT8 = {"num_bits": 8, "type": "float"}


@pytest.mark.parametrize(
    "weights, inputs, expect",
    [
        ({"num_bits": 4, "type": "int", "group_size": 128}, None, "int4/16"),
        ({"num_bits": 8, "type": "int", "strategy": "channel", "group_size": None},
         {"num_bits": 8, "type": "int"}, "int8/int8"),
        ({**FLOAT8, "strategy": "channel"}, {**FLOAT8, "dynamic": True}, "fp8/fp8"),
        ({**FLOAT8, "strategy": "block", "block_structure": [128, 128]}, FLOAT8, "fp8_block/fp8"),
        ({**FLOAT8, "strategy": "block", "block_structure": "128x128"}, FLOAT8, "fp8_block/fp8"),
        ({**FLOAT8, "strategy": "tensor"}, None, "fp8/16"),
        ({"num_bits": 4, "type": "int", "group_size": 128}, FLOAT8, "int4/fp8"),
        ({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}, None,
         "nvfp4/16"),
        ({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}, None, "mxfp4/16"),
        ({**FLOAT8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
         {**FLOAT8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
         "mxfp8/mxfp8"),
    ],
)  # fmt: skip
def test_the_format_of_a_compressed_tensors_group(weights, inputs, expect):
    """Each group's weights and activations make one format, a key of the table."""
    (scheme,) = schemes_of({"quantization_config": group(weights, inputs)})
    assert scheme.format == expect
    assert scheme.format in table().formats


def test_a_checkpoint_of_two_formats_has_two_schemes():
    """Groups that differ are judged one by one; equal ones once."""
    first = group({"num_bits": 4, "type": "int", "group_size": 128})
    first["config_groups"]["group_1"] = {"weights": {**FLOAT8}, "input_activations": FLOAT8}
    first["config_groups"]["group_2"] = first["config_groups"]["group_0"]
    formats = [item.format for item in schemes_of({"compression_config": first})]
    assert formats == ["int4/16", "fp8/fp8"]


def test_what_the_spec_asks_for_is_a_scheme_of_an_unquantized_checkpoint():
    """`quantization: fp8` on a checkpoint in 16 bits quantizes while it loads."""
    assert schemes_of({}, "fp8") == (FP8,)
    assert schemes_of({}, "gguf") == (Scheme("gguf"),)
    assert {item.format for item in ONLINE.values()} <= {*table().formats, "int8/16"}


@pytest.mark.parametrize(
    "method,asked,stops",
    [
        ("awq", "awq_marlin", False),
        ("awq", "gptq", True),
        ("gptq", "marlin", False),
        ("gptq", "moe_wna16", False),
        ("fp8", "fp8", False),
        ("fp8", "fp8_per_tensor", True),
        ("fbgemm_fp8", "fp8", True),
        ("compressed-tensors", "fp8", True),
        ("compressed-tensors", "humming", False),
        ("modelopt", "fp8", False),
        ("auto-round", "gptq", False),
        ("", "fp8", False),
        ("fp8", "", False),
    ],
)
def test_a_method_that_is_not_the_checkpoints_stops_vllm(method, asked, stops):
    """Except where vLLM converts one into the other, or takes the checkpoint's whatever is asked."""
    assert contradicted(method, asked) is stops
