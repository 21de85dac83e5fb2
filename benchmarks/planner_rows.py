"""What does the planner say of one logged start, and what did the start say?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.planner_cases import Record, architecture_of, case_inputs, out_of_scope
from rayserve.errors import RayserveError
from rayserve.planner.catalogue import gpus
from rayserve.planner.kv.cache import CacheCapacity, cache_capacity, cache_layout
from rayserve.planner.kv.caches import layer_caches
from rayserve.planner.memory.estimate import Estimate, Setup, cache_settings, estimate
from rayserve.planner.memory.versions import Batch, Runner, default_batch, version_facts
from rayserve.planner.weights.architecture import Architecture
from rayserve.planner.weights.modules import MLA
from rayserve.planner.weights.tensors import stage_weights
from rayserve.units import GIB

NAMES = (
    (r"a100.*40|40.*a100", "A100-40GB-SXM"),
    (r"a100|a800", "A100-80GB-SXM"),
    (r"h200", "H200-141GB-SXM"),
    (r"h100", "H100-80GB-SXM"),
    (r"b200", "B200-180GB-SXM"),
    (r"l40s", "L40S-48GB"),
    (r"5090", "RTX-5090-32GB"),
    (r"3090", "RTX-3090-24GB"),
    (r"a6000", "RTX-A6000-48GB"),
    (r"4090", "RTX-4090-24GB"),
    (r"\bl4\b", "L4-24GB"),
    (r"\ba10\b", "A10-24GB"),
    (r"mi300x", "MI300X-192GB"),
)
"""GPUs of the catalogue by what a log calls them; the first match counts."""
GH200_GIB = 95.0
"""As its logs print; not a GPU of the catalogue."""
TOTALS = (
    (r"gh200", GH200_GIB),
    *((pattern, gpus()[name].memory_gib) for pattern, name in NAMES),
)
"""Total memory in GiB where a log does not print it, by the GPU's name."""
FREE = re.compile(r"Free memory on device \S+ \(([\d.]+)/")
PRINTED_GIB = 0.005
"""Logs print GiB with two digits."""
LATENTS_KNOWN = (0, 7)
"""The release of the old engine whose rows of latents a log shows: a case that is not out of sample."""
OLD_LATENTS = "the old engine with MLA is not modelled"
MEMORY_REFUSAL = re.compile(r"KV cache|out of memory|max seq len|Free memory", re.IGNORECASE)


@dataclass(frozen=True)
class CaseRow:
    """One case: predicted and logged, or why it is not judged."""

    id: str
    model: str
    family: str = ""
    version: str = ""
    ranks: int = 1
    weights_gib: float | None = None
    logged_weights_gib: float | None = None
    blocks: int | None = None
    logged_blocks: int | None = None
    concurrency: float | None = None
    logged_concurrency: float | None = None
    tokens: int | None = None
    logged_tokens: int | None = None
    kv_gib: float | None = None
    kv_low_gib: float | None = None
    kv_high_gib: float | None = None
    logged_kv_gib: float | None = None
    verdict: str = ""
    verdict_right: bool | None = None
    memory_refusal: bool = False
    no_weights: str = ""
    """Why the weights are not judged."""
    no_cache: str = ""
    no_end_to_end: str = ""

    @property
    def weights_error(self) -> float | None:
        """Relative."""
        return relative(self.weights_gib, self.logged_weights_gib)

    @property
    def cache_error(self) -> float | None:
        """Relative error of blocks, or of concurrency, from the logged bytes of the cache."""
        errors = (
            relative(self.blocks, self.logged_blocks),
            relative(self.concurrency, self.logged_concurrency),
            relative(self.tokens, self.logged_tokens),
        )
        known = [error for error in errors if error is not None]
        return max(known, key=abs) if known else None

    @property
    def kv_error(self) -> float | None:
        """Relative error of the expectation."""
        return relative(self.kv_gib, self.logged_kv_gib)

    @property
    def inside(self) -> bool | None:
        """Whether the logged bytes of the cache lie in the range, print rounding allowed."""
        if self.kv_low_gib is None or self.kv_high_gib is None or self.logged_kv_gib is None:
            return None
        low, high = self.kv_low_gib - PRINTED_GIB, self.kv_high_gib + PRINTED_GIB
        return low <= self.logged_kv_gib <= high

    def as_json(self) -> dict[str, Any]:
        """Plain data, with the errors."""
        errors = {
            "weights_error": self.weights_error,
            "cache_error": self.cache_error,
            "kv_error": self.kv_error,
            "inside": self.inside,
        }
        return asdict(self) | errors


def relative(predicted: float | None, logged: float | None) -> float | None:
    """(predicted - logged) / logged; None where one is missing."""
    if predicted is None or not logged:
        return None
    return predicted / logged - 1


def case_row(case: Mapping[str, Any], record: Record | None) -> CaseRow:
    """The row of a case; one with a value of a kind that no log has is left out with that reason."""
    try:
        return _case_row(case, record)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"not a case as the format has it: {type(error).__name__} {error}"
        row = CaseRow(id=str(case.get("id")), model=str(case.get("model") or ""))
        return replace(row, no_weights=reason, no_cache=reason, no_end_to_end=reason)


def started(case: Mapping[str, Any]) -> bool | None:
    """Whether vLLM came up: what the case says, else whether it has the engine's figures; else None."""
    outcome = case.get("outcome")
    if outcome:
        return str(outcome) == "ok"
    if case.get("error"):
        return False
    figures = ("kv_cache_gib_per_gpu", "gpu_blocks", "max_concurrency", "kv_tokens")
    return True if any(case.get(name) for name in figures) else None


def _case_row(case: Mapping[str, Any], record: Record | None) -> CaseRow:
    row = CaseRow(
        id=str(case.get("id") or case.get("model") or "without a name"),
        model=str(case.get("model") or ""),
        version=str(case.get("vllm_version") or ""),
        ranks=int(case.get("tp") or 1) * int(case.get("pp") or 1),
        logged_weights_gib=case.get("weights_gib_per_gpu"),
        logged_blocks=case.get("gpu_blocks"),
        logged_concurrency=case.get("max_concurrency"),
        logged_tokens=case.get("kv_tokens"),
        logged_kv_gib=_positive(case.get("kv_cache_gib_per_gpu")),
        memory_refusal=bool(
            started(case) is False and MEMORY_REFUSAL.search(str(case.get("error") or ""))
        ),
    )
    reason = out_of_scope(case)
    if record is None:
        reason = "the model's config is not at hand"
    if record is None or reason:
        return replace(row, no_weights=reason, no_cache=reason, no_end_to_end=reason)
    try:
        architecture = architecture_of(case_inputs(case, record), row.id)
    except RayserveError as error:
        reason = f"{error.needed}; found {error.found}"
        return replace(row, no_weights=reason, no_cache=reason, no_end_to_end=reason)
    row = replace(row, family=re.sub(r"For\w+$", "", architecture.name))
    row = _weights(row, case, record, architecture)
    setup, reason = _setup(case, record, architecture)
    if setup is None:
        return replace(row, no_cache=reason, no_end_to_end=reason)
    if setup.facts.runner is Runner.V0 and has_latents(architecture):
        row = replace(row, no_end_to_end=OLD_LATENTS)
        if setup.facts.number != LATENTS_KNOWN:
            return replace(row, no_cache=OLD_LATENTS)
        return _cache(row, architecture, setup)
    row = _cache(row, architecture, setup)
    return _end_to_end(row, case, architecture, setup)


def has_latents(architecture: Architecture) -> bool:
    """Whether a layer keeps latents (MLA)."""
    return any(layer.attention.kind == MLA for layer in architecture.layers)


def _positive(value: float | None) -> float | None:
    return value if value is not None and value > 0 else None


def _weights(
    row: CaseRow, case: Mapping[str, Any], record: Record, architecture: Architecture
) -> CaseRow:
    logged = row.logged_weights_gib
    if not logged:
        return replace(row, no_weights="not logged")
    stages = [size / GIB for size in stage_weights(architecture, case_inputs(case, record).place)]
    # A log's line is one rank's; with pipeline stages it does not say whose.
    return replace(row, weights_gib=min(stages, key=lambda stage: abs(stage - logged)))


def _setup(
    case: Mapping[str, Any], record: Record, architecture: Architecture
) -> tuple[Setup | None, str]:
    place = case_inputs(case, record).place
    gpu = str(case.get("gpu") or "")
    named = next((gib for pattern, gib in TOTALS if re.search(pattern, gpu.lower())), 0.0)
    total = int((case.get("gpu_total_gib") or named) * GIB)
    version = str(case.get("vllm_version") or "")
    if not version or "nightly" in version:
        return None, "the version is not recorded"
    if "approximately" in str(case.get("notes")):
        return None, "the figures are rounded by the reporter"
    if not total:
        return None, "the GPU is not recorded"
    facts = version_facts(version)
    length = int(case.get("max_model_len") or architecture.max_position)
    default = default_batch(facts, gpu_name=gpu, total_bytes=total, max_model_len=length)
    free = FREE.search(str(case.get("error") or ""))
    return Setup(
        total_bytes=total,
        capability=place.target.capability or 9.0,
        rocm=place.target.rocm,
        facts=facts,
        batch=Batch(
            int(case.get("max_num_batched_tokens") or default.step_tokens),
            int(case.get("max_num_seqs") or default.seqs),
        ),
        utilization=float(case.get("gpu_memory_utilization") or facts.default_utilization),
        max_model_len=length,
        tensor=place.tensor,
        pipeline=place.pipeline,
        expert_ranks=place.expert_ranks,
        kv_cache_dtype=str(case.get("kv_cache_dtype") or "auto"),
        graphs=not case.get("enforce_eager"),
        prefix_caching="prefix caching off" not in str(case.get("notes")),
        block_size=int(case.get("block_size") or 16),
        free_bytes=int(float(free[1]) * GIB) if free else None,
    ), ""


def case_setup(case: Mapping[str, Any], record: Record) -> tuple[Architecture, Setup] | str:
    """Architecture and settings of a start, as they were known before it; else why they are not."""
    try:
        architecture = architecture_of(case_inputs(case, record), str(case["id"]))
    except RayserveError as error:
        return f"{error.needed}; found {error.found}"
    setup, reason = _setup(case, record, architecture)
    if setup is not None and setup.facts.runner is Runner.V0 and has_latents(architecture):
        return OLD_LATENTS
    return reason if setup is None else (architecture, setup)


def _cache(row: CaseRow, architecture: Architecture, setup: Setup) -> CaseRow:
    """Blocks and concurrency that follow from the logged bytes."""
    if row.logged_kv_gib is None:
        return replace(row, no_cache="the bytes of the cache are not logged")
    if setup.pipeline > 1:
        return replace(row, no_cache="the log has the bytes of one pipeline stage only")
    if row.logged_blocks is None and row.logged_concurrency is None and row.logged_tokens is None:
        return replace(row, no_cache="neither blocks nor concurrency are logged")
    try:
        found = _capacity(architecture, setup, int(row.logged_kv_gib * GIB))
    except RayserveError as error:
        return replace(row, no_cache=f"{error.needed}; found {error.found}")
    return replace(
        row,
        blocks=found.num_blocks if row.logged_blocks else None,
        concurrency=found.max_concurrency if row.logged_concurrency else None,
        tokens=found.printed_tokens if row.logged_tokens else None,
    )


def _capacity(architecture: Architecture, setup: Setup, size: int) -> CacheCapacity:
    stages = layer_caches(
        architecture,
        tensor=setup.tensor,
        pipeline=setup.pipeline,
        kv_cache_dtype=setup.kv_cache_dtype,
    )
    settings = cache_settings(architecture, setup)
    layout = cache_layout(stages, settings)
    return cache_capacity(layout, [size] * setup.pipeline, settings)


def _end_to_end(
    row: CaseRow, case: Mapping[str, Any], architecture: Architecture, setup: Setup
) -> CaseRow:
    outcome = started(case)
    if outcome is False and not row.memory_refusal:
        return replace(row, no_end_to_end="refused for something else than memory")
    try:
        found = estimate(architecture, setup)
    except RayserveError as error:
        return replace(row, no_end_to_end=f"{error.needed}; found {error.found}")
    row = replace(row, **_kv(row, found))
    if outcome is None or (outcome and not case.get("max_model_len")):
        return row  # how it ended, or what one request needs, is not recorded
    starts = found.verdict.starts
    right = None if starts is None else starts == outcome
    return replace(row, verdict=str(found.verdict), verdict_right=right)


def _kv(row: CaseRow, found: Estimate) -> dict[str, float]:
    """The cache of the stage that comes nearest to the log's, which does not say whose it is."""
    logged = row.logged_kv_gib
    kvs = [budget.kv for budget in found.budgets]
    kv = found.budgets[found.decisive].kv
    if logged is not None:
        kv = min(kvs, key=lambda one: abs(one.expected / GIB - logged))
    return {
        "kv_gib": kv.expected / GIB,
        "kv_low_gib": kv.low / GIB,
        "kv_high_gib": kv.high / GIB,
    }
