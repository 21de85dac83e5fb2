"""What does a line of the start ledger say, and can it be believed?

A replica that reaches ready appends one JSON line to `state_dir`/starts.jsonl
(rayserve/serving/ledger.py); people collect lines in a starts.jsonl beside cluster.yml. Both sides of
the format stand here. docs/starts.md shows a line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rayserve.plan import ReplicaPlan
from rayserve.units import MIB

SCHEMA = 2
"""Of the lines. Those of 1 had no `schema` and did not say of which model and GPU they are."""
LEDGER = "starts.jsonl"
MOST_STARTS = 100
"""Lines that are kept beside a spec, the newest."""
MOST_LINE_BYTES = 256 * 1024
MOST_RANKS = 4096
LONGEST_S = 7 * 86400.0

CHANGES_NO_MEMORY = frozenset(
    {
        "allowed_media_domains",
        "disable_log_stats",
        "generation_config",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "override_generation_config",
        "seed",
        "shutdown_timeout",
    }
)
"""Engine arguments that may differ between two starts: they change neither a measured term nor a
phase, or, as the limits do, they stand in the line and each term has a rule for them."""
CHANGES_NOTHING_ENV = frozenset(
    {
        "DO_NOT_TRACK",
        "HF_HUB_DISABLE_TELEMETRY",
        "HF_HUB_OFFLINE",
        "VLLM_ENGINE_READY_TIMEOUT_S",
        "VLLM_NO_USAGE_STATS",
    }
)


# ── what a replica writes ───────────────────────────────────────────────────────────────────────


def settings_sha256(replica: ReplicaPlan) -> str:
    """One hash of every setting that must be the same in two starts that are compared.

    What is not known to do nothing counts. The cut over ranks and the limits of a step are left out:
    they stand in the line.
    """
    definition = replica.definition()
    settings = {
        "engine_args": {
            item["name"]: item["value"]
            for item in definition["engine_args"]
            if item["name"] not in CHANGES_NO_MEMORY
        },
        "env": {
            item["name"]: item["value"]
            for item in definition["env"]
            if item["name"] not in CHANGES_NOTHING_ENV
        },
        "adapters": len(replica.lora_adapters),
        "executor": replica.placement.executor,
        "start_method": replica.start_method,
    }
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def config_sha256(replica: ReplicaPlan) -> str:
    """SHA-256 of the model's config.json as the plan has it; empty: it was not at hand."""
    name = f"{replica.model}/config.json"
    return next((str(item.value) for item in replica.content if item.name == name), "")


def identity(replica: ReplicaPlan) -> dict[str, Any]:
    """Of what a start is: the part of its line that says with which others it may be compared.

    Arguments and environment are hashed, not written out.
    """
    return {
        "schema": SCHEMA,
        "device": replica.device,
        "model": replica.model,
        "model_config_sha256": config_sha256(replica),
        "settings_sha256": settings_sha256(replica),
    }


# ── what is read ────────────────────────────────────────────────────────────────────────────────

Size = Annotated[int, Field(ge=0, lt=2**50)]
Count = Annotated[int, Field(ge=1, lt=2**40)]
Seconds = Annotated[float, Field(ge=0, le=LONGEST_S, allow_inf_nan=False)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
DeviceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._/()+-]{0,79}$")]
PhaseName = Annotated[str, Field(pattern=r"^[a-z][a-z-]{0,30}$")]


class _Part(BaseModel):
    """Base of a line and its parts: exact types, and keys of a later rayserve are passed over."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class RankMemory(_Part):
    """What the worker of one rank measured, in bytes; None: its platform does not measure it."""

    rank: Annotated[int, Field(ge=0, lt=MOST_RANKS)]
    device_name: DeviceName | None = None
    """The platform's own name of the GPU."""
    total_bytes: Count | None = None
    """Of the GPU, as its driver reports it."""
    requested_bytes: Size | None = None
    weights_bytes: Count | None = None
    consumed_bytes: Size | None = None
    """Weights and all else that stays."""
    activation_bytes: Size | None = None
    """Peak beyond that, with the estimate for CUDA graphs where vLLM takes it off the KV cache."""
    cudagraph_bytes: Size | None = None
    kv_bytes: Annotated[int, Field(gt=-(2**50), lt=2**50)] | None = None

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        """vLLM's own sum (vllm/v1/worker/gpu_worker.py): a line that breaks it was not written so."""
        known = [self.requested_bytes, self.weights_bytes, self.consumed_bytes]
        if self.total_bytes is not None and any((size or 0) > self.total_bytes for size in known):
            raise ValueError("a rank has more than the whole GPU")
        if self.consumed_bytes is None or self.activation_bytes is None:
            return self
        if self.weights_bytes is None or self.weights_bytes > self.consumed_bytes:
            raise ValueError("more weights than consumed memory")
        if self.kv_bytes is not None and self.requested_bytes is not None:
            left = self.requested_bytes - self.consumed_bytes - self.activation_bytes
            if abs(left - self.kv_bytes) > MIB:
                raise ValueError("requested - consumed - activation is not the KV cache")
        return self


class EngineFacts(_Part):
    """The engine's limits and cut."""

    vllm_version: Annotated[str, Field(pattern=r"^[0-9][0-9A-Za-z.+-]{0,63}$")]
    tensor_parallel_size: Annotated[int, Field(ge=1, le=MOST_RANKS)]
    pipeline_parallel_size: Annotated[int, Field(ge=1, le=MOST_RANKS)]
    max_model_len: Count
    max_num_seqs: Count
    max_num_batched_tokens: Count
    num_gpu_blocks: Size | None = None
    kv_tokens: Size | None = None
    """Tokens that the KV cache holds, as vLLM prints them."""


class Start(_Part):
    """One start that reached ready."""

    line_format: Literal[2] = Field(alias="schema")
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]
    started_at: Annotated[float, Field(gt=0, lt=1e11, allow_inf_nan=False)]
    """Unix time."""
    total_s: Annotated[float, Field(gt=0, le=LONGEST_S, allow_inf_nan=False)]
    """From the replica's constructor to ready."""
    phases_s: Annotated[dict[PhaseName, Seconds], Field(max_length=32)]
    device: Literal["cuda", "cpu"]
    model: Annotated[str, Field(max_length=4096)]
    model_config_sha256: Digest
    settings_sha256: Digest
    memory: Annotated[tuple[RankMemory, ...], Field(max_length=MOST_RANKS)]
    engine: EngineFacts

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        engine = self.engine
        ranks = engine.tensor_parallel_size * engine.pipeline_parallel_size
        if sorted(rank.rank for rank in self.memory) != list(range(ranks)):
            raise ValueError(f"its memory is not that of {ranks} ranks, each once")
        if self.device == "cuda" and any(rank.total_bytes is None for rank in self.memory):
            raise ValueError("a GPU without total_bytes")
        if any(seconds > self.total_s + 1 for seconds in self.phases_s.values()):
            raise ValueError("a phase is longer than the whole start")
        return self

    @property
    def cut(self) -> tuple[int, int]:
        """Tensor and pipeline ranks."""
        return self.engine.tensor_parallel_size, self.engine.pipeline_parallel_size

    def text(self) -> str:
        """The line as it is kept: known keys only, in one order."""
        data = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        return json.dumps(data, sort_keys=True, ensure_ascii=True, allow_nan=False)


@dataclass(frozen=True)
class Ledger:
    """What a file of starts holds."""

    starts: tuple[Start, ...] = ()
    """Oldest first, each once."""
    faults: tuple[str, ...] = ()
    """Of each line that is not used, why."""


def read_starts(data: bytes) -> Ledger:
    """The starts in a file, and the faults of lines that cannot be believed; never an error."""
    starts: list[Start] = []
    faults: list[str] = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        fault = "longer than any start" if len(line) > MOST_LINE_BYTES else ""
        if not fault:
            try:
                starts.append(Start.model_validate_json(line))
            except ValidationError as error:
                fault = _fault(error)
        if fault:
            faults.append(f"line {number}: {fault}")
    return Ledger(newest(starts), tuple(faults))


def is_ledger(text: str) -> bool:
    """Whether a file has a line of a ledger, of whatever format, or is empty: it may be replaced."""
    return not text.strip() or any(map(_is_object, text.splitlines()))


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def newest(starts: Iterable[Start]) -> tuple[Start, ...]:
    """The newest starts, oldest first, each once."""
    unique = {start.text(): start for start in starts}
    ordered = sorted(unique, key=lambda text: (unique[text].started_at, text))
    return tuple(unique[text] for text in ordered[-MOST_STARTS:])


def starts_text(starts: Iterable[Start]) -> str:
    """The text of a file of starts."""
    return "".join(f"{start.text()}\n" for start in starts)


def _fault(error: ValidationError) -> str:
    """The first fault in words that quote nothing of the line."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    names = [str(part) for part in first["loc"] if isinstance(part, int) or part in _NAMES]
    if names == ["schema"]:
        return "not of this format: its `schema` is not 2"
    if first["type"] == "json_invalid":
        return "not JSON, or cut short"
    message = first["msg"].removeprefix("Value error, ")
    return f"{'.'.join(names)}: {message}" if names else message


_NAMES = frozenset(
    {"schema", *Start.model_fields, *RankMemory.model_fields, *EngineFacts.model_fields}
)
