"""Which sizes of a block of the KV cache do the attention backends of a GPU take?"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rayserve.planner.support.precision import (
    KIND_NAMES,
    Attention,
    Finding,
    backends_for,
    table,
)

INDEXER_TOKENS = 64
"""Tokens of a block that the indexer of sparse MLA takes on CUDA (mla/indexer.py:285)."""
KEY = ("engine_args", "block_size")
SOURCE = "v1/attention/backend.py:119"


def check_block_size(
    size: int,
    attention: Sequence[Attention],
    *,
    dtype: str,
    kv_cache_dtype: str,
    capability: int,
    backend: str = "",
) -> list[Finding]:
    """A refusal where no backend takes blocks of so many tokens, with the nearest that work.

    A block need be a multiple of a size that the kernel takes, which cuts it up itself. `capability` in
    vLLM's digits; `backend` is what the spec fixes, empty: vLLM asks one by one.
    """
    steps = []
    for layer in dict.fromkeys(attention):
        able = backends_for(layer, dtype=dtype, kv=kv_cache_dtype, capability=capability)
        taken = [name for name in able if backend in ("", name)]
        whole = INDEXER_TOKENS if layer.kind == "sparse_mla" else 1
        sizes = [math.lcm(whole, table().attention[name]["blocks"]) for name in taken]
        if sizes and all(size % one for one in sizes):
            steps.append((min(sizes), layer.kind))
    if not steps:
        return []
    step, names = math.lcm(*(one for one, _ in steps)), {KIND_NAMES[kind] for _, kind in steps}
    below = size // step * step
    near = f"{below} or {below + step}" if below else str(step)
    needed = f"blocks of a multiple of {step} tokens, for {' and '.join(sorted(names))} on this GPU"
    return [Finding("refuse", KEY, needed, str(size), f"write {near}, or remove it", SOURCE)]
