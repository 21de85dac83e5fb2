"""Are checkpoints of one model compared fairly, ranked by what was declared, and picked the same always?"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from rayserve import cli, inventory, planning
from rayserve.errors import DoesNotFitError, SpecError, Where
from rayserve.plan import parse_plan
from rayserve.planner import build_plan
from rayserve.planner.candidates import (
    CandidateRow,
    Checkpoint,
    Comparison,
    best,
    compare,
    comparison_text,
)
from rayserve.planner.candidates.quality import published, quality_of, worst_published
from rayserve.planner.candidates.rank import Standing, ranked
from rayserve.planner.candidates.traits import traits_of
from rayserve.planner.support.precision import table
from rayserve.planner.support.schemes import Scheme, schemes_of
from rayserve.planner.weights.architecture import read_architecture
from rayserve.spec import ClusterSpec, parse_spec
from tests.bad_specs import ROOT
from tests.yaml_text import load_yaml

CASE = ROOT / "tests" / "cases" / "candidates"
TEXT = (CASE / "cluster.yml").read_text()
CONFIGS = {path.stem: json.loads(path.read_text()) for path in (CASE / "configs").glob("*.json")}
SHA = "0" * 64
HERE = Where("config.json")
STRETCH = "rope_scaling: {rope_type: yarn, factor: 2, original_max_position_embeddings: 131072}"


def spec_of(*changes: tuple[str, str]) -> ClusterSpec:
    """The spec of the 405B case, with texts replaced."""
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return parse_spec(text, "cluster.yml")


def checkpoints(spec: ClusterSpec, **configs) -> list[Checkpoint]:
    """The candidates of a spec with the case's config files; `configs` takes their place by name."""
    found = []
    for index, one in enumerate(spec.model.candidates):
        config = {**CONFIGS, **configs}.get(one.name)
        found.append(Checkpoint(one.name, spec.serving(index), config))
    return found


def compared(*changes: tuple[str, str], **configs):
    """The comparison of the 405B case, with changes."""
    if not configs:
        return _compared(changes)
    return compare(checkpoints(spec_of(*changes), **configs), SHA)


@functools.cache
def _compared(changes: tuple[tuple[str, str], ...]):
    return compare(checkpoints(spec_of(*changes)), SHA)


def row(found, name: str):
    """One row by name."""
    return next(one for one in found.comparison.rows if one.name == name)


# ── the 405B case ─────────────────────────────────────────────────────────────────────────────────
def test_sixteen_bits_do_not_fit_and_the_row_says_by_how_much():
    """405B in bf16 on eight A100-80GB is a row with its weights and the reason, not an error."""
    bf16 = row(compared(), "bf16")
    assert bf16.rank == 0
    assert bf16.verdict.startswith("does not fit")
    assert bf16.weights_bytes / 2**30 == pytest.approx(94.5, abs=0.1)
    assert bf16.refusal is not None
    assert bf16.refusal.error == "DoesNotFitError"
    assert bf16.refusal.where.startswith("cluster.yml:9")


def test_fp8_runs_as_weights_alone_on_an_a100():
    """The A100 has no FP8 units, and the row says what runs instead; on an H100 nothing does."""
    assert "Marlin" in row(compared(), "fp8").runs_as
    assert row(compared(("A100-80GB-SXM", "H100-80GB-SXM")), "fp8").runs_as == ""


def test_each_row_has_the_figures_of_its_own_plan():
    """A row is what `rayserve plan` says of that checkpoint: there is no second sum."""
    found = compared()
    for name, plan in found.plans.items():
        one = row(found, name)
        index = [candidate.name for candidate in spec_of().model.candidates].index(name)
        assert plan == build_plan(spec_of().serving(index), CONFIGS[name], SHA)
        assert plan.memory is not None
        assert one.weights_bytes == plan.memory.weights_bytes
        assert one.kv_tokens == plan.memory.kv_tokens
        assert one.max_concurrency == plan.memory.max_concurrency


def test_the_smallest_weights_leave_the_most_cache():
    """4-bit weights take about a quarter of the bytes and hold about twice the tokens of 8 bits."""
    found = compared()
    small, large = row(found, "w4a16"), row(found, "w8a8")
    assert 1.8 < large.weights_bytes / small.weights_bytes < 2
    assert small.kv_tokens > 1.9 * large.kv_tokens


def test_four_bits_decode_fastest_on_an_a100():
    """On A100 the weights bound a token: 4 bits first, INT8 before FP8, which prefills no faster."""
    found = compared()
    assert [one.name for one in found.comparison.rows] == ["w4a16", "w8a8", "fp8", "bf16"]
    w4a16, w8a8, fp8 = (row(found, name) for name in ("w4a16", "w8a8", "fp8"))
    assert w4a16.tpot is not None
    assert w8a8.tpot is not None
    assert fp8.tpot is not None
    assert w8a8.ttft is not None
    assert fp8.ttft is not None
    assert w4a16.tpot.high_ms < w8a8.tpot.low_ms < fp8.tpot.low_ms
    assert w8a8.ttft.high_ms < fp8.ttft.low_ms


def test_the_cost_that_ranks_follows_from_the_row():
    """Figure and surcharge of a row give its cost: nothing else ranks candidates that are alike else."""
    for one in compared().comparison.rows:
        if not one.rank:
            continue
        assert one.ttft is not None
        assert one.tpot is not None
        assert one.quality is not None
        middle = [(part.low_ms + part.high_ms) / 2 for part in (one.ttft, one.tpot)]
        assert one.figure_ms == pytest.approx(middle[0] + 256 * middle[1], rel=1e-4)
        lost = (100 - one.quality.recovery_percent) / 100
        assert one.cost_ms == pytest.approx(one.figure_ms * (1 + 10 * lost), rel=1e-4)


def test_throughput_asks_for_tokens_of_all_requests():
    """With that aim the figure is tokens a second of as many requests as run at once."""
    found = compared(("  slo:", "  aim: throughput\n  slo:"))
    best = found.comparison.rows[0]
    assert best.tpot is not None
    assert best.tpot.batch > 1
    assert "tokens/s" in best.figure
    assert "x as many as" in found.comparison.rows[1].reason


def test_a_promise_that_one_format_cannot_keep_ranks_or_refuses_it():
    """A TPOT between those of 4 and 8 bits is met by 4 bits alone."""
    found = compared(("tpot_ms: 60", "tpot_ms: 34"))
    assert row(found, "w4a16").slo in ("met", "may be missed")
    assert found.comparison.rows[0].name == "w4a16"
    assert all(one.slo == "missed" or not one.rank for one in found.comparison.rows[1:])


def test_the_best_is_named_with_the_reason():
    """The choice is the first row, and says why it is the one and not the others."""
    found = compared()
    choice = best(found)
    first = found.comparison.rows[0]
    assert first.served
    assert [one.served for one in found.comparison.rows[1:]] == [False] * 3
    assert (choice.name, choice.value) == ("checkpoint", first.name)
    assert all(other.name in choice.reason for other in found.comparison.rows[1:])


def test_what_is_given_is_served_and_compared_beside_the_candidates():
    """With `model.path` the plan serves that, whatever ranks above it."""
    spec = spec_of(
        ("    served_name: chat\n", "    served_name: chat\n    path: /m\n    config: w8a8.json\n")
    )
    served = Checkpoint("model", spec, CONFIGS["w8a8"])
    found = compare([served, *checkpoints(spec)], SHA)
    assert len(found.comparison.rows) == 5
    assert [one.name for one in found.comparison.rows if one.served] == ["model"]


def test_order_of_the_file_does_not_matter():
    """Candidates in any order give the same ranks and the same pick."""
    spec = spec_of()
    wanted = [one.name for one in compare(checkpoints(spec), SHA).comparison.rows]
    shuffled = checkpoints(spec)
    random.Random(1).shuffle(shuffled)
    assert [one.name for one in compare(shuffled, SHA).comparison.rows] == wanted


def test_comparing_twice_gives_the_same():
    """The comparison is a pure function of its input."""
    assert compared().comparison == compared().comparison


# ── candidates that fail ──────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "config, piece",
    [
        (None, "the model's config.json"),
        ({}, "an architecture"),
        ({**CONFIGS["fp8"], "num_hidden_layers": "many"}, "`num_hidden_layers`"),
        ({**CONFIGS["fp8"], "quantization_config": {"quant_method": "bitsandbytes"}}, ""),
        ({**CONFIGS["fp8"], "hidden_size": -1}, "`hidden_size`"),
    ],
)
def test_a_broken_candidate_is_a_row_and_the_others_stand(config, piece):
    """What is wrong with one config.json is told in its row, with the line of its candidate."""
    found = compared(fp8=config)
    broken = row(found, "fp8")
    assert broken.rank == 0
    assert broken.verdict.startswith("refused")
    assert broken.refusal is not None
    assert piece in broken.refusal.needed
    assert "candidates[1]" in broken.refusal.where or "precision" in broken.refusal.where
    assert [one.name for one in found.comparison.rows if one.rank] != []
    assert comparison_text(found.comparison)


def test_a_config_that_cannot_be_read_is_a_row():
    """An error that came up while reading takes the place of a plan."""
    spec = spec_of()
    broken = Checkpoint(
        "fp8", spec.serving(1), None, {}, {}, SpecError("JSON", found="[", do="copy it")
    )
    found = compare([broken, checkpoints(spec)[3]], SHA)
    assert row(found, "fp8").verdict == "refused: JSON; found ["
    assert row(found, "fp8").format == ""
    assert row(found, "w4a16").rank == 1


def test_where_none_fits_the_error_names_each():
    """Nothing to serve is an error with every candidate's reason and advice that helps."""
    found = compared(("gpus_per_host: 8", "gpus_per_host: 1"))
    assert all(one.rank == 0 for one in found.comparison.rows)
    with pytest.raises(DoesNotFitError) as caught:
        best(found)
    assert caught.value.exit_code == 3
    assert caught.value.do
    for name in CONFIGS:
        assert name in caught.value.found


@pytest.mark.parametrize(
    "change, piece",
    [
        (("A100-80GB-SXM", "A100-80"), "a GPU model of the catalogue"),
        (("max_model_len: 16384", "max_model_len: 262144"), "at most 131072"),
        (("  slo:", "  precision: {kv_cache_dtype: magic}\n  slo:"), "`precision.kv_cache_dtype`"),
    ],
)
def test_a_mistake_outside_of_the_candidates_is_told_as_it_is(change, piece):
    """Where every candidate fails for one reason in the spec, that is the error, not a table of it."""
    with pytest.raises(SpecError) as caught:
        compared(change, fp8=None)
    assert piece in caught.value.message()


# ── rank ──────────────────────────────────────────────────────────────────────────────────────────
BEST = Standing(
    name="a",
    sure=True,
    short=False,
    slo="met",
    stretched=False,
    figure=1000.0,
    figure_text="an answer takes 0.9 to 1.1 s",
    throughput=False,
    recovery_percent=99.0,
    quality_known=True,
    accuracy_weight=10,
    expected_concurrency=10,
    weights_bytes=100,
    kv_bytes_per_token=10,
    order=0,
)


@pytest.mark.parametrize(
    "worse, reason",
    [
        ({"sure": False, "figure": 1.0}, "proven to fit"),
        ({"short": True, "figure": 1.0}, "too short for the expected request"),
        ({"slo": "missed", "figure": 1.0}, "misses the SLO"),
        ({"slo": "may be missed", "figure": 1.0}, "may miss the SLO"),
        ({"stretched": True, "figure": 1.0}, "beyond the positions"),
        ({"figure": 1500.0}, "1.50x as long as with a"),
        ({"figure": 950.0, "recovery_percent": 98.0}, "2 % of lost accuracy count for 20.0 % more"),
        ({"figure": 1200.0, "recovery_percent": 100.0}, "better accuracy counts for 10.0 % only"),
        ({"figure": math.inf}, "its speed is not known"),
        ({"expected_concurrency": 5}, "holds fewer requests"),
        ({"weights_bytes": 101}, "weights take more memory"),
        ({"kv_bytes_per_token": 11}, "keeps more of each token"),
        ({}, "later in the file"),
    ],
)
def test_each_question_decides_in_its_turn(worse, reason):
    """What is worse by one question stands behind, however good it is by later ones, and says why."""
    other = replace(BEST, name="b", order=1, **worse)
    (first, _), (second, why) = ranked([other, BEST])
    assert (first.name, second.name) == ("a", "b")
    assert reason in why


@pytest.mark.parametrize("weight, first", [(0, "fast"), (10, "fast"), (50, "exact")])
def test_the_declared_weight_trades_speed_for_accuracy(weight, first):
    """A checkpoint 30 % faster with 1.5 % less accuracy wins at weight 10, and loses at 50."""
    fast = replace(BEST, name="fast", figure=770.0, recovery_percent=98.5, accuracy_weight=weight)
    exact = replace(BEST, name="exact", recovery_percent=100.0, accuracy_weight=weight, order=1)
    assert ranked([exact, fast])[0][0].name == first


def test_without_known_speeds_accuracy_decides():
    """Where no speed is known, the more accurate goes first, unless accuracy weighs nothing."""
    low = replace(BEST, name="low", figure=math.inf, expected_concurrency=20)
    high = replace(BEST, name="high", figure=math.inf, recovery_percent=99.5, order=1)
    assert ranked([low, high])[0][0].name == "high"
    unweighted = [replace(one, accuracy_weight=0) for one in (low, high)]
    assert ranked(unweighted)[0][0].name == "low"


def test_no_two_checkpoints_are_equal():
    """The order of any shuffled set is the same: the key is total."""
    picked = random.Random(2)
    standings = [
        replace(
            BEST,
            name=str(order),
            order=order,
            figure=picked.choice([100.0, 200.0, math.inf]),
            slo=picked.choice(["met", "missed", "not known"]),
            recovery_percent=picked.choice([98.0, 99.0]),
        )
        for order in range(40)
    ]
    wanted = [one.name for one, _ in ranked(standings)]
    for _ in range(5):
        picked.shuffle(standings)
        assert [one.name for one, _ in ranked(standings)] == wanted


def test_a_context_too_short_for_the_expected_request_is_no_advantage():
    """A checkpoint with too few positions ranks behind, though its answers are those of short prompts."""
    found = compared(
        ("    max_model_len: 16384", "    max_model_len: auto"),
        w4a16={**CONFIGS["w4a16"], "max_position_embeddings": 1024},
    )
    last = next(one for one in reversed(found.comparison.rows) if one.rank)
    assert (last.name, last.max_model_len) == ("w4a16", 1024)
    assert "too short" in last.reason
    assert found.comparison.rows[0].name == "w8a8"


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
        w4a16={**CONFIGS["w4a16"], "max_position_embeddings": 262144},
    )
    assert found.comparison.rows[0].name == "w4a16"
    assert found.comparison.rows[0].max_model_len == 200000
    assert "beyond the positions" in found.comparison.rows[1].reason


# ── on the command line ───────────────────────────────────────────────────────────────────────────
@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the case."""
    shutil.copytree(CASE, tmp_path / "case")
    return tmp_path / "case"


def run(*words: str | Path):
    """The command with these words."""
    return CliRunner().invoke(cli.main, [str(word) for word in words])


def test_the_command_prints_the_table_and_writes_nothing(folder):
    """`rayserve plan --candidates` shows every candidate, reasons and sources, and leaves no file."""
    result = run("plan", "--candidates", folder)
    assert result.exit_code == 0
    for name in CONFIGS:
        assert name in result.output
    assert "arXiv 2411.02355" in result.output
    assert sorted(path.name for path in folder.iterdir()) == ["cluster.yml", "configs"]


def test_the_page_shows_what_the_command_prints(monkeypatch):
    """docs/candidates.md has the real output; UPDATE_GOLDEN=1 writes it anew."""
    page = ROOT / "docs" / "candidates.md"
    head, _, rest = page.read_text().partition("```\n")
    _, _, tail = rest.partition("```\n")
    monkeypatch.chdir(ROOT)
    text = f"{head}```\n{run('plan', '--candidates', 'tests/cases/candidates').output}```\n{tail}"
    if os.environ.get("UPDATE_GOLDEN"):
        page.write_text(text)
    assert page.read_text() == text


def test_the_page_names_every_key_of_a_row():
    """docs/candidates.md describes the JSON in full."""
    text = (ROOT / "docs" / "candidates.md").read_text()
    for model in (CandidateRow, Comparison):
        assert [name for name in model.model_fields if f"`{name}`" not in text] == []


def test_the_command_gives_the_same_as_json(folder):
    """`--json` is one object without nulls, the rows best first."""
    result = run("plan", "--candidates", "--json", folder)
    data = json.loads(result.output)
    assert [one["rank"] for one in data["rows"]] == [1, 2, 3, 0]
    assert data["rows"][-1]["refusal"]["error"] == "DoesNotFitError"
    assert "null" not in result.output


def test_planning_without_a_checkpoint_serves_the_best(folder):
    """`rayserve plan` picks, writes the plan of the pick, and its digest is that of the pick's config."""
    result = run("plan", folder)
    assert result.exit_code == 0, result.output
    plan = parse_plan(load_yaml((folder / "plan.yml").read_text()), "plan.yml")
    first = planning.compare_candidates(inventory.locate(str(folder), None)).rows[0]
    assert plan.replica.model == first.checkpoint
    assert [item.name for item in plan.replica.content] == [f"{first.checkpoint}/config.json"]
    assert plan.choices[0].value == first.name
    assert run("plan", "--check", folder).exit_code == 0


def test_two_revisions_of_one_model_keep_their_own_digests(folder):
    """Candidates that share an id differ by their config.json, and the plan has that of the pick."""
    spec = folder / "cluster.yml"
    lines = [
        line for line in spec.read_text().splitlines() if "- {name: " not in line or "gpu" in line
    ]
    at = next(index for index, line in enumerate(lines) if "candidates:" in line) + 1
    for name, revision in (("w4a16", "aaa"), ("fp8", "bbb")):
        lines.insert(
            at,
            f"      - {{name: {name}, hf_id: some/model, revision: {revision}, "
            f"config: configs/{name}.json}}",
        )
    spec.write_text("\n".join(lines) + "\n")
    assert run("plan", folder).exit_code == 0
    plan = parse_plan(load_yaml((folder / "plan.yml").read_text()), "plan.yml")
    assert plan.choices[0].value == "w4a16"
    picked = (folder / "configs" / "w4a16.json").read_bytes()
    assert [item.value for item in plan.replica.content] == [hashlib.sha256(picked).hexdigest()]
    assert plan.replica.engine_arguments()["revision"] == "aaa"


def test_where_nothing_fits_the_table_stands_and_the_exit_code_is_3(folder):
    """All candidates failing ends with 3, with the table; planning too, with the reasons."""
    spec = folder / "cluster.yml"
    spec.write_text(spec.read_text().replace("gpus_per_host: 8", "gpus_per_host: 1"))
    result = run("plan", "--candidates", folder)
    assert result.exit_code == 3
    assert result.output.count("does not fit") >= 4
    planned = run("plan", folder)
    assert planned.exit_code == 3
    assert not (folder / "plan.yml").exists()


def test_a_broken_file_is_told_in_its_row(folder):
    """Truncated JSON and a missing file are rows; the pick is made among the rest."""
    (folder / "configs" / "fp8.json").write_text('{"architectures": [')
    (folder / "configs" / "w8a8.json").unlink()
    result = run("plan", "--candidates", folder)
    assert result.exit_code == 0
    assert "fp8    refused: JSON; found" in result.output
    assert "no file at configs/w8a8.json" in result.output
    assert run("plan", folder).exit_code == 0


def test_without_candidates_there_is_nothing_to_compare(folder):
    """`--candidates` on a spec without any says which key to add; with --check it is a usage error."""
    result = run("plan", "--candidates", ROOT / "inventories" / "example")
    assert result.exit_code == 2
    assert "model.candidates" in result.output
    assert run("plan", "--candidates", "--check", folder).exit_code == 2


def test_comparing_four_checkpoints_imports_nothing_heavy():
    """No engine is imported to rank checkpoints."""
    code = (
        "import sys\n"
        "from rayserve.cli import main\n"
        f"main(['plan', '--candidates', {str(CASE)!r}], standalone_mode=False)\n"
        "print([name for name in ('ray', 'torch', 'transformers', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[]"
