"""What of a model follows from its shapes alone, where its layers are not known?

How a known sum of weights is cut over ranks, and bounds of what adapters, a draft model and the KV
cache take. memory/bounded.py adds the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayserve.planner.kv.layers import CacheKind, LayerCache, attention_layer, latent_layer
from rayserve.planner.memory.ranges import Range
from rayserve.planner.profile import ModelProfile
from rayserve.planner.weights.checkpoint import rank_bounds

KV_BYTES = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Cut:
    """How one replica is cut."""

    tensor: int
    pipeline: int

    def stage_layers(self, layers: int) -> int:
        """Layers of the largest stage."""
        return -(-layers // self.pipeline)


def layer_weights(profile: ModelProfile, cut: Cut, *, experts: bool) -> int:
    """Weights (not bytes) of one layer's linear parts on one rank. KV heads are copied to ranks
    beyond their number, as vLLM does.
    """
    tp = cut.tensor
    kv_heads = max(1, profile.kv_heads // tp)
    attention = profile.hidden * profile.head_dim * (2 * profile.heads // tp + 2 * kv_heads)
    if not experts:
        return attention + 3 * profile.hidden * profile.intermediate // tp
    width = profile.experts * profile.expert_intermediate + profile.shared_intermediate
    return attention + 3 * profile.hidden * width // tp + profile.hidden * profile.experts


def weights_bytes(profile: ModelProfile, cut: Cut, checkpoint_bytes: int) -> int:
    """Bytes of weights on the fullest rank: the first or last stage, which has the vocabulary.

    With `checkpoint_bytes` only the split follows from the shapes.
    """
    if checkpoint_bytes:
        whole = _from_shapes(profile, Cut(1, 1))
        share = _from_shapes(profile, cut) / whole if not profile.latent_dim else 0
        return int(checkpoint_bytes * max(share, 1 / (cut.tensor * cut.pipeline)))
    return int(_from_shapes(profile, cut))


def weights_range(profile: ModelProfile, cut: Cut, checkpoint_bytes: int) -> Range:
    """Bytes of weights on the fullest rank, of a checkpoint whose sum is known.

    Expected is the share that the shapes tell; certain is only that a rank holds at least an even
    share, and at most everything.

    Raises:
        ValueError: the sum is not known.
    """
    if checkpoint_bytes <= 0:
        raise ValueError("the sum of the weights is needed")
    low, high = rank_bounds(checkpoint_bytes, cut.tensor * cut.pipeline)
    expected = min(max(low, weights_bytes(profile, cut, checkpoint_bytes)), high)
    return Range(low, expected, high, "the checkpoint's sum, from an even share to all of it")


def _from_shapes(profile: ModelProfile, cut: Cut) -> float:
    layers = cut.stage_layers(profile.layers)
    dense = layers if not profile.experts else min(profile.dense_layers, layers)
    linear = dense * layer_weights(profile, cut, experts=False)
    linear += (layers - dense) * layer_weights(profile, cut, experts=True)
    copies = 1 if profile.tied_embeddings or cut.pipeline > 1 else 2
    vocabulary = copies * profile.padded_vocab * profile.hidden / cut.tensor
    norms = layers * 2 * profile.hidden
    return linear * profile.weight_bits / 8 + (vocabulary + norms) * profile.dtype_bits / 8


def lora_bytes(profile: ModelProfile, cut: Cut, *, slots: int, rank: int) -> int:
    """Bytes of the slots that vLLM keeps for LoRA adapters, on one rank of the largest stage.

    slots x rank x (in + out) x element size of each linear layer that an adapter may change. The side
    that tensor parallelism does not cut is whole on every rank (vllm/lora/layers/base_linear.py).
    """
    tp, hidden = cut.tensor, profile.hidden
    queries = profile.heads * profile.head_dim
    keys = max(1, profile.kv_heads // tp) * profile.head_dim

    def mlp(width: int) -> float:
        # gate and up are cut by their outputs, down by its inputs
        return 2 * (hidden + width / tp) + (width / tp + hidden)

    attention = (hidden + queries / tp) + 2 * (hidden + keys) + (queries / tp + hidden)
    experts = profile.experts * mlp(profile.expert_intermediate) + mlp(profile.shared_intermediate)
    layers = cut.stage_layers(profile.layers)
    dense = layers if not profile.experts else min(profile.dense_layers, layers)
    sides = layers * attention + dense * mlp(profile.intermediate)
    sides += (layers - dense) * experts if profile.experts else 0
    sides += 2 * (hidden + profile.padded_vocab)  # vocabulary in and out, whole: a bound
    return int(slots * rank * sides * profile.dtype_bits / 8)


def draft_bytes(profile: ModelProfile, cut: Cut) -> int:
    """Bytes of the draft model's weights on one rank: it is cut over the ranks of one stage alone."""
    return 0 if profile.draft is None else weights_bytes(profile.draft, Cut(cut.tensor, 1), 0)


def kv_bytes_per_token(profile: ModelProfile, cut: Cut, kv_cache_dtype: str) -> int:
    """Bytes of KV cache a token on one rank of the largest stage, with those of a draft model.

    Layers x KV heads of the rank x head size x 2 (keys, values) x element size; for MLA, layers x
    latent size x element size, the same on every rank (vllm/v1/kv_cache_interface.py).
    """
    element = KV_BYTES.get(kv_cache_dtype, profile.dtype_bits // 8)
    layers = cut.stage_layers(profile.layers)
    draft = 0
    if profile.draft is not None:
        draft = kv_bytes_per_token(profile.draft, Cut(cut.tensor, 1), kv_cache_dtype)
    if profile.latent_dim:
        return layers * profile.latent_dim * element + draft
    heads = max(1, profile.kv_heads // cut.tensor)
    return layers * heads * profile.head_dim * 2 * element + draft


def draft_caches(profile: ModelProfile, cut: Cut, kv_cache_dtype: str) -> tuple[LayerCache, ...]:
    """What each layer of the draft model keeps; empty: there is none."""
    draft = profile.draft
    if draft is None:
        return ()
    element = draft.dtype_bits // 8
    if draft.latent_dim:
        layer = latent_layer(draft.latent_dim, kv_cache_dtype=kv_cache_dtype, model_bytes=element)
    else:
        layer = attention_layer(
            CacheKind.FULL,
            kv_heads=draft.kv_heads,
            tensor=cut.tensor,
            head_dim=draft.head_dim,
            kv_cache_dtype=kv_cache_dtype,
            model_bytes=element,
        )
    return (layer,) * draft.layers
