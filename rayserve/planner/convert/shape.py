"""What do config.json and the named GPU say against the converted file? The planner's own checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayserve.errors import SpecError, Where
from rayserve.planner.arguments import check_images
from rayserve.planner.convert.draft import Draft
from rayserve.planner.memory.simple import Cut
from rayserve.planner.obstacles import Obstacles
from rayserve.planner.positions import check_rope
from rayserve.planner.profile import read_profile
from rayserve.planner.subject import check_guess
from rayserve.planner.support.divisibility import CutShape, tensor_sizes
from rayserve.planner.weights.architecture import Architecture, read_architecture
from rayserve.spec import ClusterSpec

MOST_RANKS_TRIED = 64
SHOWN = 8
FLAGS_OF = {
    "tensor": ("tensor_parallel_size",),
    "speculative": ("speculative_config",),
    "rope_scaling": ("rope_scaling", "hf_overrides"),
    "max_images": ("limit_mm_per_prompt",),
}
"""The flags that may stand behind a key that the plan refuses, by a part of the key."""


def architecture_of(draft: Draft) -> Architecture | None:
    """The model's architecture; None where config.json is not given or not one that is laid out."""
    if not draft.context.config:
        return None
    method = str(draft.get("precision.quantization", "auto"))
    try:
        return read_architecture(
            draft.context.config,
            Where("config.json"),
            dtype=str(draft.get("precision.dtype", "auto")),
            quantization="" if method == "auto" else method,
        )
    except SpecError:
        return None  # the plan says what is wrong with it


def judge_shape(draft: Draft, spec: ClusterSpec, architecture: Architecture | None) -> None:
    """What the plan will refuse, or wants to be known, of the model on the named GPU."""
    gpu = draft.context.gpu
    if architecture is None or gpu is None:
        _judge_cut(draft)
        return
    cut = Cut(draft.get("parallelism.tensor", 1), draft.get("parallelism.pipeline", 1))
    try:
        config = draft.context.config
        profile = read_profile(config, Where("config.json"))
        check_rope(spec, profile, config)
        check_images(spec, profile)
        check_guess(spec, architecture, draft.context.config)
        told = Obstacles(spec, architecture, draft.context.config, gpu).check(
            spec.node_pools[0], cut
        )
    except SpecError as error:
        key = (error.where.key if error.where is not None else "") or ""
        flags = next((names for part, names in FLAGS_OF.items() if part in key), ())
        draft.find(
            "error",
            "hardware",
            next((draft.given[name] for name in flags if name in draft.given), ""),
            f"the plan refuses {error.found}",
            why=f"it needs {error.needed}",
            do=error.do,
            certainty="read",
            source="vLLM 0.32.0",
        )
        return
    for sentence in told:
        draft.find("note", "hardware", "", sentence, do="nothing: it starts", certainty="read")


def _judge_cut(draft: Draft) -> None:
    """Whether the ranks divide heads and vocabulary, as far as they are known."""
    tensor = draft.get("parallelism.tensor", 1)
    given = draft.given.get("tensor_parallel_size", "")
    config = draft.context.config
    inner = config.get("text_config")
    fits, parts = _cuts(inner if isinstance(inner, Mapping) else config)
    if fits and tensor not in fits:
        draft.find(
            "error",
            "hardware",
            given,
            f"{tensor} ranks do not divide {parts}",
            why="every rank holds whole heads, and a whole part of the vocabulary",
            do=f"write one of: {', '.join(map(str, fits[:SHOWN]))}",
            certainty="computed",
        )
    elif not fits and tensor & (tensor - 1):
        draft.find(
            "warning",
            "hardware",
            given,
            f"{tensor} ranks seldom divide a model's heads",
            why="heads, KV heads and vocabulary must divide",
            do="give --config to check it, or take a power of two",
        )


def _cuts(shape: Mapping[str, Any]) -> tuple[tuple[int, ...], str]:
    """The numbers of ranks that a model can be cut over, and what they must divide; none: not known."""
    heads, kv_heads, rows = (
        shape.get(name) for name in ("num_attention_heads", "num_key_value_heads", "vocab_size")
    )
    if not isinstance(heads, int) or heads < 1:
        return (), ""
    kv = kv_heads if isinstance(kv_heads, int) and kv_heads > 0 else heads
    vocab = rows if isinstance(rows, int) and rows > 0 else 0
    latent = bool(shape.get("kv_lora_rank"))
    known = CutShape(layers=1, heads=heads, kv_heads=kv, vocab=vocab, hidden=0, latent=latent)
    parts = f"{heads} heads" + ("" if latent else f" and {kv} KV heads")
    parts += f", and a vocabulary of {vocab}" if vocab else ""
    return tensor_sizes([known], MOST_RANKS_TRIED), parts
