"""What does the planner expect of memory and latency, and within which range?

None of it defines a replica: an estimate that changes restarts nothing.
"""

from __future__ import annotations

from typing import Literal

from rayserve.plan.record import Record


class MemoryTerm(Record):
    """One part of a GPU's memory, in bytes; low and high are equal where it is exact."""

    name: str
    low_bytes: int
    expected_bytes: int
    high_bytes: int
    basis: str = ""
    """What the figure rests on."""


class MemoryEstimate(Record):
    """GPU memory of the rank with the smallest cache, in bytes.

    `exact`: weights and cache layout follow vLLM's own rules, and the uncertain terms carry a range.
    `simple`: the architecture is not known, and the terms are bounds and allowances.
    """

    model: Literal["simple", "exact"]
    total_bytes: int
    requested_bytes: int
    weights_bytes: int
    activation_bytes: int
    overhead_bytes: int
    """NCCL, buffers and CUDA graphs."""
    lora_bytes: int = 0
    """Slots for the LoRA adapters."""
    draft_bytes: int = 0
    """Weights of the draft model; its KV cache is part of kv_bytes_per_token."""
    kv_bytes: int
    kv_low_bytes: int = 0
    kv_high_bytes: int = 0
    kv_bytes_per_token: int
    """Of one more token in all layers that keep the whole context."""
    kv_tokens: int
    """As vLLM prints it: max_concurrency x max_model_len."""
    max_concurrency: float
    """Sequences of full length at once."""
    max_concurrency_low: float = 0
    max_concurrency_high: float = 0
    request_tokens: int = 0
    """Expected length of a request: the workload's prompt and answer."""
    expected_concurrency: float = 0
    """Sequences of `request_tokens` at once."""
    expected_concurrency_low: float = 0
    expected_concurrency_high: float = 0
    verdict: str = ""
    """`fits`, `fits with margin …`, or `within the uncertainty: measure`; empty for `simple`."""
    because: str = ""
    terms: list[MemoryTerm] = []
    calibrated: list[str] = []
    """The terms that real starts measured; the others are derived."""
    uncounted: list[str] = []
    """What takes memory too but is in no term, so that the plan cannot say that it fits."""


class LatencyTerm(Record):
    """One part of a latency, in ms: the bound, which nothing beats, and the expected range."""

    name: str
    bound_ms: float
    low_ms: float
    high_ms: float


class FirstTokenTime(Record):
    """Time to the first token of a prompt that has the engine to itself, in ms."""

    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt that the prefix cache already holds."""
    bound_ms: float
    low_ms: float
    high_ms: float
    limited_by: str
    """The largest term."""
    terms: list[LatencyTerm] = []


class NextTokenTime(Record):
    """Time per following token of each of `batch` sequences, in ms."""

    batch: int
    context_tokens: int
    bound_ms: float
    low_ms: float
    high_ms: float
    limited_by: str
    """The largest term."""
    terms: list[LatencyTerm] = []


class LatencyEstimate(Record):
    """How soon tokens come, on one replica without a queue. The first row of `ttft` and that of each
    batch in `tpot` are the expected workload's.
    """

    ttft: list[FirstTokenTime]
    tpot: list[NextTokenTime]
    notes: list[str] = []
    """What makes the figures less certain than their ranges say."""


class StartEstimate(Record):
    """How long a replica takes from its constructor to ready, in seconds."""

    low_s: float
    expected_s: float
    """load_s + rest_s; at least that, where no start tells the rest."""
    high_s: float
    load_s: float
    """Reading the checkpoint."""
    rest_s: float = 0
    starts: int = 0
    """Real starts that it rests on."""
    basis: str
