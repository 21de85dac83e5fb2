"""What is told of each checkpoint? The rows of `rayserve plan --candidates`, and its JSON."""

from __future__ import annotations

from typing import Any, Literal

from rayserve.plan import FirstTokenTime, NextTokenTime, Record

SloState = Literal["met", "may be missed", "missed", "not set", "not known"]


class Quality(Record):
    """Accuracy that a format leaves of the unquantized model's, as published for a model of like size."""

    recovery_percent: float
    """Mean over `benchmarks`, each counted as 100 at most."""
    low_percent: float
    high_percent: float
    """Lowest and highest of the published recoveries."""
    model: str
    """The model that was measured; empty: the unquantized checkpoint, which is the measure."""
    benchmarks: list[str] = []
    source: str = ""
    """Key of the source in data/quantization-quality.yml."""
    published: str = ""
    """Title, year and place of the source."""
    note: str = ""


class Refusal(Record):
    """Why a checkpoint cannot be served, as in an error message."""

    error: str
    """Kind of error, such as DoesNotFitError."""
    needed: str
    found: str = ""
    do: str = ""
    where: str = ""
    """File, line and key that it is about."""


class Traits(Record):
    """What follows from the architecture, whatever the hardware."""

    parameters: int
    attention: list[str]
    """Kinds of attention with their heads and windows."""
    positions: str = ""
    """Positions that the checkpoint's makers claim, and how they came to them."""
    claimed_positions: int = 0
    """A longer max_model_len rests on stretching that nobody trained; 0: not known."""
    unquantized: list[str] = []
    """What a quantized checkpoint keeps in 16 bits, largest first."""
    float32: list[str] = []
    """What is kept in 32 bits."""


class CandidateRow(Record):
    """One checkpoint on this hardware."""

    rank: int
    """From 1; 0: it cannot be served."""
    name: str
    served: bool
    """It is what the plan serves."""
    checkpoint: str
    """Path or Hugging Face id."""
    reason: str
    """Why it has its rank."""
    verdict: str
    refusal: Refusal | None = None
    format: str = ""
    """Weights/activations and the method; 16: the compute type."""
    runs_as: str = ""
    """What runs where the chip does not compute in the format; empty: it does."""
    weights_bytes: int = 0
    """On the fullest GPU."""
    kv_bytes_per_token: int = 0
    """On a GPU, in the layers that keep the whole context."""
    max_model_len: int = 0
    kv_tokens: int = 0
    max_concurrency: float = 0
    """Requests of max_model_len at once."""
    expected_concurrency: float = 0
    """Requests of the workload's length at once."""
    ttft: FirstTokenTime | None = None
    """Of the workload's prompt."""
    tpot: NextTokenTime | None = None
    """Of the aim's batch: one request (latency), as many as run at once (throughput)."""
    figure: str = ""
    """What the aim asks about, in words: time of an answer, or tokens a second."""
    figure_ms: float = 0
    """The middle of it: time of an answer, or of a token over all requests at once; 0: not known."""
    cost_ms: float = 0
    """With the surcharge for lost accuracy: what ranks."""
    slo: SloState = "not known"
    quality: Quality | None = None
    """Absent where nothing is published for the format."""
    traits: Traits | None = None
    """Absent where the architecture is not known, or config.json could not be read."""
    notes: list[str] = []


class Comparison(Record):
    """All checkpoints, the best first."""

    name: str
    aim: Literal["latency", "throughput"]
    gpu: str
    gpus: int
    """Of all hosts of the pool."""
    prompt_tokens: int
    output_tokens: int
    ttft_slo_ms: float
    tpot_slo_ms: float
    accuracy_weight: float
    rows: list[CandidateRow]

    def as_dict(self) -> dict[str, Any]:
        """Plain data without nulls, in the order of the fields."""
        return self.model_dump(mode="json", exclude_none=True)
