"""What lies in the memory of a GPU, from the first byte to the last, as a bar has it?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rayserve.plan import MemoryEstimate, MemoryTerm, Plan
from rayserve.planner.memory.ranges import Range, combined

KV_CACHE = "kv"
FREE = "free"
LABELS = {
    "weights": "weights",
    "lora": "LoRA slots",
    "draft": "draft model",
    "activation": "activations",
    "other": "NCCL, buffers",
    "overhead": "NCCL, buffers, graphs",
    "graphs": "CUDA graphs",
    KV_CACHE: "KV cache",
    FREE: "left free",
}
LETTERS = {
    "weights": "W",
    "lora": "L",
    "draft": "D",
    "activation": "A",
    "other": "N",
    "overhead": "N",
    "graphs": "G",
    KV_CACHE: "K",
    FREE: ".",
}
"""What fills a part where there is no colour."""
KEY_OF_TERM = {
    "weights": "weights",
    "activation": "activation",
    "cuda_graphs": "graphs",
}
"""Terms of the plan that have a part of their own; the others share one."""


@dataclass(frozen=True)
class Part:
    """One part of a GPU's memory, in bytes."""

    key: str
    """One of LABELS."""
    low_bytes: int
    expected_bytes: int
    high_bytes: int

    @property
    def label(self) -> str:
        """What a person calls it."""
        return LABELS[self.key]

    @property
    def letter(self) -> str:
        """What stands for it where there is no colour."""
        return LETTERS[self.key]


@dataclass(frozen=True)
class Bar:
    """The memory of one GPU."""

    total_bytes: int
    """Of the whole bar: the GPU's memory, or more where the expectation exceeds it."""
    parts: tuple[Part, ...]
    """Without gaps, from the start of the bar to its end."""
    edge_bytes: tuple[int, int] | None
    """Where the KV cache begins, at the earliest and at the latest; None: it is known."""

    def start_bytes(self, key: str) -> int:
        """Where a part begins."""
        before = 0
        for part in self.parts:
            if part.key == key:
                return before
            before += part.expected_bytes
        return before


def memory_bar(memory: MemoryEstimate) -> Bar:
    """The bar of a rank: weights, what a step needs, the KV cache, and what vLLM leaves alone."""
    parts = [
        *_beside_cache(memory),
        Part(
            KV_CACHE,
            memory.kv_low_bytes,
            memory.kv_bytes,
            memory.kv_high_bytes,
        ),
    ]
    used = sum(part.expected_bytes for part in parts)
    free = max(0, memory.total_bytes - used)
    parts.append(Part(FREE, free, free, free))
    uncertain = memory.kv_low_bytes != memory.kv_high_bytes
    end = used
    return Bar(
        total_bytes=max(used, memory.total_bytes),
        parts=tuple(part for part in parts if part.expected_bytes > 0),
        edge_bytes=(end - memory.kv_high_bytes, end - memory.kv_low_bytes) if uncertain else None,
    )


def _beside_cache(memory: MemoryEstimate) -> list[Part]:
    fixed = [
        _exactly("weights", memory.weights_bytes),
        _exactly("lora", memory.lora_bytes),
        _exactly("draft", memory.draft_bytes),
    ]
    if not memory.terms:
        return [
            *fixed,
            _exactly("activation", memory.activation_bytes),
            _exactly("overhead", memory.overhead_bytes),
        ]
    weights, others = fixed[0], [term for term in memory.terms if term.name != "weights"]
    found = [term for term in memory.terms if term.name == "weights"]
    if found and not (memory.lora_bytes or memory.draft_bytes):
        weights = _sum("weights", found)
    keys = dict.fromkeys(KEY_OF_TERM.get(term.name, "other") for term in others)
    sums = [
        _sum(key, [term for term in others if KEY_OF_TERM.get(term.name, "other") == key])
        for key in keys
    ]
    return [weights, *fixed[1:], *sums]


def _exactly(key: str, size_bytes: int) -> Part:
    return Part(key, size_bytes, size_bytes, size_bytes)


def _sum(key: str, terms: Iterable[MemoryTerm]) -> Part:
    ranges = [Range(term.low_bytes, term.expected_bytes, term.high_bytes) for term in terms]
    whole = combined(ranges)
    return Part(key, max(0, whole.low), whole.expected, whole.high)


def verdict(plan: Plan) -> str:
    """What the plan says of the GPU's memory, in a few words."""
    memory = plan.memory
    if memory is None:
        return "planned; no GPU memory to prove"
    return "may fit; see the notes" if memory.uncounted else memory.verdict


def is_proven(plan: Plan) -> bool:
    """Whether the plan says, without a doubt of its own, that the model fits."""
    memory = plan.memory
    exact = memory is not None and memory.model == "exact" and not memory.uncounted
    return exact and verdict(plan).startswith("fits")
