"""Do measured figures meet their bars? Figures in, rows and verdicts out; no clock and no socket.

    vLLM's load generator -> round_figures -> rows (medians over rounds) -> judge(bars) -> table
    a census of processes before and after a soak                      -> judge_leaks

The load itself comes from vLLM's own generator (docs/adr/0030-load-generator.md). TTFT is the time
from sending a request to its first token, TPOT the mean time between the tokens after it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

Figure = Literal["tokens_per_s", "ttft_p50_ms", "tpot_p50_ms", "events_per_token"]


@dataclass(frozen=True, slots=True)
class Round:
    """One run of one stack at one concurrency."""

    stack: str
    concurrency: int
    tokens_per_s: float
    """Generated tokens over the wall time of the run."""
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    events_per_token: float
    """Content events over generated tokens; 1 where every token is sent on its own."""
    requests: int


@dataclass(frozen=True, slots=True)
class Row:
    """One stack at one concurrency: the medians of its rounds, each figure on its own."""

    stack: str
    concurrency: int
    tokens_per_s: float
    ttft_p50_ms: float
    tpot_p50_ms: float
    events_per_token: float
    rounds: int
    ttft_p99_ms: float
    tpot_p99_ms: float
    tokens_per_s_min: float
    """The slowest round: how far the machine's noise goes."""
    tokens_per_s_max: float


@dataclass(frozen=True, slots=True)
class Bar:
    """A limit for one figure of a stack, against another stack at the same concurrency."""

    name: str
    stack: str
    against: str
    concurrency: int
    figure: Figure
    kind: Literal["ratio", "added"]
    """ratio: the stack's figure over the other's; added: their difference, in the figure's unit."""
    limit: float
    side: Literal["at least", "at most"]
    stretch: bool = False
    """A goal beyond the bar: reported, never a failure."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was measured for one bar or one leak check."""

    name: str
    measured: float
    limit: float
    side: Literal["at least", "at most"]
    passed: bool
    stretch: bool = False

    def line(self) -> str:
        """One line for people."""
        word = "pass" if self.passed else ("not yet" if self.stretch else "FAIL")
        return f"{word:<8}{self.name}: {self.measured:.3f} ({self.side} {self.limit:g})"


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie, interpolated linearly.

    Raises:
        ValueError: there are no values, or the share is out of range.
    """
    if not values or not 0 <= share <= 1:
        raise ValueError(f"needs values and a share of 0 to 1, got {len(values)} and {share}")
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def round_figures(
    stack: str, concurrency: int, result: Mapping[str, Any], output_tokens: int
) -> Round:
    """Figures of one run from the result that vLLM's `benchmark()` returns (times in seconds).

    TPOT of a request is the sum of its gaps over (tokens - 1), as vLLM defines it.

    Raises:
        ValueError: a request failed, or gave another number of tokens than `output_tokens`.
    """
    errors = [error for error in result["errors"] if error]
    lengths: Sequence[int] = result["output_lens"]
    wrong = [length for length in lengths if length != output_tokens]
    if errors or wrong:
        found = errors[0].strip().splitlines()[-1] if errors else f"lengths {sorted(set(wrong))}"
        raise ValueError(
            f"{stack} at {concurrency}: every request must give {output_tokens} tokens; {found}"
        )
    gaps: Sequence[Sequence[float]] = result["itls"]
    tokens = sum(lengths)
    ttft_ms = [1000 * ttft for ttft in result["ttfts"]]
    tpot_ms = [1000 * sum(gap) / (output_tokens - 1) for gap in gaps]
    return Round(
        stack=stack,
        concurrency=concurrency,
        tokens_per_s=tokens / result["duration"],
        ttft_p50_ms=percentile(ttft_ms, 0.5),
        ttft_p99_ms=percentile(ttft_ms, 0.99),
        tpot_p50_ms=percentile(tpot_ms, 0.5),
        tpot_p99_ms=percentile(tpot_ms, 0.99),
        events_per_token=sum(len(gap) + 1 for gap in gaps) / tokens,
        requests=len(lengths),
    )


def rows(rounds: Iterable[Round]) -> list[Row]:
    """One row for each stack and concurrency, in the order in which they first appear."""
    groups: dict[tuple[str, int], list[Round]] = {}
    for one in rounds:
        groups.setdefault((one.stack, one.concurrency), []).append(one)
    return [_row(stack, concurrency, group) for (stack, concurrency), group in groups.items()]


def _row(stack: str, concurrency: int, group: Sequence[Round]) -> Row:
    speeds = [one.tokens_per_s for one in group]
    return Row(
        stack=stack,
        concurrency=concurrency,
        tokens_per_s=statistics.median(speeds),
        ttft_p50_ms=statistics.median(one.ttft_p50_ms for one in group),
        tpot_p50_ms=statistics.median(one.tpot_p50_ms for one in group),
        events_per_token=statistics.median(one.events_per_token for one in group),
        rounds=len(group),
        ttft_p99_ms=statistics.median(one.ttft_p99_ms for one in group),
        tpot_p99_ms=statistics.median(one.tpot_p99_ms for one in group),
        tokens_per_s_min=min(speeds),
        tokens_per_s_max=max(speeds),
    )


def _bars() -> tuple[Bar, ...]:
    out: list[Bar] = []
    for concurrency in (8, 32):
        against = ("rayserve", "vllm", concurrency)
        label = f"at {concurrency} against vLLM's own server"
        out += [
            Bar(f"tokens/s {label}", *against, "tokens_per_s", "ratio", 0.95, "at least"),
            Bar(f"TTFT p50 {label}", *against, "ttft_p50_ms", "ratio", 1.10, "at most"),
            Bar(f"TPOT p50 {label}", *against, "tpot_p50_ms", "ratio", 1.05, "at most"),
        ]
    alone = ("rayserve", "vllm", 1)
    out += [
        Bar("ms added to a token at 1", *alone, "tpot_p50_ms", "added", 0.5, "at most"),
        Bar("ms added to the first token at 1", *alone, "ttft_p50_ms", "added", 3.0, "at most"),
        Bar("ms added to a token at 1 (stretch)", *alone, "tpot_p50_ms", "added", 0.2, "at most",
            stretch=True),
        Bar("tokens/s at 32 against ray.serve.llm", "rayserve", "ray_serve_llm", 32,
            "tokens_per_s", "ratio", 1.3, "at least"),
    ]  # fmt: skip
    return tuple(out)


BARS = _bars()
"""What the serving path promises against vLLM's own server and against ray.serve.llm."""

START_BAR_COLD = 1.2
"""Most that a cold start through Serve may take, as a ratio to vLLM's own server."""

EVENTS_PER_TOKEN_MIN = 0.99
"""Below this, tokens are sent in batches. vLLM itself joins two tokens when a client falls behind."""


def judge(measured: Sequence[Row], bars: Sequence[Bar] = BARS) -> list[Verdict]:
    """Verdicts for the bars whose two rows were measured; a bar without its rows is left out."""
    found = {(row.stack, row.concurrency): row for row in measured}
    out = []
    for bar in bars:
        mine = found.get((bar.stack, bar.concurrency))
        other = found.get((bar.against, bar.concurrency))
        if mine is None or other is None:
            continue
        value, reference = _figure(mine, bar.figure), _figure(other, bar.figure)
        result = value / reference if bar.kind == "ratio" else value - reference
        out.append(verdict(bar.name, result, bar.limit, bar.side, stretch=bar.stretch))
    return out


def _figure(row: Row, figure: Figure) -> float:
    return cast("float", getattr(row, figure))


def verdict(
    name: str,
    measured: float,
    limit: float,
    side: Literal["at least", "at most"],
    *,
    stretch: bool = False,
) -> Verdict:
    """A measured value against its limit."""
    passed = measured >= limit if side == "at least" else measured <= limit
    return Verdict(name, measured, limit, side, passed, stretch)


def judge_start(cold_s: Mapping[str, Sequence[float]]) -> Verdict:
    """Median cold start of rayserve over that of vLLM's own server, both in seconds."""
    ratio = statistics.median(cold_s["rayserve"]) / statistics.median(cold_s["vllm"])
    return verdict("cold start against vLLM's own server", ratio, START_BAR_COLD, "at most")


def judge_batching(measured: Sequence[Row], stack: str) -> list[Verdict]:
    """Whether a stack sends every token on its own."""
    return [
        verdict(
            f"content events per token at {row.concurrency}",
            row.events_per_token,
            EVENTS_PER_TOKEN_MIN,
            "at least",
        )
        for row in measured
        if row.stack == stack
    ]


def table(measured: Sequence[Row]) -> str:
    """A plain table, one line a row, grouped by concurrency."""
    head = f"{'concurrency':>11} {'stack':<14} {'tokens/s':>9} {'TTFT p50':>9} {'TPOT p50':>9}"
    lines = [f"{head} {'events/token':>12} {'rounds':>6}"]
    lines += [
        f"{row.concurrency:>11} {row.stack:<14} {row.tokens_per_s:>9.0f} {row.ttft_p50_ms:>9.2f}"
        f" {row.tpot_p50_ms:>9.3f} {row.events_per_token:>12.3f} {row.rounds:>6}"
        for row in sorted(measured, key=lambda row: row.concurrency)
    ]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Census:
    """What a serving stack holds while idle."""

    processes: int
    open_files: int
    """Of all its processes: files, sockets and pipes."""
    rss_bytes: int
    """Resident memory of all its processes; shared pages count once for each."""
    kv_usage: float
    """Share of the KV cache that requests hold, 0 to 1."""
    running: int
    waiting: int


RSS_GROWTH_MAX = 0.05
OPEN_FILES_SLACK = 8
"""Idle keep-alive connections of the metrics scrape and of Ray's own heartbeats come and go."""


def judge_leaks(before: Census, after: Census) -> list[Verdict]:
    """Whether a stack holds no more after a soak than before it."""
    growth = after.rss_bytes / before.rss_bytes - 1
    files = float(after.open_files - before.open_files)
    return [
        verdict("processes added", after.processes - before.processes, 0, "at most"),
        verdict("open files added", files, OPEN_FILES_SLACK, "at most"),
        verdict("resident memory added, share", growth, RSS_GROWTH_MAX, "at most"),
        verdict("KV cache in use, share", after.kv_usage, 0, "at most"),
        verdict("requests running or waiting", after.running + after.waiting, 0, "at most"),
    ]


def split_events(buffer: bytes) -> tuple[list[bytes], bytes]:
    """The data of the complete server-sent events in a buffer, and what is left of it."""
    *whole, rest = buffer.replace(b"\r\n", b"\n").split(b"\n\n")
    data = []
    for event in whole:
        lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
        if lines:
            data.append(b"\n".join(lines))
    return data, rest


@dataclass(frozen=True, slots=True)
class Answer:
    """What a completions stream said, once it was read to its end."""

    text: str
    content_events: int
    finish_reason: str
    completion_tokens: int
    done: bool
    """The stream ended with `[DONE]`."""


def read_answer(events: Sequence[bytes]) -> Answer:
    """The answer in the events of one streamed completion, asked for with `include_usage`.

    Raises:
        ValueError: an event is not JSON, or is an error.
    """
    text, count, reason, tokens, done = "", 0, "", 0, False
    for event in events:
        if event == b"[DONE]":
            done = True
            continue
        data = json.loads(event)
        if "error" in data:
            raise ValueError(f"error event: {data['error']}")
        for choice in data.get("choices", ()):
            count += 1
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            reason = choice.get("finish_reason") or reason
        if data.get("usage"):
            tokens = data["usage"]["completion_tokens"]
    return Answer(text, count, reason, tokens, done)


def fault(answer: Answer, tokens: int) -> str:
    """What is wrong with an undisturbed answer of exactly `tokens` tokens; empty when nothing is."""
    if not answer.done:
        return "the stream ended without [DONE]"
    if answer.finish_reason != "length":
        return f"finish_reason {answer.finish_reason!r} instead of 'length'"
    if answer.completion_tokens != tokens:
        return f"{answer.completion_tokens} tokens instead of {tokens}"
    if not answer.text:
        return "no text"
    return ""


def as_json(items: Iterable[Row | Round | Verdict | Census]) -> list[dict[str, Any]]:
    """Plain data for the result files."""
    return [asdict(item) for item in items]
