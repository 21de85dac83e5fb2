"""Are checkpoints of one model compared fairly, ranked by what was declared, and picked the same always?"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from rayserve.errors import DoesNotFitError, SpecError
from rayserve.planner import build_plan
from rayserve.planner.candidates import (
    Checkpoint,
    best,
    compare,
    comparison_text,
)
from rayserve.planner.candidates.rank import Standing, ranked
from tests.unit.compared import CONFIGS, SHA, checkpoints, compared, row, spec_of


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
