"""Does the planner refuse a cut that heads, groups, blocks, experts or layers do not allow?"""

from __future__ import annotations

import dataclasses

import pytest

from rayserve.errors import Where
from rayserve.planner.support.divisibility import CutShape, check_cut, tensor_sizes
from rayserve.planner.support.limits import attentions, cut_shapes
from rayserve.planner.support.precision import (
    Attention,
)
from rayserve.planner.support.reading import parse_config
from rayserve.planner.support.schemes import Scheme, schemes_of
from rayserve.planner.weights.architecture import read_architecture
from tests.bad_specs import ROOT

FP8, BLOCKS = Scheme("fp8", "fp8", "fp8"), Scheme("fp8", "fp8_block", "fp8", block=(128, 128))


W4A16 = Scheme("compressed-tensors", "int4", group=128)


NVFP4 = Scheme("modelopt_fp4", "nvfp4", "nvfp4", group=16)


LLAMA_405B = CutShape(
    layers=126, heads=128, kv_heads=8, vocab=128256, hidden=16384, head_dim=128, mlp_width=53248
)
GPT_OSS_120B = CutShape(
    layers=36, heads=64, kv_heads=8, vocab=201088, hidden=2880, head_dim=64,
    experts=128, expert_width=2880, schemes=(Scheme("mxfp4", "mxfp4", group=32),),
)  # fmt: skip


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
