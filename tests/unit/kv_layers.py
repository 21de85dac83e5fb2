"""Layers and settings that tests of the KV cache start from."""

from __future__ import annotations

from rayserve.planner.kv.cache import (
    CacheSettings,
    cache_capacity,
    cache_layout,
    cache_rules,
)
from rayserve.planner.kv.layers import (
    CacheKind,
    attention_layer,
)
from rayserve.units import GIB

FULL, SLIDING, CHUNKED = CacheKind.FULL, CacheKind.SLIDING, CacheKind.CHUNKED
V0_19 = cache_rules((0, 19))


def settings(length=8192, batched=8192, **changes):
    """Engine settings of a case."""
    return CacheSettings(max_model_len=length, max_num_batched_tokens=batched, **changes)


def full(kv_heads, head_dim, *, tensor=1, **more):
    """A layer that keeps every token."""
    return attention_layer(FULL, kv_heads=kv_heads, tensor=tensor, head_dim=head_dim, **more)


def sliding(kv_heads, head_dim, window, *, tensor=1, **more):
    """A layer that keeps a window."""
    return attention_layer(
        SLIDING, kv_heads=kv_heads, tensor=tensor, head_dim=head_dim, window=window, **more
    )


def capacity(layers, gib, chosen):
    """What a start with this many GiB on one stage would print."""
    return cache_capacity(cache_layout([layers], chosen), [int(gib * GIB)], chosen)
