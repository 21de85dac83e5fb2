"""What does one layer of a model keep in a rank's cache?

Attention keeps keys and values of every token (or of a window of them), MLA one latent vector, a
recurrent layer (Mamba, gated delta net and their kin) states whose size does not depend on the
length. Sizes follow vllm/v1/kv_cache_interface.py, vllm/model_executor/layers/mamba/mamba_utils.py
and the attention backends' `customize_spec`, as of vLLM 0.32.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rayserve.errors import SpecError
from rayserve.planner.weights.modules import local_kv_heads

BYTE_FORMATS = frozenset({"fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "int8"})
"""One byte an element; the scales are a layer's, and no part of the cache."""
ELEMENT_BYTES = {"float32": 4, "float": 4, "half": 2, "float16": 2, "bfloat16": 2}
LATENT_TOKEN_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
"""Packed MLA formats: one opaque row a token, whatever the latent size (MLAAttention)."""
PER_TOKEN_HEAD_BITS = {"int4_per_token_head": 4, "int8_per_token_head": 8, "fp8_per_token_head": 8}
"""Each head of each token carries two fp32 scales beside its data."""
TURBOQUANT_BITS = {
    "turboquant_k8v4": (8, 4),
    "turboquant_4bit_nc": (4, 4),
    "turboquant_k3v4_nc": (3, 4),
    "turboquant_3bit_nc": (3, 3),
}
"""Bits of a key's and of a value's element (quantization/turboquant/config.py)."""
NVFP4_FORMATS = frozenset({"nvfp4", "nvfp4_4over6"})
SCALE_PAIR_BYTES = 8


class CacheKind(StrEnum):
    """How a layer's cache grows with the length of a request."""

    FULL = "full"
    """Keys and values of every token."""
    SLIDING = "sliding"
    """Keys and values of the last `window` tokens."""
    CHUNKED = "chunked_local"
    """Keys and values of the current chunk of `window` tokens."""
    MLA = "mla"
    """One latent vector of every token."""
    MAMBA = "mamba"
    """States of a fixed size."""


@dataclass(frozen=True)
class LayerCache:
    """What one layer keeps on one rank.

    Layers that compare equal share a cache group; so `format` and the head sizes matter also where
    the bytes are the same.
    """

    kind: CacheKind
    kv_heads: int = 1
    """Heads on the rank, replicas included."""
    head_dim: int = 0
    head_dim_v: int = 0
    """Elements of a value; 0 for MLA, whose one vector holds both."""
    format: str = "auto"
    """`--kv-cache-dtype` of this layer."""
    content_bytes: int = 0
    """Bytes of a head and token, keys, values and packed scales together."""
    window: int = 0
    """Tokens of the sliding window or of the chunk."""
    state_bytes: tuple[int, ...] = ()
    """Bytes of each state of a recurrent layer, e.g. convolution and SSM."""
    checkpoint_blocks: int = 0
    """Blocks that a recurrent layer adds for a checkpoint of its prefill (Mamba-2 only)."""
    alignment_bytes: int = 1
    """Distance between blocks is a multiple of this (sparse MLA backends)."""
    shared: bool = False
    """Reads the cache of an earlier layer, and takes nothing."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token; 0 for a recurrent layer, whose cache does not grow."""
        return 0 if self.kind is CacheKind.MAMBA else self.kv_heads * self.content_bytes


def layer_bytes_per_token(layer: LayerCache) -> int:
    """Bytes that one more token takes in this layer; 0 where it takes nothing.

    A sliding or chunked layer takes them only until its window is full.
    """
    return 0 if layer.shared else layer.token_bytes


def attention_layer(
    kind: CacheKind,
    *,
    kv_heads: int,
    tensor: int,
    head_dim: int,
    head_dim_v: int | None = None,
    kv_cache_dtype: str = "auto",
    model_bytes: int = 2,
    window: int = 0,
    shared: bool = False,
) -> LayerCache:
    """A layer with keys and values: `kv_heads` of the model on `tensor` ranks.

    `model_bytes` is the element size of the model's dtype, which `auto` stands for.

    Raises:
        SpecError: the format's packing is not known for such a layer.
    """
    value = head_dim if head_dim_v is None else head_dim_v
    return LayerCache(
        kind=kind,
        kv_heads=local_kv_heads(kv_heads, tensor),
        head_dim=head_dim,
        head_dim_v=value,
        format=kv_cache_dtype,
        content_bytes=_content_bytes(kv_cache_dtype, head_dim, value, model_bytes),
        window=window,
        shared=shared,
    )


def latent_layer(
    latent_dim: int, *, kv_cache_dtype: str = "auto", model_bytes: int = 2, alignment_bytes: int = 1
) -> LayerCache:
    """An MLA layer: `latent_dim` = kv_lora_rank + qk_rope_head_dim, whole on every tensor rank.

    Raises:
        SpecError: MLA cannot keep this format.
    """
    packed = LATENT_TOKEN_BYTES.get(kv_cache_dtype)
    if kv_cache_dtype in NVFP4_FORMATS or kv_cache_dtype in TURBOQUANT_BITS:
        raise _unknown_format(kv_cache_dtype)
    return LayerCache(
        kind=CacheKind.MLA,
        head_dim=latent_dim,
        format=kv_cache_dtype,
        content_bytes=packed or _content_bytes(kv_cache_dtype, latent_dim, 0, model_bytes),
        alignment_bytes=alignment_bytes,
    )


def indexer_layer(row_bytes: int) -> LayerCache:
    """The key cache of a sparse-attention indexer (DeepSeek V3.2, GLM-5): fp8 keys and scales."""
    return LayerCache(
        kind=CacheKind.MLA, head_dim=row_bytes, format="indexer", content_bytes=row_bytes
    )


def state_layer(*state_bytes: int, checkpoint_blocks: int = 0) -> LayerCache:
    """A recurrent layer with these states; Mamba-2 has one checkpoint block."""
    return LayerCache(
        kind=CacheKind.MAMBA, state_bytes=state_bytes, checkpoint_blocks=checkpoint_blocks
    )


def gated_delta_state_bytes(
    *,
    tensor: int,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    conv_kernel: int,
    conv_bytes: int = 2,
    state_bytes: int = 2,
    speculative_tokens: int = 0,
) -> tuple[int, int]:
    """Bytes of the convolution and of the recurrent state of a gated delta net on one rank.

    Qwen3-Next and Qwen3.5 (MambaStateShapeCalculator.gated_delta_net_state_shape). `conv_bytes` and
    `state_bytes` are element sizes; `mamba_ssm_dtype: float32` of a config.json makes the latter 4.
    """
    channels = (2 * key_dim * key_heads + value_dim * value_heads) // tensor
    convolution = channels * (conv_kernel - 1 + speculative_tokens) * conv_bytes
    return convolution, value_heads // tensor * value_dim * key_dim * state_bytes


def mamba2_state_bytes(
    *,
    tensor: int,
    heads: int,
    head_dim: int,
    state_size: int,
    groups: int,
    conv_kernel: int,
    conv_bytes: int = 2,
    state_bytes: int = 4,
    speculative_tokens: int = 0,
) -> tuple[int, int]:
    """Bytes of the convolution and of the SSM state of a Mamba-2 mixer on one rank.

    Nemotron-H, Granite 4 and others (MambaStateShapeCalculator.mamba2_state_shape). Groups that
    the ranks do not divide evenly are repeated. Nemotron-H keeps the SSM state in float32 unless
    its config.json says otherwise; others in the model's dtype.
    """
    repeated = groups if groups % tensor == 0 else tensor
    channels = (heads * head_dim + 2 * repeated * state_size) // tensor
    convolution = channels * (conv_kernel - 1 + speculative_tokens) * conv_bytes
    return convolution, heads // tensor * head_dim * state_size * state_bytes


def _content_bytes(kv_format: str, head_dim: int, head_dim_v: int, model_bytes: int) -> int:
    """Bytes of one head of one token in a format."""
    elements = head_dim + head_dim_v
    if kv_format == "auto":
        return elements * model_bytes
    if kv_format in ELEMENT_BYTES:
        return elements * ELEMENT_BYTES[kv_format]
    if kv_format in BYTE_FORMATS:
        return elements
    if kv_format in PER_TOKEN_HEAD_BITS:
        halves = 2 if PER_TOKEN_HEAD_BITS[kv_format] == 4 else 1
        return head_dim // halves + head_dim_v // halves + SCALE_PAIR_BYTES
    if kv_format in NVFP4_FORMATS:
        return 2 * (head_dim // 2 + head_dim // 16)
    if kv_format in TURBOQUANT_BITS:
        key_bits, value_bits = TURBOQUANT_BITS[kv_format]
        # A quantized key carries its fp16 norm, a value its fp16 scale and zero point.
        key = head_dim if key_bits == 8 else -(-head_dim * key_bits // 8) + 2
        slot = key + -(-head_dim * value_bits // 8) + 4
        return slot + slot % 2
    raise _unknown_format(kv_format)


def _unknown_format(kv_format: str) -> SpecError:
    known = [*ELEMENT_BYTES, *sorted(BYTE_FORMATS), *PER_TOKEN_HEAD_BITS, *LATENT_TOKEN_BYTES]
    return SpecError(
        "a KV cache format whose packing is known for this kind of attention",
        found=f"`{kv_format}`",
        do=f"write auto, or one of: {', '.join(known)}",
    )
