"""Are the figures, medians and verdicts of the benchmarks right?"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve.bench import (
    Bar,
    Census,
    Round,
    fault,
    judge,
    judge_batching,
    judge_leaks,
    judge_start,
    percentile,
    read_answer,
    round_figures,
    rows,
    split_events,
    table,
)


def a_round(stack="vllm", concurrency=8, tokens_per_s=1000.0, **changes):
    """A round with plain figures, except for `changes`."""
    figures = {
        "ttft_p50_ms": 40.0,
        "ttft_p99_ms": 60.0,
        "tpot_p50_ms": 7.0,
        "tpot_p99_ms": 9.0,
        "events_per_token": 1.0,
        "requests": 16,
    } | changes
    return Round(stack=stack, concurrency=concurrency, tokens_per_s=tokens_per_s, **figures)


def a_result(**changes):
    """What vLLM's generator returns for two requests of four tokens."""
    return {
        "duration": 2.0,
        "errors": ["", ""],
        "output_lens": [4, 4],
        "ttfts": [0.010, 0.030],
        "itls": [[0.001, 0.002, 0.003], [0.003, 0.003, 0.003]],
    } | changes


def test_figures_of_a_run():
    """Throughput, TTFT and TPOT follow vLLM's definitions, in ms and tokens/s."""
    one = round_figures("vllm", 2, a_result(), output_tokens=4)
    assert one.tokens_per_s == 4.0
    assert one.ttft_p50_ms == pytest.approx(20.0)
    assert one.tpot_p50_ms == pytest.approx(2.5)
    assert one.events_per_token == 1.0
    assert one.requests == 2


def test_batched_tokens_keep_their_tpot_and_show_in_events_per_token():
    """Two tokens in one event halve the events, not the time per token."""
    one = round_figures("x", 1, a_result(itls=[[0.006], [0.009]]), output_tokens=4)
    assert one.events_per_token == 0.5
    assert one.tpot_p50_ms == pytest.approx(2.5)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"errors": ["", "Traceback\nClientError: gone"]}, "ClientError: gone"),
        ({"output_lens": [4, 3]}, r"lengths \[3\]"),
    ],
)
def test_a_failed_request_is_no_figure(changes, message):
    """A run with a failed or short request is refused, so it can never look fast."""
    with pytest.raises(ValueError, match=message):
        round_figures("vllm", 2, a_result(**changes), output_tokens=4)


def test_rows_are_medians_over_rounds():
    """Each figure's median is taken over the rounds of one stack and concurrency."""
    speeds = [900.0, 1100.0, 1000.0]
    measured = rows([a_round(tokens_per_s=s) for s in speeds] + [a_round("rayserve")])
    assert [(row.stack, row.tokens_per_s, row.rounds) for row in measured] == [
        ("vllm", 1000.0, 3),
        ("rayserve", 1000.0, 1),
    ]
    assert (measured[0].tokens_per_s_min, measured[0].tokens_per_s_max) == (900.0, 1100.0)


def test_judge_compares_at_the_same_concurrency():
    """A ratio bar fails just below its limit and passes just above."""
    base = a_round()
    for speed, passed in ((949.0, False), (951.0, True)):
        measured = rows([base, a_round("rayserve", tokens_per_s=speed)])
        verdicts = {v.name: v for v in judge(measured)}
        assert verdicts["tokens/s at 8 against vLLM's own server"].passed is passed
    assert not any("at 32" in name for name in verdicts)


def test_judge_measures_added_time_as_a_difference():
    """At concurrency 1 the bar is in ms, and the stretch goal is no failure."""
    measured = rows(
        [a_round(concurrency=1, tpot_p50_ms=4.0), a_round("rayserve", 1, tpot_p50_ms=4.4)]
    )
    verdicts = {v.name: v for v in judge(measured)}
    assert verdicts["ms added to a token at 1"].passed
    stretch = verdicts["ms added to a token at 1 (stretch)"]
    assert (stretch.passed, stretch.stretch) == (False, True)
    assert stretch.line().startswith("not yet")


def test_an_own_bar_names_its_figure():
    """A bar given by the caller is judged on the figure that it names."""
    bar = Bar("p", "a", "b", 8, "ttft_p50_ms", "ratio", 2.0, "at most")
    measured = rows([a_round("a", ttft_p50_ms=90.0), a_round("b", ttft_p50_ms=40.0)])
    (only,) = judge(measured, [bar])
    assert (only.measured, only.passed) == (2.25, False)
    assert only.line().startswith("FAIL")


def test_cold_start_is_a_ratio_of_medians():
    """One slow start does not decide; the median does."""
    slow = judge_start({"rayserve": [50.0, 90.0, 48.0], "vllm": [40.0, 40.0, 41.0]})
    assert (slow.measured, slow.passed) == (1.25, False)


def test_batching_is_seen():
    """A stack that sends fewer events than tokens fails, at each concurrency of its own."""
    measured = rows([a_round("rayserve", events_per_token=0.2), a_round(events_per_token=0.2)])
    assert [v.passed for v in judge_batching(measured, "rayserve")] == [False]


def test_table_has_a_line_for_each_row():
    """The table is sorted by concurrency and shows every stack."""
    lines = table(rows([a_round(concurrency=32), a_round("rayserve", 1)])).splitlines()
    assert len(lines) == 3
    assert "rayserve" in lines[1]
    assert "vllm" in lines[2]


CLEAN = Census(
    processes=20, open_files=900, rss_bytes=4_000_000_000, kv_usage=0.0, running=0, waiting=0
)


@pytest.mark.parametrize(
    "changes, failing",
    [
        ({}, None),
        ({"rss_bytes": 4_190_000_000}, None),
        ({"rss_bytes": 4_210_000_000}, "resident memory added, share"),
        ({"processes": 21}, "processes added"),
        ({"open_files": 950}, "open files added"),
        ({"kv_usage": 0.01}, "KV cache in use, share"),
        ({"waiting": 1}, "requests running or waiting"),
    ],
)
def test_leaks(changes, failing):
    """Each kind of leak fails its own check and no other."""
    after = Census(**{name: getattr(CLEAN, name) for name in CLEAN.__dataclass_fields__} | changes)
    failed = [v.name for v in judge_leaks(CLEAN, after) if not v.passed]
    assert failed == ([failing] if failing else [])


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_percentile_stays_within_the_values(values, share):
    """A percentile is never outside of the values."""
    assert min(values) <= percentile(values, share) <= max(values)


def test_percentile_refuses_nothing():
    """No values have no percentile."""
    with pytest.raises(ValueError, match="needs values"):
        percentile([], 0.5)


STREAM = (
    b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'
    b": ping\n\n"
    b'data: {"choices":[{"text":"b","finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\n'
    b"data: [DONE]\n\n"
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_a_stream_reads_the_same_however_it_is_cut(cuts):
    """Network reads may end anywhere, also inside an event."""
    edges = [0, *sorted(cuts), len(STREAM)]
    events, rest = [], b""
    for start, stop in itertools.pairwise(edges):
        found, rest = split_events(rest + STREAM[start:stop])
        events += found
    assert rest == b""
    answer = read_answer(events)
    assert (answer.text, answer.content_events, answer.completion_tokens) == ("ab", 2, 2)
    assert fault(answer, tokens=2) == ""


@pytest.mark.parametrize(
    "old, new, message",
    [
        (b"data: [DONE]\n\n", b"", "without [DONE]"),
        (b'"length"', b'"abort"', "'abort'"),
        (b'"completion_tokens":2', b'"completion_tokens":1', "1 tokens"),
    ],
)
def test_faults_of_an_answer(old, new, message):
    """A cut, aborted or short answer is named as such."""
    events, _ = split_events(STREAM.replace(old, new))
    assert message in fault(read_answer(events), tokens=2)


def test_an_error_event_is_no_answer():
    """An error inside a stream is raised, not counted."""
    with pytest.raises(ValueError, match="boom"):
        read_answer([b'{"error":{"message":"boom"}}'])
