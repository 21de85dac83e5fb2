"""Engines whose KV cache vLLM and we compute: their layers, settings and free bytes."""

from __future__ import annotations

import random
from dataclasses import dataclass

from rayserve.planner.kv.cache import (
    CacheSettings,
)
from rayserve.planner.kv.layers import (
    CacheKind,
    attention_layer,
    gated_delta_state_bytes,
    indexer_layer,
    latent_layer,
    mamba2_state_bytes,
    state_layer,
)
from rayserve.units import GIB

FULL, SLIDING, CHUNKED = CacheKind.FULL, CacheKind.SLIDING, CacheKind.CHUNKED


@dataclass(frozen=True)
class Case:
    """One engine: its layers by pipeline stage, its settings, and the bytes of each stage."""

    stages: tuple
    settings: CacheSettings
    available: tuple


def settings(length=8192, batched=8192, **changes):
    """Engine settings of a case."""
    return CacheSettings(max_model_len=length, max_num_batched_tokens=batched, **changes)


def heads(count, dim, kind=FULL, *, tensor=1, **more):
    """A layer with keys and values."""
    return attention_layer(kind, kv_heads=count, tensor=tensor, head_dim=dim, **more)


def case(layers, available=40 * GIB, **changes):
    """An engine without a pipeline."""
    return Case((tuple(layers),), settings(**changes), (available,))


def pipelined(stages, available, **changes):
    """An engine of several stages."""
    return Case(tuple(tuple(stage) for stage in stages), settings(**changes), tuple(available))


def repeated(pattern, times):
    """The layers of a pattern, times over."""
    return list(pattern) * times


GEMMA2 = (heads(8, 256, SLIDING, window=4096), heads(8, 256))
GEMMA3 = (*[heads(8, 256, SLIDING, window=1024)] * 5, heads(8, 256))
GEMMA4 = (*[heads(16, 256, SLIDING, window=1024)] * 5, heads(4, 512))
GEMMA4_INT8 = (
    *[heads(8, 256, SLIDING, window=1024, kv_cache_dtype="int8_per_token_head")] * 5,
    heads(2, 512, kv_cache_dtype="int8_per_token_head"),
)
GPT_OSS = (heads(8, 64, SLIDING, window=128), heads(8, 64))
LLAMA4 = (*[heads(8, 128, CHUNKED, window=8192)] * 3, heads(8, 128))
QWEN_STATE = gated_delta_state_bytes(
    tensor=1, key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv_kernel=4
)
QWEN_NEXT = (*[state_layer(*QWEN_STATE)] * 3, heads(2, 256))
NEMOTRON_STATE = mamba2_state_bytes(
    tensor=1, heads=128, head_dim=64, state_size=128, groups=8, conv_kernel=4
)
MAMBA2 = state_layer(*NEMOTRON_STATE, checkpoint_blocks=1)
NEMOTRON = [*[MAMBA2] * 24, *[heads(8, 128)] * 4]
KIMI_STATE = gated_delta_state_bytes(
    tensor=2,
    key_heads=32,
    value_heads=32,
    key_dim=128,
    value_dim=128,
    conv_kernel=4,
    state_bytes=4,
)
KIMI_LINEAR = (*[state_layer(*KIMI_STATE)] * 3, latent_layer(576))
SPARSE_MLA = [*[latent_layer(576, kv_cache_dtype="fp8_ds_mla")] * 30, *[indexer_layer(132)] * 9]
CASES = {
    "gqa": case([heads(8, 128)] * 32),
    "gqa-tp8-replicated": case([heads(4, 128, tensor=8)] * 64),
    "gqa-405b-tp8": case([heads(8, 128, tensor=8)] * 126, length=131072),
    "gqa-block-128": case([heads(8, 128)] * 32, block_size=128, length=10000),
    "gqa-block-7": case([heads(8, 128)] * 5, block_size=7, length=1001),
    "gqa-fp8": case([heads(8, 128, kv_cache_dtype="fp8")] * 80),
    "gqa-float32": case([heads(8, 128, model_bytes=4)] * 8),
    "gqa-int8-heads": case([heads(8, 128, kv_cache_dtype="int8_per_token_head")] * 8),
    "gqa-int4-heads": case([heads(8, 128, kv_cache_dtype="int4_per_token_head")] * 8),
    "gqa-turboquant-k8v4": case([heads(4, 256, kv_cache_dtype="turboquant_k8v4")] * 8),
    "gqa-turboquant-k3v4": case([heads(4, 80, kv_cache_dtype="turboquant_k3v4_nc")] * 8),
    "gqa-turboquant-3bit": case([heads(4, 112, kv_cache_dtype="turboquant_3bit_nc")] * 8),
    "gqa-values-narrower": case([heads(4, 192, head_dim_v=128)] * 48),
    "gqa-too-long": case([heads(8, 128)] * 32, available=2 * GIB, length=131072),
    "gqa-one-token-too-much": case([heads(8, 128)] * 32, available=2**21 * 3, length=33),
    "gqa-context-parallel": case([heads(8, 128)] * 32, context_parallel=4, length=100001),
    "gqa-override": case([heads(8, 128)] * 32, blocks_override=777),
    "mha": case([heads(32, 80)] * 32, length=2048),
    "mha-two-widths": case([heads(16, 64)] * 8 + [heads(16, 128)] * 8),
    "draft-narrower": case([heads(8, 128)] * 32 + [heads(4, 64)]),
    "shared-layers": case([heads(2, 256), heads(2, 256), heads(2, 256, shared=True)] * 6),
    "sliding-only": case([heads(8, 128, SLIDING, window=4096)] * 32, length=32768, batched=2048),
    "sliding-two-windows": case(
        [heads(8, 128, SLIDING, window=4096), heads(8, 128, SLIDING, window=1024)] * 8
    ),
    "gemma2": case(repeated(GEMMA2, 21)),
    "gemma2-long": case(repeated(GEMMA2, 21), length=65536, batched=2048),
    "gemma2-in-flight": case(
        repeated(GEMMA2, 21), length=65536, batched=2048, concurrent_batches=2
    ),
    "gemma2-no-hybrid": case(repeated(GEMMA2, 21), hybrid_manager=False),
    "gemma3-27b": case([*repeated(GEMMA3, 10), *[GEMMA3[0]] * 2], length=131072, batched=2048),
    "gemma3-retained": case(
        repeated(GEMMA3, 8), length=131072, batched=2048, retained_tokens=3, block_size=32
    ),
    "gemma3-no-hybrid": case(repeated(GEMMA3, 8), hybrid_manager=False, length=131072),
    "gemma4-two-head-sizes": case(repeated(GEMMA4, 10), length=262144, batched=2048),
    "gemma4-int8-padded": case(repeated(GEMMA4_INT8, 10), length=262144, batched=2048),
    "gemma4-no-hybrid": case(repeated(GEMMA4, 10), hybrid_manager=False),
    "gpt-oss": case(repeated(GPT_OSS, 18), length=131072),
    "gpt-oss-draft-13-12": case([*repeated(GPT_OSS, 12), heads(8, 64)], length=131072),
    "gpt-oss-draft-wider": case([*repeated(GPT_OSS, 12), heads(4, 160)], length=131072),
    "gpt-oss-too-long": case(repeated(GPT_OSS, 18), available=GIB, length=131072, batched=2048),
    "llama4": case(repeated(LLAMA4, 12), length=131072),
    "llama4-in-flight": case(repeated(LLAMA4, 12), length=131072, concurrent_batches=2),
    "llama4-no-hybrid": case(repeated(LLAMA4, 12), hybrid_manager=False, length=131072),
    "three-kinds": case(
        [heads(8, 128), heads(8, 128, SLIDING, window=512), heads(8, 128, CHUNKED, window=2048)]
        * 6,
        length=32768,
        batched=1024,
    ),
    "mla": case([latent_layer(576)] * 61, length=163840),
    "mla-fp8": case([latent_layer(576, kv_cache_dtype="fp8")] * 61, length=163840),
    "mla-int8-heads": case([latent_layer(576, kv_cache_dtype="int8_per_token_head")] * 27),
    "mla-block-64": case([latent_layer(576)] * 61, block_size=64, length=32768),
    "mla-sparse": case(SPARSE_MLA, block_size=64, length=400000, block_outermost=True),
    "mla-sparse-aligned": case(
        [*[latent_layer(576, alignment_bytes=1152)] * 30, *[indexer_layer(132)] * 9],
        block_size=64,
        block_outermost=True,
    ),
    "mla-aligned-layers": case([latent_layer(576, alignment_bytes=1000)] * 30),
    "mla-sliding-draft": case(
        [*[latent_layer(576)] * 30, *[heads(8, 128, SLIDING, window=2048)] * 2]
    ),
    "mla-sliding-draft-that-divides": case(
        [*[latent_layer(512)] * 30, *[heads(8, 128, SLIDING, window=2048)] * 2]
    ),
    "qwen3-next": case(repeated(QWEN_NEXT, 12), length=262144),
    "qwen3-next-no-prefix-caching": case(
        repeated(QWEN_NEXT, 12), length=262144, prefix_caching=False
    ),
    "qwen3-next-mtp": case(
        [*repeated(QWEN_NEXT, 12), heads(2, 256)], length=262144, speculative_tokens=3
    ),
    "qwen3-next-fp8": case(
        repeated((*QWEN_NEXT[:3], heads(2, 256, kv_cache_dtype="fp8")), 12), length=262144
    ),
    "qwen3-next-wide-draft": case([*repeated(QWEN_NEXT, 12), heads(8, 256)], length=262144),
    "qwen3-next-too-long": case(repeated(QWEN_NEXT, 12), available=GIB, length=262144),
    "nemotron-h": case(NEMOTRON, length=131072),
    "nemotron-h-no-prefix-caching": case(NEMOTRON, length=131072, prefix_caching=False),
    "kimi-linear": case(repeated(KIMI_LINEAR, 7), length=131072),
    "mamba-only": case([MAMBA2] * 64, prefix_caching=False),
    "mamba-two-states": case([state_layer(4096, 65536), state_layer(2048, 65536)] * 8),
    "mamba-sliding-full": case(
        [state_layer(30720, 524288), heads(4, 128, SLIDING, window=512), heads(4, 128)] * 6,
        length=65536,
        batched=1024,
    ),
    "pp2": pipelined([[heads(8, 128)] * 16] * 2, [30 * GIB, 31 * GIB]),
    "pp2-unequal": pipelined(
        [[heads(8, 128)] * 15, [heads(8, 128)] * 17], [30 * GIB, 20 * GIB], length=32768
    ),
    "pp2-gemma2": pipelined([GEMMA2 * 10, GEMMA2 * 11], [30 * GIB, 28 * GIB]),
    "pp2-gemma3-odd": pipelined(
        [[*repeated(GEMMA3, 4), *GEMMA3[:3]], [*GEMMA3[3:], *repeated(GEMMA3, 3)]],
        [8 * GIB, 9 * GIB],
        length=131072,
        batched=2048,
    ),
    "pp2-qwen3-next": pipelined([QWEN_NEXT * 6] * 2, [30 * GIB, 31 * GIB], length=262144),
    "pp2-two-widths": pipelined(
        [[heads(16, 64)] * 8, [heads(16, 128)] * 8], [10 * GIB, 12 * GIB], length=4096
    ),
    "pp2-too-long": pipelined([GEMMA3 * 4] * 2, [GIB, GIB // 2], length=131072, batched=2048),
}


def random_case(seed):
    """A random engine of up to three kinds of layers on one or two stages."""
    dice = random.Random(seed)
    dim = dice.choice([64, 80, 128, 256])
    kv_format = dice.choice(["auto", "fp8", "int8_per_token_head"])
    pool = [heads(dice.choice([1, 2, 8]), dim, kv_cache_dtype=kv_format)]
    for _ in range(dice.randint(0, 2)):
        kind = dice.choice([FULL, SLIDING, SLIDING, CHUNKED])
        window = dice.choice([128, 512, 1024, 4096]) if kind is not FULL else 0
        width = dim * dice.choice([1, 1, 1, 2])
        count = dice.choice([1, 2, 4, 8])
        pool.append(heads(count, width, kind, window=window, kv_cache_dtype=kv_format))
    if dice.random() < 0.3:
        pool.append(state_layer(dice.randint(1, 99999), dice.randint(1, 9999999)))
    pattern = [dice.choice(pool) for _ in range(dice.randint(1, 7))]
    if not any(layer.kind is FULL for layer in pattern):
        pattern.append(pool[0])
    stages = [pattern * dice.randint(1, 8) for _ in range(dice.choice([1, 1, 2]))]
    return pipelined(
        stages,
        [dice.randint(2**27, 2**35) for _ in stages],
        length=dice.randint(1, 200000),
        batched=dice.choice([512, 2048, 8192]),
        block_size=dice.choice([16, 32, 64, 128]),
        concurrent_batches=dice.choice([1, 2]),
        prefix_caching=dice.random() < 0.7,
        speculative_tokens=dice.choice([0, 0, 3]),
        hybrid_manager=dice.random() < 0.9,
    )
