"""Which real starts are comparable with the one that is planned, and what do they tell?

Comparable: the same config.json, vLLM, kind of GPU and settings. Starts never choose anything: they
narrow the estimate of what was chosen, so that a plan does not change the replica by which it was
measured (ADR 0054).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rayserve.plan import Plan, ReplicaPlan, StartEstimate
from rayserve.planner.catalogue import Gpu, same_gpu
from rayserve.planner.memory.calibration import Measured, measured_start
from rayserve.planner.memory.simple import Cut
from rayserve.planner.memory.versions import VersionFacts
from rayserve.starts import LEDGER, LONGEST_S, Ledger, Start, config_sha256, settings_sha256
from rayserve.units import GIB

SAME_TOTAL = 0.01
"""How far the totals that drivers report for one model of GPU lie apart: 79.15 and 79.25 GiB of an A100
are 0.13 %, the widest in data/gpus.yml (A10, 22.06 and 22.18) 0.5 %."""
SAME_WEIGHTS = 0.05
"""How far measured weights may lie from the derived ones, which err by less than 1 % on logs; slots of
adapters and draft models by more."""
MOST_FAULTS = 3
"""Of unreadable lines that a note quotes."""
STRAY = 1.5
"""How far a start may stray from the one that is known: six starts of the tiny model on two cores that
other work shared took 14.3 to 21.4 s, most of the difference in importing. None on a GPU was at hand.
The n-th root of it is the allowance beyond n known starts."""
CLOSE = 0.8
"""Share of the start budget from which a prediction is close to it."""
DEFAULT_READERS = frozenset({"auto", "hf", "safetensors"})
"""`load_format`s that read the whole checkpoint from the disk."""


@dataclass(frozen=True)
class Evidence:
    """The starts that count for a plan."""

    starts: tuple[Start, ...] = ()
    notes: tuple[str, ...] = ()

    def measured(self, facts: VersionFacts, cut: Cut) -> tuple[Measured, ...]:
        """What those of the same cut measured on GPUs."""
        same = [start for start in self.starts if start.cut == (cut.tensor, cut.pipeline)]
        found = (measured_start(facts, start) for start in same)
        return tuple(one for one in found if one is not None)

    def believed(self, cut: Cut, weights_bytes: int) -> Evidence:
        """Without starts of this cut whose fullest rank has other weights than this model."""
        strange = [
            start
            for start in self.starts
            if start.cut == (cut.tensor, cut.pipeline) and not _same_weights(start, weights_bytes)
        ]
        if not strange:
            return self
        note = (
            f"{LEDGER}: {len(strange)} of them are not used: their weights are not the "
            f"{weights_bytes / GIB:.2f} GiB that follow from the model's shapes."
        )
        kept = tuple(start for start in self.starts if start not in strange)
        return Evidence(kept, (*self.notes, note))


def _same_weights(start: Start, weights_bytes: int) -> bool:
    most = max((rank.weights_bytes or 0 for rank in start.memory), default=0)
    return not most or abs(most - weights_bytes) <= SAME_WEIGHTS * weights_bytes


def evidence(ledger: Ledger, replica: ReplicaPlan, gpu: Gpu | None) -> Evidence:
    """The comparable starts of a ledger, and a note that says what became of the others."""
    same, others = sift(ledger.starts, replica, gpu)
    total = len(ledger.starts) + len(ledger.faults)
    if not total:
        return Evidence()
    told = f"{LEDGER}: {len(same)} of {total} starts are comparable with this plan"
    left = unused(others, ledger.faults)
    return Evidence(same, (f"{told}; not used: {left}." if left else f"{told}.",))


def sift(
    starts: Iterable[Start], replica: ReplicaPlan, gpu: Gpu | None
) -> tuple[tuple[Start, ...], Counter[str]]:
    """The comparable ones, and how many of the others differ in what."""
    same: list[Start] = []
    others: Counter[str] = Counter()
    for start in starts:
        reason = difference(start, replica, gpu)
        if reason:
            others[reason] += 1
        else:
            same.append(start)
    return tuple(same), others


def unused(others: Counter[str], faults: Sequence[str]) -> str:
    """What is not used and why, in a phrase; empty: everything is."""
    parts = [f"{number} {reason}" for reason, number in others.items()]
    if faults:
        shown = "; ".join(faults[:MOST_FAULTS]) + ("; …" if len(faults) > MOST_FAULTS else "")
        parts.append(f"{len(faults)} that cannot be believed ({shown})")
    return ", ".join(parts)


def difference(start: Start, replica: ReplicaPlan, gpu: Gpu | None) -> str:
    """Why a start is not comparable; empty: it is."""
    version = start.engine.vllm_version.partition("+")[0]  # builds for a platform add a label
    if start.device != replica.device:
        return f"on {start.device}"
    if start.model_config_sha256 != config_sha256(replica):
        return "of another model (config.json)"
    if version != replica.vllm_version:
        return f"with vLLM {version}"
    if gpu is not None:
        names = [rank.device_name or "not named" for rank in start.memory]
        strange = next((name for name in names if not same_gpu(name, gpu)), "")
        if strange:
            return f"on another GPU ({strange})"
        totals = [rank.total_bytes or 0 for rank in start.memory]
        if any(abs(one - gpu.memory_bytes) > SAME_TOTAL * gpu.memory_bytes for one in totals):
            return f"on a GPU with other memory than {gpu.memory_gib:g} GiB"
    if start.settings_sha256 != settings_sha256(replica):
        return "with other settings (engine_args, env, adapters or start_method)"
    return ""


# ── start time ──────────────────────────────────────────────────────────────────────────────────


def start_estimate(
    replica: ReplicaPlan, starts: Sequence[Start], *, read_bytes: int, disk_gb_s: float
) -> StartEstimate | None:
    """How long the next start takes; None where nothing tells.

    Args:
        replica: what is started.
        starts: comparable ones; of those of the same cut, such with the same limits come first.
        read_bytes: what each host reads of the checkpoint: all of it, whatever the cut.
        disk_gb_s: bandwidth of its disk; 0: not known.

    The load is what reading took, or what the disk needs for it where that is more: an earlier start
    may have found the checkpoint in the page cache, the next may not. All else repeats.
    """
    loader = replica.engine_arguments().get("load_format", "auto")
    disk_s = read_bytes / (disk_gb_s * 1e9) if disk_gb_s and loader in DEFAULT_READERS else 0.0
    disk_s = min(disk_s, LONGEST_S)
    size = f"reading {read_bytes / 1e9:.1f} GB at {disk_gb_s:g} GB/s"
    alike = _alike(replica, starts)
    if not alike:
        if not disk_s:
            return None
        disk_s = round(disk_s, 1)
        basis = f"{size}; no real start tells the rest"
        return StartEstimate(
            low_s=disk_s, expected_s=disk_s, high_s=disk_s, load_s=disk_s, basis=basis
        )
    reads = sorted(_read_s(start) for start in alike)
    rests = sorted(start.total_s - _read_s(start) for start in alike)
    middle = len(alike) // 2
    load_s, rest_s = max(disk_s, reads[middle]), rests[middle]
    stray = STRAY ** (1 / len(alike))
    disk = f"{size}; " if disk_s else ""
    count = f"{len(alike)} real start{'s' if len(alike) > 1 else ''}"
    limits = "" if _limits(alike[0]) == _planned(replica) else ", with other limits"
    return StartEstimate(
        low_s=round(min(start.total_s for start in alike) / stray, 1),
        expected_s=round(load_s + rest_s, 1),
        high_s=round((max(disk_s, reads[-1]) + rests[-1]) * stray, 1),
        load_s=round(load_s, 1),
        rest_s=round(rest_s, 1),
        starts=len(alike),
        basis=f"{disk}{count}{limits}",
    )


def budget_notes(start: StartEstimate | None, budget_s: float) -> list[str]:
    """What to say of a predicted start and `timeouts.start_s`."""
    if start is None or max(start.high_s, start.expected_s / CLOSE) <= budget_s:
        return []
    takes = f"A start is predicted to take {_words(start)}"
    limit = f"timeouts.start_s ({budget_s:g})"
    if start.expected_s > budget_s:
        return [f"{takes}: longer than {limit}, which would end it. Raise start_s."]
    return [f"{takes}: close to {limit}."]


def evidence_rows(plan: Plan) -> list[tuple[str, str]]:
    """What starts measured, and how long the next takes, as rows of a table."""
    memory, start = plan.memory, plan.start
    rows: list[tuple[str, str]] = []
    if memory is not None and memory.calibrated:
        rows.append(("measured", f"{', '.join(memory.calibrated)}: by real starts"))
    if start is not None:
        budget = f"timeouts.start_s is {plan.replica.start_timeout_s:g}"
        rows.append(("start", f"{_words(start)}: {start.basis}; {budget}"))
    return rows


def _words(start: StartEstimate) -> str:
    if not start.starts:
        return f"at least {start.expected_s:.0f} s"
    return f"{start.expected_s:.0f} s ({start.low_s:.0f} to {start.high_s:.0f})"


def _alike(replica: ReplicaPlan, starts: Sequence[Start]) -> list[Start]:
    """Those of the same cut, and of them those of the same limits if there are any."""
    placement = replica.placement
    cut = (placement.tensor_parallel_size, placement.pipeline_parallel_size)
    found = [start for start in starts if start.cut == cut]
    return [start for start in found if _limits(start) == _planned(replica)] or found


def _limits(start: Start) -> tuple[object, ...]:
    engine = start.engine
    return engine.max_model_len, engine.max_num_seqs, engine.max_num_batched_tokens


def _planned(replica: ReplicaPlan) -> tuple[object, ...]:
    names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens")
    arguments = replica.engine_arguments()
    return tuple(arguments.get(name) for name in names)


def _read_s(start: Start) -> float:
    """Seconds of reading the checkpoint; all of loading, where the loader does not say."""
    phases = start.phases_s
    return min(start.total_s, phases.get("read", phases.get("weights", 0.0)))
