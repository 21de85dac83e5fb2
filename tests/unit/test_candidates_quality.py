"""Are quality and traits of a checkpoint those that were published?"""

from __future__ import annotations

import json

import pytest

from rayserve.errors import Where
from rayserve.planner.candidates.quality import published, quality_of, worst_published
from rayserve.planner.candidates.traits import traits_of
from rayserve.planner.support.precision import table
from rayserve.planner.support.schemes import Scheme, schemes_of
from rayserve.planner.weights.architecture import read_architecture
from tests.bad_specs import ROOT
from tests.unit.compared import CONFIGS, compared

HERE = Where("config.json")
STRETCH = "rope_scaling: {rope_type: yarn, factor: 2, original_max_position_embeddings: 131072}"


# ── quality ───────────────────────────────────────────────────────────────────────────────────────
def test_every_published_figure_has_a_source_and_a_format_that_exists():
    """Formats are those of precisions.yml; rows name a known source and benchmark; ratios are right."""
    known = published()
    for key, rows in known.formats.items():
        assert key.partition("@")[0] in table().formats
        for one in rows:
            assert one["source"] in known.sources
            assert one["benchmark"] in known.benchmarks
            assert 50 < one["recovery"] < 103
            if "scores" in one:
                quantized, whole = one["scores"]
                assert one["recovery"] == pytest.approx(100 * quantized / whole, abs=0.06)
    assert all({"title", "year", "where"} <= set(one) for one in known.sources.values())


def test_quality_is_that_of_the_nearest_published_size():
    """405B takes the 405B figures, 3B those of 3B; above 100 counts as 100."""
    fp8 = (Scheme("fp8", "fp8", "fp8"),)
    large, small = quality_of(fp8, 405 * 10**9), quality_of(fp8, 3 * 10**9)
    assert large is not None
    assert small is not None
    assert large.model == "Llama-3.1-405B"
    assert large.recovery_percent == pytest.approx((100 + 99.9) / 2)
    assert large.high_percent == 100.12
    assert small.model == "Llama-3.2-3B"
    assert small.recovery_percent < large.recovery_percent


def test_awq_has_figures_of_its_own():
    """AWQ and GPTQ of the same bits are told apart."""
    awq = schemes_of({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}})
    gptq = schemes_of({"quantization_config": {"quant_method": "gptq", "bits": 4}})
    assert quality_of(awq, 8 * 10**9) != quality_of(gptq, 8 * 10**9)


def test_what_nobody_measured_has_no_figure():
    """A format without rows, a mixture and an unknown method are not known; unquantized is 100."""
    assert quality_of((Scheme("mxfp4", "mxfp4"),), 10**11) is None
    assert quality_of((Scheme("a", "fp8", "fp8"), Scheme("a", "int4")), 10**11) is None
    groups = (Scheme("a", "int4", group=64), Scheme("a", "int4", group=128))
    assert quality_of(groups, 10**11) == quality_of(groups[:1], 10**11) is not None
    assert quality_of((Scheme("bitsandbytes"),), 10**11) is None
    whole = quality_of((), 10**11)
    assert whole is not None
    assert whole.recovery_percent == 100


def test_an_unknown_format_counts_as_the_worst_published():
    """Ignorance is no advantage: the assumed recovery is at most that of any format."""
    for size in (10**9, 8 * 10**9, 405 * 10**9):
        worst = worst_published(size)
        for key in published().formats:
            weights, _, activations = key.partition("@")[0].partition("/")
            known = quality_of((Scheme("x", weights, activations),), size)
            assert known is not None
            assert worst <= known.recovery_percent


# ── traits ────────────────────────────────────────────────────────────────────────────────────────
def traits(name: str, **changes):
    """Traits of one of the golden models."""
    config = json.loads((ROOT / "tests" / "golden" / "configs" / name).read_text()) | changes
    return traits_of(read_architecture(config, HERE), config, HERE)


def test_traits_tell_how_attention_groups_its_heads():
    """GQA with its ratio, MLA with its vector."""
    assert traits("llama-405b.json").attention == ["GQA 16:1 (128 heads, 8 KV)"]
    assert traits("deepseek-v3.json").attention == ["MLA of 576 elements a token"]
    mha = traits("llama-8b.json", num_key_value_heads=32)
    assert mha.attention == ["MHA 1:1 (32 heads, 32 KV)"]
    mqa = traits("llama-8b.json", num_key_value_heads=1)
    assert mqa.attention == ["MQA 32:1 (32 heads, 1 KV)"]


def test_traits_tell_windows_and_how_many_layers_have_them():
    """A window is told with its tokens and layers."""
    config = {
        "architectures": ["Gemma2ForCausalLM"],
        "hidden_size": 2304,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 9216,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
    }
    found = traits_of(read_architecture(config, HERE), config, HERE).attention
    assert "GQA 2:1 (8 heads, 4 KV), window of 4096 tokens, 2 of 4 layers" in found
    assert "GQA 2:1 (8 heads, 4 KV), 2 of 4 layers" in found


def test_traits_count_the_parameters():
    """Llama 3.1 405B and 8B, DeepSeek V3 have as many parameters as their makers say."""
    assert traits("llama-405b.json").parameters == pytest.approx(405.9e9, rel=1e-3)
    assert traits("llama-8b.json").parameters == pytest.approx(8.03e9, rel=1e-3)
    assert traits("deepseek-v3.json").parameters == pytest.approx(671e9, rel=3e-3)


def test_traits_tell_what_stays_in_16_and_32_bits():
    """A quantized checkpoint keeps embeddings, head and norms; a router's correction is in 32 bits."""
    kept = traits("llama-405b-w4a16.json").unquantized
    assert [one.partition(" ")[0] for one in kept] == ["embed_tokens", "lm_head", "norms"]
    assert "e_score_correction_bias" in traits("deepseek-v3.json").float32
    assert traits("llama-405b.json").unquantized == []


@pytest.mark.parametrize(
    "scaling, words",
    [
        (None, "131072 positions"),
        (
            {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
            "131072 positions, extended with llama3 from 8192",
        ),
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 131072},
            "131072 positions, which yarn x4 stretches",
        ),
    ],
)
def test_traits_tell_how_positions_came_about(scaling, words):
    """Extension that the makers claim is told apart from stretching beyond it."""
    found = traits("llama-8b.json", rope_scaling=scaling)
    assert found.positions == words
    assert found.claimed_positions == 131072


def test_stretching_beyond_the_claimed_positions_ranks_behind():
    """A checkpoint whose makers claim max_model_len goes before one that rope_scaling stretches to it."""
    found = compared(
        ("max_model_len: 16384", "max_model_len: 200000"),
        ("  endpoint:", f"  {STRETCH}\n  endpoint:"),
        w4a16={**CONFIGS["w4a16"], "max_position_embeddings": 262144, "rope_scaling": None},
    )
    assert found.comparison.rows[0].name == "w4a16"
    assert found.comparison.rows[0].max_model_len == 200000
    assert "beyond the positions" in found.comparison.rows[1].reason
