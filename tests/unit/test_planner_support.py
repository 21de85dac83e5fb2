"""Does the planner know what a chip, a cut and a host cannot do, and the nearest value that works?"""

from __future__ import annotations

import dataclasses

import pytest

from rayserve.errors import Where
from rayserve.planner.support.divisibility import CutShape, check_cut, tensor_sizes
from rayserve.planner.support.host_limits import QUEUE_BYTES, HostFacts, check_host, shm_bytes
from rayserve.planner.support.limits import attentions, cut_shapes
from rayserve.planner.support.precision import (
    Attention,
    backends_for,
    capability_of,
    check_precision,
    formats_that_run,
    kv_cache_dtypes_for,
    table,
)
from rayserve.planner.support.reading import parse_config
from rayserve.planner.support.schemes import ONLINE, Scheme, schemes_of
from rayserve.planner.weights.architecture import read_architecture
from rayserve.units import GIB
from tests.bad_specs import ROOT

LLAMA_405B = CutShape(
    layers=126, heads=128, kv_heads=8, vocab=128256, hidden=16384, head_dim=128, mlp_width=53248
)
GPT_OSS_120B = CutShape(
    layers=36, heads=64, kv_heads=8, vocab=201088, hidden=2880, head_dim=64,
    experts=128, expert_width=2880, schemes=(Scheme("mxfp4", "mxfp4", group=32),),
)  # fmt: skip
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


# ── the cut ───────────────────────────────────────────────────────────────────────────────────────
def refused(shape, tensor, *, host=8, **more):
    """The refusals of a cut into ranks."""
    found = check_cut((shape,), tensor=tensor, pipeline=1, gpus_per_host=host, **more)
    return [item for item in found if item.level == "refuse"]


def test_a_size_that_divides_is_not_refused():
    """405B goes into 1, 2, 4, 8 and, with copies of its KV heads, 16 and 32 ranks."""
    assert tensor_sizes((LLAMA_405B,), 32) == (1, 2, 4, 8, 16, 32)
    assert refused(LLAMA_405B, 8) == []


def test_a_refused_size_names_the_numbers_and_the_sizes_on_both_sides():
    """Six ranks are refused for heads and KV heads, with four and eight in their place."""
    found = refused(LLAMA_405B, 6)
    assert "128 attention heads" in found[0].needed
    assert "8 KV heads" in found[1].needed
    assert all(item.do == "write tensor: 4 or 8" for item in found)
    assert all(item.found == "tensor: 6" for item in found)


@pytest.mark.parametrize(
    "change, tensor, expect",
    [
        ({"heads": 40, "kv_heads": 8}, 5, "vocabulary of 151936, padded to 151936"),
        ({"kv_heads": 6}, 4, "6 KV heads"),
        ({"kv_heads": 3}, 8, "3 KV heads"),
        ({"mlp_width": 53250}, 4, "MLP width 53250"),
        ({"shared_width": 1001}, 2, "shared expert's width 1001"),
        ({"expert_width": 1002, "experts": 8}, 4, "width of an expert, 1002"),
        ({"linear_heads": (16, 12)}, 8, "12 heads of linear attention"),
        ({"mamba_groups": 2}, 4, "2 groups of the Mamba layers"),
        ({"vision_heads": 12}, 8, "12 heads of the vision tower"),
    ],
)
def test_each_number_that_a_cut_must_divide(change, tensor, expect):
    """Heads, vocabulary, widths and towers are each named with their number."""
    shape = dataclasses.replace(LLAMA_405B, **change)
    if "151936" in expect:
        shape = dataclasses.replace(shape, vocab=151936, mlp_width=17408 * 5)
    found = refused(shape, tensor)
    assert any(expect in item.needed for item in found), [item.needed for item in found]


def test_what_need_not_divide():
    """KV heads of MLA, a single Mamba group, and a tower that falls back, hinder nothing."""
    shape = dataclasses.replace(
        LLAMA_405B, kv_heads=3, latent=True, mamba_groups=1, vision_heads=10, vision_splits=False
    )
    assert refused(shape, 8) == []


def test_ways_around_a_number():
    """A tower may run whole on each rank, and experts may be dealt out whole."""
    tower = dataclasses.replace(LLAMA_405B, vision_heads=12)
    assert "mm_encoder_tp_mode: data" in refused(tower, 8)[0].do
    moe = dataclasses.replace(LLAMA_405B, experts=8, expert_width=1002)
    assert "enable_expert_parallel" in refused(moe, 4)[0].do
    assert refused(moe, 4, expert_parallel=True) == []


def test_no_way_around_is_told_where_another_number_is_in_the_way_too():
    """Whole experts, or a whole tower, are of no use where the KV heads do not divide either."""
    moe = dataclasses.replace(LLAMA_405B, experts=8, expert_width=1002, kv_heads=3)
    tower = dataclasses.replace(LLAMA_405B, vision_heads=12, kv_heads=3)
    told = [*refused(moe, 4), *refused(tower, 8)]
    assert len(told) == 4
    assert not any("engine_args" in item.do for item in told)


@pytest.mark.parametrize(
    "scheme, width, tensor, ok",
    [
        (W4A16, 53248, 8, True),
        (W4A16, 53248, 16, True),
        (W4A16, 18944, 8, False),  # Qwen2.5-7B: 2368 a rank is 18.5 groups of 128
        (W4A16, 18944, 4, True),
        (dataclasses.replace(W4A16, group=-1), 18944, 8, True),
        (NVFP4, 18944, 8, True),
        (BLOCKS, 18944, 8, False),
        (BLOCKS, 18432, 8, True),
        (FP8, 18944, 8, True),
    ],
)
def test_groups_and_blocks_must_not_straddle_ranks(scheme, width, tensor, ok):
    """A rank's input holds whole quantization groups, and whole blocks on both sides."""
    shape = dataclasses.replace(LLAMA_405B, mlp_width=width, schemes=(scheme,))
    found = refused(shape, tensor, host=16)
    assert (found == []) is ok
    if not ok:
        assert found[0].do.startswith("write tensor: 4")


@pytest.mark.parametrize(
    "scheme, width, tensor, fp8_compute, ok",
    [
        (Scheme("gptq", "int4", group=128), 768, 8, True, True),  # groups of 32 in place of 128
        (Scheme("gptq", "int4", group=128), 384, 8, True, False),
        (W4A16, 768, 8, True, False),  # compressed-tensors keeps its groups
        (W4A16, 768, 2, True, True),
        (BLOCKS, 1536, 8, True, True),  # 192 a rank: blocks of 64, in Triton
        (BLOCKS, 1536, 8, False, False),  # which an A100 has not in FP8
        (BLOCKS, 2048, 8, False, True),
        (BLOCKS, 768, 16, True, False),
    ],
)
def test_groups_and_blocks_of_experts(scheme, width, tensor, fp8_compute, ok):
    """Experts may be cut into finer groups or blocks, where a kernel reads them."""
    shape = dataclasses.replace(
        LLAMA_405B, mlp_width=0, experts=64, expert_width=width, schemes=(scheme,),
        fp8_compute=fp8_compute,
    )  # fmt: skip
    assert (refused(shape, tensor, host=16) == []) is ok
    assert refused(shape, tensor, host=16, expert_parallel=True) == []


def test_key_rows_in_blocks():
    """With heads of 64, one KV head a rank is half a block of 128 rows."""
    shape = dataclasses.replace(LLAMA_405B, head_dim=64, schemes=(BLOCKS,))
    (finding,) = refused(shape, 8)
    assert "blocks of 128 of key rows; it has 64" in finding.needed
    assert finding.do == "write tensor: 4"


def test_padding_is_told_as_a_note():
    """gpt-oss in 8 ranks pads 360 columns to 384; Marlin pads MLPs off its tile."""
    (note,) = check_cut((GPT_OSS_120B,), tensor=8, pipeline=1, gpus_per_host=8)
    assert note.level == "note"
    assert "360, padded to 384: 7% more" in note.found
    shape = dataclasses.replace(LLAMA_405B, mlp_width=8 * 160,
                                schemes=(dataclasses.replace(W4A16, group=32),))  # fmt: skip
    (pads,) = check_cut((shape,), tensor=8, pipeline=1, gpus_per_host=8)
    assert "160" in pads.found


def test_ranks_beyond_a_host_are_refused():
    """A stage stays on one host."""
    (refusal,) = refused(LLAMA_405B, 16, host=8)
    assert refusal.do.startswith("write tensor: 8")


def test_stages_and_layers():
    """More stages than layers are refused; uneven ones get a note with the longest."""
    (refusal,) = check_cut((LLAMA_405B,), tensor=8, pipeline=127, gpus_per_host=8)
    assert refusal.do == "write pipeline: 126 at most"
    (note,) = check_cut((LLAMA_405B,), tensor=8, pipeline=4, gpus_per_host=8)
    assert "31, 32, 32, 31" in note.found
    assert note.do == "pipeline: 3 would be even"


GPTQ = Scheme("gptq", "int4", group=128)


@pytest.mark.parametrize(
    "report, change, tensor, expect, do",
    [
        ("vllm 2652", {"heads": 52, "kv_heads": 1}, 8, "52 attention heads", "write tensor: 4"),
        ("AdaptThink 1", {"heads": 28, "kv_heads": 4, "vocab": 152064, "mlp_width": 18944}, 8,
         "28 attention heads", "write tensor: 4"),
        ("vllm 13640", {"heads": 64, "mlp_width": 29568, "schemes": (GPTQ,)}, 2,
         "whole groups of 128 of the MLP width, 29568", "write tensor: 1"),
        ("vllm 25292", {"heads": 32, "kv_heads": 4, "mlp_width": 0, "experts": 128, "expert_width": 768,
                 "schemes": (BLOCKS,), "fp8_compute": False}, 4,
         "blocks of 128 or more of an expert; it has 192", "write tensor: 2, or pass engine_args"),
    ],
)  # fmt: skip
def test_reported_failures_are_refused_before_a_start(report, change, tensor, expect, do):
    """Starts that failed in public reports are refused, with a size that works."""
    found = refused(dataclasses.replace(LLAMA_405B, **change), tensor)
    assert expect in found[0].needed, report
    assert found[0].do.startswith(do)


# ── from an architecture ──────────────────────────────────────────────────────────────────────────
def golden(name, **more):
    """A config of the golden plans, completed, and its architecture."""
    path = ROOT / "tests" / "golden" / "configs" / name
    config = {**parse_config(path.read_bytes(), Where(str(path))), **more}
    return config, read_architecture(config, Where(str(path)))


def test_an_architecture_gives_its_cut_and_its_attention():
    """Equal layers make one shape; MLA makes a latent one with its own head dim."""
    config, model = golden("llama-405b.json")
    (shape,) = cut_shapes(model, config, (), fp8_compute=False)
    assert (shape.heads, shape.mlp_width, shape.layers) == (128, 53248, 126)
    assert attentions(model, images=True) == (Attention("full", 128),)
    assert tensor_sizes((shape,), 8) == (1, 2, 4, 8)
    config, model = golden(
        "deepseek-v3.json", qk_nope_head_dim=128, v_head_dim=128, q_lora_rank=1536,
        n_group=8, topk_group=4,
    )  # fmt: skip
    shapes = cut_shapes(model, config, schemes_of(config), fp8_compute=True)
    assert all(shape.latent for shape in shapes)
    assert {bool(shape.experts) for shape in shapes} == {True, False}
    assert attentions(model, images=False) == (Attention("mla", 576),)
    assert 8 in tensor_sizes(shapes, 8)


def test_what_a_checkpoint_leaves_unquantized_need_not_fit_its_groups():
    """Attention and experts in 16 bits are cut freely beside quantized MLPs."""
    shape = dataclasses.replace(LLAMA_405B, heads=8, head_dim=72, schemes=(W4A16,))
    assert refused(shape, 8)
    assert refused(dataclasses.replace(shape, attention_quantized=False), 8) == []
    moe = dataclasses.replace(LLAMA_405B, experts=4, expert_width=640, schemes=(W4A16,))
    assert refused(moe, 8)
    assert refused(dataclasses.replace(moe, experts_quantized=False), 8) == []
    uneven = dataclasses.replace(LLAMA_405B, mlp_width=640, schemes=(BLOCKS,))
    assert refused(uneven, 8)
    assert refused(dataclasses.replace(uneven, mlp_quantized=False), 8) == []


# ── the host ──────────────────────────────────────────────────────────────────────────────────────
def host_findings(offload=0.0, replicas=1, tensor=8, **facts):
    """What a host with these facts lacks."""
    return check_host(
        HostFacts(gpus=8, **facts), tensor=tensor, pipeline=1, replicas_on_host=replicas,
        offload_gib=offload,
    )  # fmt: skip


def test_nothing_is_said_of_facts_that_nobody_knows():
    """A host of unknown memory and modes passes."""
    assert host_findings(offload=512) == ()


def test_mig_is_refused():
    """GPUs in slices have neither peer access nor the catalogue's memory."""
    (refusal,) = host_findings(mig=True)
    assert "nvidia-smi -mig 0" in refusal.do
    assert host_findings(mig=False) == ()


@pytest.mark.parametrize(
    "offload, replicas, shm, ok",
    [
        (0, 1, 1, True),
        (0, 1, 64 / 1024, False),
        (256, 1, 257, True),
        (256, 1, 256, False),
        (256, 2, 300, False),
    ],
)
def test_shared_memory_holds_queue_and_offloaded_blocks(offload, replicas, shm, ok):
    """/dev/shm holds the KV blocks of every replica on the host and vLLM's queue."""
    found = host_findings(offload=offload, replicas=replicas, shm_gib=shm)
    assert (found == ()) is ok
    if offload and not ok:
        room = (shm * GIB - QUEUE_BYTES) // replicas // GIB
        assert found[0].do.startswith(f"write cpu_gib: {room:.0f}, or mount")


def test_one_rank_needs_no_queue():
    """A model on one GPU has no ranks to tell."""
    assert shm_bytes(ranks=1, replicas=3, offload_gib=0) == 0
    assert shm_bytes(ranks=2, replicas=1, offload_gib=1) == QUEUE_BYTES + GIB


def test_host_memory_for_offloaded_blocks():
    """More KV blocks than the host has memory are refused with what fits."""
    (refusal,) = host_findings(offload=256, replicas=2, memory_gib=512)
    assert refusal.do == "write cpu_gib: 252"
    assert host_findings(offload=252, replicas=2, memory_gib=512) == ()
    (tiny,) = host_findings(offload=4, memory_gib=8)
    assert tiny.do == "leave kv_offload out"


def test_what_is_proposed_works_for_memory_and_shared_memory():
    """Each refusal names a size that passes both checks."""
    for finding in host_findings(offload=400, replicas=1, memory_gib=256, shm_gib=128):
        assert finding.do.startswith("write cpu_gib: 127")
    assert host_findings(offload=127, replicas=1, memory_gib=256, shm_gib=128) == ()
