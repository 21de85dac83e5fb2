"""Do limits follow the aim, the expected request and the promises, and does the plan say why?"""

from __future__ import annotations

import json

import pytest

from rayserve.errors import DoesNotFitError, SpecError
from rayserve.planner.catalogue import gpus
from rayserve.planner.render import plan_text
from rayserve.planner.views.terminal import table
from tests.bad_specs import CASES, CONFIG, ROOT
from tests.plans import merged, planned
from tests.unit.test_planner_traffic import HYBRID
from tests.yaml_text import load_yaml

BASE = load_yaml(CASES.read_text())["base"]
MODEL = json.loads(CONFIG.read_text())
CONFIGS = ROOT / "tests" / "golden" / "configs"
SMALL = json.loads((CONFIGS / "llama-8b.json").read_text())
EXPERTS = json.loads((CONFIGS / "qwen3-235b-fp8.json").read_text())
AUTO = {"max_model_len: 16384": "max_model_len: auto"}


def plan(add: str = "", model=None, **swaps: str):
    """The plan of the base spec with changes: sections added, values replaced."""
    text = merged(BASE + add)
    for old, new in swaps.items():
        assert old in text
        text = text.replace(old, new)
    return planned(text, model or MODEL)


def argument(made, name: str):
    """An engine argument with its reason."""
    return next(item for item in made.replica.engine_args if item.name == name)


def step(made, batch: int):
    """The row of a batch at the expected workload."""
    return next(row for row in made.latency.tpot if row.batch == batch)


# ── the table ───────────────────────────────────────────────────────────────────────────────────


def test_the_table_begins_with_the_expected_request():
    """Its prompt anew and cached first, then longer ones; batches up to max_num_seqs."""
    seqs = {"max_model_len: 16384": "max_model_len: 16384\n    max_num_seqs: 32"}
    made = plan("  workload: {prompt_tokens: 3000, output_tokens: 500}\n", **seqs)
    first = [(row.prompt_tokens, row.cached_tokens) for row in made.latency.ttft]
    assert first[:2] == [(3000, 0), (3000, 2992)]
    assert first[-1] == (16384 - 500, (16384 - 500 - 1) // 16 * 16)
    pairs = [(row.batch, row.context_tokens) for row in made.latency.tpot]
    assert pairs[:3] == [(1, 3250), (8, 3250), (32, 3250)]
    assert pairs[-1] == (32, 16384)
    assert made.memory.request_tokens == 3500


def test_rows_are_ranges_above_their_bound_and_sums_of_their_terms():
    """Bound <= low <= high, and the bounds and middles of the terms add up to the row's."""
    latency = plan().latency
    for row in (*latency.ttft, *latency.tpot):
        assert 0 < row.bound_ms <= row.low_ms < row.high_ms
        assert row.limited_by in {term.name for term in row.terms}
        assert sum(term.bound_ms for term in row.terms) == pytest.approx(row.bound_ms, abs=0.5)
        middles = sum(term.low_ms + term.high_ms for term in row.terms)
        assert middles == pytest.approx(row.low_ms + row.high_ms, abs=1)


def test_no_batch_is_larger_than_the_cache_holds():
    """At full length, where the cache holds fewer than max_num_seqs, the table says so many."""
    made = plan("  parallelism: {pipeline: 1}\n", **AUTO)
    full = argument(made, "max_model_len").value
    held = int(made.memory.max_concurrency)
    assert 8 < held < 32
    assert [row.batch for row in made.latency.tpot if row.context_tokens == full] == [1, 8, held]


def test_no_row_of_cached_prompts_without_a_cache():
    """Without prefix caching no prompt is cached."""
    made = plan("  scheduling: {prefix_caching: false}\n")
    assert {row.cached_tokens for row in made.latency.ttft} == {0}


def test_graphs_that_a_person_switched_off_are_not_counted():
    """Without graphs, or with attention outside of them, a token takes longer or as long."""
    modes = [
        plan(f"  engine_args: {{compilation_config: {{cudagraph_mode: {mode}}}}}\n", model=SMALL)
        for mode in ("FULL_AND_PIECEWISE", "PIECEWISE", "NONE")
    ]
    highs = [step(made, 1).high_ms for made in modes]
    assert highs == sorted(highs)
    assert highs[0] < highs[2]


def test_a_recurrent_model_reuses_whole_blocks_of_its_own():
    """A hybrid's block is larger than 16 tokens, so less of a cached prompt need not be read."""
    row = plan("  workload: {prompt_tokens: 4000}\n", model=HYBRID).latency.ttft[1]
    assert row.prompt_tokens == 4000
    assert 0 < row.cached_tokens < (4000 - 1) // 16 * 16


def test_latency_is_unknown_where_the_model_or_the_rates_are():
    """An unknown architecture and 32-bit compute have no latencies, and the old limits."""
    strange = plan(
        model={**MODEL, "architectures": ["ArceeForCausalLM"]},
        **{"  config: ": "  checkpoint_bytes: 210000000000\n    config: "},
    )
    wide = plan("  precision: {dtype: float32}\n", model=SMALL)
    for made in (strange, wide):
        assert made.latency is None
        assert argument(made, "max_num_seqs").value == 32
        assert "latency:" not in plan_text(made, "x")
    assert any(note.startswith("No latencies") for note in wide.notes)
    assert not any(note.startswith("No latencies") for note in plan().notes)


def test_a_latency_is_one_line_of_the_plan():
    """A row with its terms stands on one line of plan.yml, and reads back as it was."""
    made = plan()
    lines = [line for line in plan_text(made, "x").splitlines() if "bound_ms" in line]
    assert len(lines) == len(made.latency.ttft) + len(made.latency.tpot)


def test_the_terminal_shows_ranges_bounds_and_limits():
    """A screenful holds the expected request's first token and next tokens."""
    text = table(plan())
    row = next(line for line in text.splitlines() if line.startswith("  1,024 tokens"))
    assert "at 1,152" in row
    assert row.endswith("(32)")
    assert "(limited by compute)" in text


@pytest.mark.parametrize(
    "add, word",
    [
        ("  speculative: {method: ngram, num_tokens: 4}\n", "Not in these figures: speculative."),
        ("  engine_args: {enable_dbo: true}\n", "engine_args.enable_dbo"),
        ("  engine_args: {enable_expert_parallel: true}\n", "Expert parallelism"),
        ("  parallelism: {tensor: 8, pipeline: 2}\n", "different hosts"),
    ],
)
def test_what_no_term_follows_is_said(add, word):
    """Each feature that changes latencies without a term is named, and only where it is on."""
    assert any(word in note for note in plan(add).latency.notes)
    assert not any(word in note for note in plan().latency.notes)


# ── promises ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("key", ["ttft_ms", "tpot_ms"])
def test_a_promise_below_the_bound_is_refused_with_what_works(key):
    """No software is faster than the hardware; the value that the refusal names is accepted."""
    with pytest.raises(SpecError, match="peak") as refused:
        plan(f"  slo: {{{key}: 1}}\n")
    assert refused.value.where.key == f"rayserve_cluster.slo.{key}"
    value = refused.value.do.split(f"{key}: ")[1].split(",")[0]
    notes = plan(f"  slo: {{{key}: {value}}}\n").notes
    assert not any("one sequence alone" in note or "none of them" in note for note in notes)


def test_guesses_may_beat_the_bound():
    """With speculative decoding a step yields several tokens, so the bound is divided by them."""
    bound = step(plan(), 1).bound_ms
    slo = f"  slo: {{tpot_ms: {bound * 0.5:.1f}}}\n"
    with pytest.raises(SpecError):
        plan(slo)
    guess = "  speculative: {method: ngram, num_tokens: 4}\n"
    assert any("will be missed" in note for note in plan(slo + guess).notes)


@pytest.mark.parametrize(
    "share, word", [(-0.05, "will be missed"), (0.5, "may be missed"), (1.1, "")]
)
def test_a_promise_near_the_range_is_told(share, word):
    """Below, within and above the range of one sequence alone."""
    row = step(plan(), 1)
    promise = row.low_ms + share * (row.high_ms - row.low_ms)
    notes = [note for note in plan(f"  slo: {{tpot_ms: {promise:.2f}}}\n").notes if "alone" in note]
    assert [word in note for note in notes] == ([True] if word else [])


def test_a_promise_that_a_full_batch_breaks_is_told():
    """What one sequence alone keeps, all of a written max_num_seqs may not."""
    many = {"max_model_len: 16384": "max_model_len: 4096\n    max_num_seqs: 256"}
    made = plan("  slo: {tpot_ms: 40}\n", **many)
    assert any("with all 256 of max_num_seqs running" in note for note in made.notes)


def test_a_first_token_may_be_promised_for_cached_prompts():
    """A time that only a cached prompt keeps is a note with prefix caching, a refusal without."""
    row = plan().latency.ttft[0]
    slo = f"  slo: {{ttft_ms: {row.bound_ms / 2:.0f}}}\n"
    note = next(note for note in plan(slo).notes if "none of them cached, will be missed" in note)
    assert note.endswith("Only prompts that are in the prefix cache can keep it.")
    kept = f"  slo: {{ttft_ms: {row.bound_ms + 1:.0f}}}\n"
    assert not any("Only prompts" in note for note in plan(kept).notes)
    with pytest.raises(SpecError, match="ttft_ms"):
        plan(slo + "  scheduling: {prefix_caching: false}\n")


# ── how many, how much ──────────────────────────────────────────────────────────────────────────


def test_latency_takes_the_most_sequences_whose_tokens_are_fluent():
    """The next power of two would take more than 40 ms."""
    made = plan(model=SMALL, **{"gpus_per_host: 8": "gpus_per_host: 1"})
    seqs = argument(made, "max_num_seqs").value
    more = plan(
        model=SMALL,
        **{
            "gpus_per_host: 8": "gpus_per_host: 1",
            "max_model_len: 16384": f"max_model_len: 16384\n    max_num_seqs: {2 * seqs}",
        },
    )
    middles = [(row.low_ms + row.high_ms) / 2 for row in (step(made, seqs), step(more, 2 * seqs))]
    assert middles[0] <= 40 < middles[1]
    assert f"{middles[0]:.0f} ms" in argument(made, "max_num_seqs").reason


def test_a_promise_bounds_the_sequences():
    """A stricter time a token lets fewer sequences run, a looser one no more than is fluent."""
    seqs = [
        argument(plan(f"  slo: {{tpot_ms: {ms}}}\n"), "max_num_seqs").value for ms in (28, 60, 1000)
    ]
    assert seqs[0] < seqs[1] == seqs[2] == 32


@pytest.mark.parametrize("aim", ["latency", "throughput"])
def test_a_promise_that_none_keeps_does_not_leave_one(aim):
    """Where even one sequence alone will miss the promise, a few still run; the note says it."""
    made = plan(f"  aim: {aim}\n  slo: {{tpot_ms: 15}}\n")
    assert 1 < argument(made, "max_num_seqs").value < 32
    assert any("for one sequence alone will be missed" in note for note in made.notes)


def test_throughput_fills_the_cache_as_far_as_the_promise_allows():
    """vLLM's own limit or what the cache holds at the expected lengths; with a promise, fewer."""
    latency, free, bound = (
        plan(add, model=EXPERTS, **{"A100-80GB-SXM": "H200-141GB-SXM"})
        for add in ("", "  aim: throughput\n", "  aim: throughput\n  slo: {tpot_ms: 50}\n")
    )
    counts = [argument(made, "max_num_seqs").value for made in (latency, bound, free)]
    assert counts == sorted(counts)
    assert counts[0] < counts[2]
    assert counts[2] == gpus()["H200-141GB-SXM"].step_seqs or counts[2] == int(
        free.memory.expected_concurrency
    )
    assert "slo.tpot_ms is 50" in argument(bound, "max_num_seqs").reason


def test_no_more_sequences_than_the_cache_holds():
    """With long expected requests the cache decides, and says at which length."""
    work = "  workload: {prompt_tokens: 15000, output_tokens: 1000}\n"
    small = {"max_model_len: 16384": "max_model_len: 16384\n    gpu_memory_utilization: 0.4"}
    made = plan(f"  parallelism: {{pipeline: 1}}\n{work}", **small)
    seqs = argument(made, "max_num_seqs")
    assert seqs.value == max(1, int(made.memory.expected_concurrency)) < 32
    assert "16,000 tokens each" in seqs.reason


def test_a_long_pause_halves_the_step():
    """Where a step stalls answers for longer than a promised first token, it is halved; not for
    throughput, and never below 512.
    """
    slo = "  slo: {ttft_ms: 450}\n  workload: {prompt_tokens: 256, output_tokens: 256}\n"
    short = argument(plan(slo), "max_num_batched_tokens")
    assert short.value in (512, 1024)
    assert "halved" in short.reason
    assert argument(plan(slo + "  aim: throughput\n"), "max_num_batched_tokens").value == 2048
    assert argument(plan(), "max_num_batched_tokens").value == 2048
    assert "pause" in argument(plan(), "max_num_batched_tokens").reason


def test_a_length_stays_above_the_expected_request():
    """An auto max_model_len is not halved below the workload while that fits."""
    one = "  parallelism: {pipeline: 1}\n"
    work = "  workload: {prompt_tokens: 100000, output_tokens: 1000}\n"
    assert argument(plan(one, **AUTO), "max_model_len").value == 65536
    kept = argument(plan(one + work, **AUTO), "max_model_len")
    assert kept.value == 131072
    assert "101,000" in kept.reason or "own limit" in kept.reason


# ── what is said ────────────────────────────────────────────────────────────────────────────────


def test_a_shortened_context_is_said():
    """Where auto gives less than the model's length, a note says what one request could have."""
    notes = plan("  parallelism: {pipeline: 1}\n", **AUTO).notes
    assert any("65,536 of the model's 131,072" in note for note in notes)
    assert not any("of the model's" in note for note in plan().notes)


def test_idle_hosts_are_said_with_what_would_use_them():
    """One of two hosts idles: another replica, or more stages for a longer context."""
    note = next(note for note in plan(**AUTO).notes if "stay unused" in note)
    assert note.startswith("8 of 16 GPUs of pool gpu stay unused")
    assert "`replicas.max: 2`" in note
    assert "`parallelism.pipeline: 2` for max_model_len 131,072" in note
    busy = plan("  replicas: {max: 2}\n")
    assert not any("stay unused" in note for note in busy.notes)


def test_whole_experts_are_proposed_where_slices_leave_gpus_idle():
    """Eight slices of an expert are too narrow for FP8 blocks: the plan says so, and what else works."""
    one = {"hosts: 2": "hosts: 1"}
    sliced = plan(model=EXPERTS, **one)
    assert sliced.replica.placement.tensor_parallel_size == 4
    reason = next(one.reason for one in sliced.choices if one.name == "parallelism.tensor")
    assert "8 is none that leaves a rank blocks" in reason
    note = next(note for note in sliced.notes if "stay unused" in note)
    assert note.startswith("4 of 8 GPUs of pool gpu stay unused")
    assert "`engine_args: {enable_expert_parallel: true}`" in note
    assert "so allows tensor 8" in note
    whole = plan("  engine_args: {enable_expert_parallel: true}\n", model=EXPERTS, **one)
    assert whole.replica.placement.tensor_parallel_size == 8
    assert f"KV cache {whole.memory.kv_tokens:,} tokens" in note
    assert f"in place of {sliced.memory.kv_tokens:,} tokens" in note
    assert whole.memory.kv_tokens > sliced.memory.kv_tokens


def test_whole_experts_are_not_proposed_where_the_plan_would_refuse_them():
    """Three replicas of eight GPUs need three hosts: on two, no wider replica is told."""
    replicas = "  replicas: {max: 3}\n"
    made = plan(replicas, model=EXPERTS)
    note = next(note for note in made.notes if "stay unused" in note)
    assert note.startswith("4 of 16 GPUs of pool gpu stay unused")
    assert "enable_expert_parallel" not in note
    with pytest.raises(DoesNotFitError, match="3 gangs of 8 GPUs"):
        plan(replicas + "  engine_args: {enable_expert_parallel: true}\n", model=EXPERTS)


def test_no_more_replicas_are_proposed_than_a_host_has_memory_for():
    """Of four places for a replica, the host's memory holds the KV blocks of two."""
    swaps = {"hosts: 2": "hosts: 1", "gpus_per_host: 8": "gpus_per_host: 8\n    memory_gib: 256"}
    rest = "  parallelism: {tensor: 2}\n  kv_offload: {cpu_gib: 100}\n"
    made = plan(rest, model=SMALL, **swaps)
    note = next(note for note in made.notes if "stay unused" in note)
    assert "`replicas.max: 2`" in note
    assert plan(rest + "  replicas: {max: 2}\n", model=SMALL, **swaps)
    with pytest.raises(SpecError, match="of host memory"):
        plan(rest + "  replicas: {max: 3}\n", model=SMALL, **swaps)


def test_no_other_way_is_proposed_where_whole_experts_use_no_more():
    """A dense model on seven GPUs has none; the plan says what seven would have to divide."""
    made = plan(**{"gpus_per_host: 8": "gpus_per_host: 7"})
    assert not any("enable_expert_parallel" in note for note in made.notes)
    reason = next(one.reason for one in made.choices if one.name == "parallelism.tensor")
    assert "7 is none that divides the 128 attention heads" in reason


def test_every_choice_has_a_reason():
    """What auto chose beyond arguments stands in the plan, with figures; what a person wrote, not."""
    choices = {item.name: item for item in plan().choices}
    assert all(item.reason for item in choices.values())
    assert choices["parallelism.tensor"].value == 8
    assert "with 4 it would be" in choices["parallelism.tensor"].reason
    assert choices["kv_offload.cpu_gib"].value == 0
    assert "34 ms" in choices["engine_args.cpu_offload_gb"].reason
    written = plan("  parallelism: {tensor: 8, pipeline: 1}\n").choices
    assert not any(item.name.startswith("parallelism") for item in written)


def test_graphs_and_cache_type_say_their_price():
    """CUDA graphs name what a token would take longer without, the cache type why it is kept."""
    made = plan()
    assert "longer" in argument(made, "enforce_eager").reason
    assert "no fp8" in argument(made, "kv_cache_dtype").reason
    hopper = plan(**{"A100-80GB-SXM": "H100-80GB-SXM"})
    assert "twice as many" in argument(hopper, "kv_cache_dtype").reason


def test_estimates_are_no_part_of_the_revision():
    """A replica is what it was, whatever is expected of it."""
    made = plan()
    other = made.model_copy(update={"latency": None, "choices": []})
    assert other.replica.revision == made.revision
    aimed = plan("  workload: {prompt_tokens: 1025}\n")
    assert aimed.revision == made.revision
