"""What does each layer of an architecture keep of a request on one rank?"""

from __future__ import annotations

from collections.abc import Sequence

from rayserve.planner.kv.layers import (
    CacheKind,
    LayerCache,
    attention_layer,
    gated_delta_state_bytes,
    indexer_layer,
    latent_layer,
    mamba2_state_bytes,
    state_layer,
)
from rayserve.planner.weights import modules
from rayserve.planner.weights.architecture import Architecture
from rayserve.planner.weights.modules import Attention, State
from rayserve.planner.weights.stages import stage_range

KINDS = {
    modules.FULL: CacheKind.FULL,
    modules.SLIDING: CacheKind.SLIDING,
    modules.CHUNKED: CacheKind.CHUNKED,
}


def layer_caches(
    architecture: Architecture,
    *,
    tensor: int,
    pipeline: int,
    kv_cache_dtype: str = "auto",
    speculative_tokens: int = 0,
    draft: bool = False,
) -> list[list[LayerCache]]:
    """The caches of each pipeline stage's layers, in order; `draft`: with the model's own MTP layers.

    Raises:
        SpecError: the format's packing is not known for such a layer.
    """
    stages: list[list[LayerCache]] = []
    for stage in range(pipeline):
        span = stage_range(len(architecture.layers), pipeline, stage)
        layers = list(architecture.layers[span.start : span.stop])
        if draft and stage == pipeline - 1:
            layers += architecture.draft
        stages.append(
            [
                cache
                for layer in layers
                for cache in _kept(
                    layer.attention,
                    tensor,
                    kv_cache_dtype,
                    architecture.element_bytes,
                    speculative_tokens,
                )
            ]
        )
    return stages


def _kept(
    attention: Attention, tensor: int, kv_cache_dtype: str, element: int, guessed: int
) -> Sequence[LayerCache]:
    if attention.kind == modules.NONE:
        return ()
    if attention.kind == modules.MLA:
        latent = latent_layer(
            attention.latent_size + attention.rope_size,
            kv_cache_dtype=kv_cache_dtype,
            model_bytes=element,
        )
        row = attention.index_size
        return (latent, indexer_layer(row)) if row else (latent,)
    states: tuple[LayerCache, ...] = ()
    if attention.state is not None:
        states = (_states(attention.kind, attention.state, tensor, element, guessed),)
        if attention.kind not in KINDS:
            return states
    return (
        *states,  # of a layer that has both
        attention_layer(
            KINDS[attention.kind],
            kv_heads=attention.kv_heads,
            tensor=tensor,
            head_dim=attention.key_size,
            head_dim_v=attention.value_size,
            kv_cache_dtype=kv_cache_dtype,
            model_bytes=element,
            window=attention.window,
            shared=attention.shares_cache_of >= 0,
        ),
    )


def _states(kind: str, state: State, tensor: int, element: int, guessed: int) -> LayerCache:
    if kind != modules.LINEAR:
        sizes = mamba2_state_bytes(
            tensor=tensor,
            heads=state.heads,
            head_dim=state.head_size,
            state_size=state.state_size,
            groups=state.key_heads,
            conv_kernel=state.conv_kernel,
            conv_bytes=element,
            state_bytes=state.element_bytes or element,
            speculative_tokens=guessed,
        )
        return state_layer(*sizes, checkpoint_blocks=1)
    sizes = gated_delta_state_bytes(
        tensor=tensor,
        key_heads=state.key_heads,
        value_heads=state.heads,
        key_dim=state.state_size,
        value_dim=state.head_size,
        conv_kernel=state.conv_kernel,
        conv_bytes=element,
        state_bytes=state.element_bytes or element,
        speculative_tokens=guessed,
    )
    return state_layer(*sizes)
