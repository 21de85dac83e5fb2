"""Do bytes turn into blocks, tokens and requests as vLLM's logs say?

Figures marked with a log are what a real start printed; the rest is computed by hand beside the
assertion. That every rule equals the installed vLLM's is tested in tests/contract.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from rayserve.errors import SpecError
from rayserve.planner.kv.cache import (
    blocks_per_request,
    cache_layout,
    cache_rules,
)
from rayserve.planner.kv.groups import aligned_block_size
from rayserve.planner.kv.layers import (
    attention_layer,
    gated_delta_state_bytes,
    indexer_layer,
    latent_layer,
    layer_bytes_per_token,
    mamba2_state_bytes,
    state_layer,
)
from tests.unit.kv_layers import CHUNKED, V0_19, capacity, full, settings, sliding


def qwen36_state(tensor, speculative_tokens=0, value_heads=48):
    """Bytes of the states of a Qwen3.6 layer, whose recurrent state is float32."""
    return gated_delta_state_bytes(
        tensor=tensor,
        key_heads=16,
        value_heads=value_heads,
        key_dim=128,
        value_dim=128,
        conv_kernel=4,
        state_bytes=4,
        speculative_tokens=speculative_tokens,
    )


# ── logs: KV GiB in, printed figures out; GiB are printed with two digits ───────────────────────


def assert_log(got, gib, *, tokens=0, concurrency=0.0):
    """The printed tokens and concurrency, up to the rounding of the printed GiB."""
    slack = 0.006 / gib
    if tokens:
        assert got.printed_tokens == pytest.approx(tokens, rel=slack)
    assert got.max_concurrency == pytest.approx(concurrency, rel=slack + 0.006 / concurrency)


def test_log_grouped_queries():
    """Llama 3.3 70B, TP2, vLLM 0.19: 37.28 GiB are 244,304 tokens, 29.82 requests of 8,192."""
    got = capacity([full(8, 128, tensor=2)] * 80, 37.28, settings(rules=V0_19))
    assert_log(got, 37.28, tokens=244304, concurrency=29.82)


def test_log_fp8_cache():
    """Llama 3.1 8B with --kv-cache-dtype fp8: 58.11 GiB are 952,032 tokens."""
    layers = [full(8, 128, kv_cache_dtype="fp8")] * 32
    assert_log(capacity(layers, 58.11, settings()), 58.11, tokens=952032, concurrency=116.21)


def test_log_latent():
    """Kimi-VL, TP2, MLA not shared out: 54.78 GiB are 1,890,896 tokens."""
    got = capacity([latent_layer(576)] * 27, 54.78, settings(rules=V0_19))
    assert_log(got, 54.78, tokens=1890896, concurrency=230.82)


def test_log_latent_rounded_by_v0():
    """DeepSeek-R1 on 0.7.3: rows of 576 elements take 640, so 21.43 GiB are 18,418 blocks."""
    chosen = settings(length=128000, rules=cache_rules((0, 7)))
    got = capacity([latent_layer(576)] * 61, 21.43, chosen)
    assert got.num_blocks == pytest.approx(18418, rel=0.006 / 21.43)
    assert got.max_concurrency == pytest.approx(2.30, abs=0.006)


def test_log_half_of_the_layers_slide():
    """Gemma 2 9B, vLLM 0.19, two groups of 21: 54.12 GiB print 168,880 tokens and 20.60 requests."""
    layers = [sliding(8, 256, 4096), full(8, 256)] * 21
    got = capacity(layers, 54.12, settings(rules=V0_19))
    assert_log(got, 54.12, tokens=168880, concurrency=20.60)


def test_log_five_of_six_layers_slide():
    """Gemma 3 27B, vLLM 0.19, 52 sliding and 10 full layers in seven groups: 4.46 requests."""
    layers = [sliding(16, 128, 1024)] * 52 + [full(16, 128)] * 10
    chosen = settings(rules=V0_19)
    assert len(cache_layout([layers], chosen).groups) == 7
    assert_log(capacity(layers, 19.53, chosen), 19.53, tokens=36560, concurrency=4.46)


def test_log_chunked_attention():
    """Llama 4 Scout, TP4, vLLM 0.19, three chunked layers of four: 16.75 GiB, 44.68 requests."""
    chunked = attention_layer(CHUNKED, kv_heads=8, tensor=4, head_dim=128, window=8192)
    got = capacity([*[chunked] * 3, full(8, 128, tensor=4)] * 12, 16.75, settings(rules=V0_19))
    assert_log(got, 16.75, tokens=365968, concurrency=44.68)


def test_log_states_without_prefix_cache_would_differ():
    """Qwen3.6 35B A3B, fp8 KV, vLLM 0.24: 4.33 requests, by two state blocks in each of 3 groups."""
    state = state_layer(*qwen36_state(1, value_heads=32))
    layers = [*[state] * 3, full(2, 256, kv_cache_dtype="fp8")] * 10
    chosen = settings(length=131072, rules=cache_rules((0, 24)))
    got = capacity(layers, 5.98, chosen)
    assert (got.num_blocks, got.blocks_per_request) == (299, 69)
    assert (got.printed_tokens, round(got.max_concurrency, 2)) == (567978, 4.33)
    assert capacity(layers, 5.98, replace(chosen, prefix_caching=False)).blocks_per_request == 66


def test_log_states_with_draft_layer():
    """Qwen3.6 27B, TP4, fp8 KV, 3 MTP tokens: 15.72 GiB print 1,774,963 tokens and 6.77 requests."""
    attention = full(4, 256, tensor=4, kv_cache_dtype="fp8")
    layers = [*[state_layer(*qwen36_state(4, 3))] * 3, attention] * 16 + [attention]
    chosen = settings(length=262144, speculative_tokens=3, rules=cache_rules((0, 21)))
    got = capacity(layers, 15.72, chosen)
    assert cache_layout([layers], chosen).block_size == 1600
    assert (got.printed_tokens, round(got.max_concurrency, 2)) == (1774963, 6.77)


def test_log_states_with_scaled_keys():
    """Qwen3.6 27B, TP2, int8 KV, May 2026: 605,495 tokens at 2.31, as four MTP tokens give."""
    attention = full(4, 256, tensor=2, kv_cache_dtype="int8_per_token_head")
    layers = [*[state_layer(*qwen36_state(2, 4))] * 3, attention] * 16 + [attention]
    chosen = settings(length=262144, speculative_tokens=4, rules=cache_rules((0, 21)))
    got = capacity(layers, 11.1, chosen)
    assert (got.printed_tokens, round(got.max_concurrency, 2)) == (605495, 2.31)


def test_log_sparse_latent():
    """GLM-5.2, fp8_ds_mla, vLLM 0.23: 78 latent rows and 21 indexer rows; 28.85 GiB, 1.44 requests."""
    layers = [latent_layer(576, kv_cache_dtype="fp8_ds_mla")] * 78 + [indexer_layer(132)] * 21
    chosen = settings(
        length=400000, block_size=64, block_outermost=True, rules=cache_rules((0, 23))
    )
    assert_log(capacity(layers, 28.85, chosen), 28.85, tokens=574336, concurrency=1.44)


def test_log_two_head_sizes():
    """Gemma 4 31B, TP2, int8 KV, a nightly of May 2026: 466,892 tokens in 10.82 GiB."""
    int8 = {"tensor": 2, "kv_cache_dtype": "int8_per_token_head"}
    layers = [*[sliding(16, 256, 1024, **int8)] * 5, full(4, 512, **int8)] * 10
    chosen = settings(262144, 2048, concurrent_batches=2, rules=cache_rules((0, 21)))
    assert_log(capacity(layers, 10.82, chosen), 10.82, tokens=466892, concurrency=1.78)


# ── layers ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "kv_format, expected",
    [
        ("auto", 2 * 8 * 128 * 2),
        ("float32", 2 * 8 * 128 * 4),
        ("fp8_e4m3", 2 * 8 * 128),
        ("int8_per_token_head", 8 * (2 * 128 + 8)),
        ("int4_per_token_head", 8 * (128 + 8)),
        ("nvfp4", 8 * 2 * (64 + 8)),
        ("turboquant_k8v4", 8 * (128 + 64 + 4)),
        ("turboquant_3bit_nc", 8 * (48 + 2 + 48 + 4)),
    ],
)
def test_token_bytes_of_formats(kv_format, expected):
    """A token's bytes are those of its format, packed scales included."""
    assert layer_bytes_per_token(full(8, 128, kv_cache_dtype=kv_format)) == expected


@pytest.mark.parametrize(
    "layer, expected",
    [
        (latent_layer(576), 1152),
        (latent_layer(576, kv_cache_dtype="fp8"), 576),
        (latent_layer(576, kv_cache_dtype="fp8_ds_mla"), 656),
        (latent_layer(576, kv_cache_dtype="nvfp4_ds_mla"), 352),
        (latent_layer(576, kv_cache_dtype="int8_per_token_head"), 584),
        (indexer_layer(132), 132),
        (state_layer(1000, 2000), 0),
        (full(8, 128, shared=True), 0),
        (full(4, 192, head_dim_v=128), 4 * 320 * 2),
    ],
)
def test_token_bytes_of_kinds(layer, expected):
    """Latent rows have no values of their own; states and shared layers do not grow."""
    assert layer_bytes_per_token(layer) == expected


@pytest.mark.parametrize("kv_format", ["q4_0", "fp16", "ultraquant_4bit", ""])
def test_unknown_format_is_refused(kv_format):
    """A format whose packing is not known is named, not guessed."""
    with pytest.raises(SpecError, match="format"):
        full(8, 128, kv_cache_dtype=kv_format)
    with pytest.raises(SpecError, match="format"):
        latent_layer(576, kv_cache_dtype="nvfp4")


def test_states_of_uneven_groups_are_repeated():
    """Mamba-2 groups that the ranks do not divide are repeated, one a rank."""
    shapes = {"heads": 128, "head_dim": 64, "state_size": 128, "conv_kernel": 4}
    assert mamba2_state_bytes(tensor=1, groups=8, **shapes) == (
        (8192 + 2 * 8 * 128) * 3 * 2,
        128 * 64 * 128 * 4,
    )
    assert mamba2_state_bytes(tensor=16, groups=8, **shapes) == (
        (8192 + 2 * 16 * 128) // 16 * 3 * 2,
        8 * 64 * 128 * 4,
    )


# ── block size ──────────────────────────────────────────────────────────────────────────────────


def test_state_raises_the_block_size():
    """Qwen3-Next in bf16 on one GPU: a state of 1,097,728 bytes needs pages of 544 tokens."""
    state = gated_delta_state_bytes(
        tensor=1, key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv_kernel=4
    )
    layers = [state_layer(*state), full(2, 256)]
    assert sum(state) == 1097728
    assert aligned_block_size(layers, 16) == 544
    assert aligned_block_size(layers, 1024) == 1024
    assert aligned_block_size(layers, 16, (32,)) == 544
    assert aligned_block_size(layers, 16, (64, 48)) == 576
    assert aligned_block_size([full(2, 256)], 16) == 16


def test_latent_blocks_beside_states():
    """Beside states, MLA blocks are multiples of 128 tokens."""
    layers = [state_layer(0, 129 * 1152), latent_layer(576)]
    assert aligned_block_size(layers, 16) == 256


def test_state_takes_a_page_of_attention():
    """A state's page is padded to the attention page, and the waste is counted."""
    layout = cache_layout([[state_layer(1000), full(1, 64)]], settings())
    assert layout.block_size == 16
    assert [group.page_bytes for group in layout.groups] == [16 * 256, 16 * 256]


# ── groups ──────────────────────────────────────────────────────────────────────────────────────


def test_groups_are_strided():
    """Two sliding groups beside a full one take every other sliding layer, not the first half."""
    layers = [sliding(8, 64, 128), sliding(8, 64, 128), full(8, 64)] * 2
    groups = cache_layout([layers], settings()).groups
    assert [group.layers for group in groups] == [(0, 3), (1, 4), (2, 5)]


def test_nearly_equal_buckets_are_padded_to_the_larger():
    """13 full and 12 sliding layers are two groups; 18 and 12 are three, at the limit of 1.5."""
    pair = (full(8, 64), sliding(8, 64, 128))
    assert len(cache_layout([[full(8, 64), *pair * 12]], settings()).groups) == 2
    assert len(cache_layout([[*[full(8, 64)] * 6, *pair * 12]], settings()).groups) == 3


def test_smaller_page_gets_more_tokens():
    """A layer with half the bytes a token gets blocks of twice the tokens."""
    layout = cache_layout([[sliding(16, 256, 1024), full(4, 512)]], settings())
    assert [group.block_size for group in layout.groups] == [16, 32]
    assert len({group.page_bytes for group in layout.groups}) == 1


def test_layers_of_one_kind_and_two_widths_are_one_group():
    """Full layers of different widths share a block table; a block is one page of each."""
    layout = cache_layout([[full(8, 64), full(8, 128)]], settings())
    assert len(layout.groups) == 1
    assert layout.groups[0].page_bytes == 16 * (2048 + 4096) == layout.stage_block_bytes[0]


def test_shared_layers_take_nothing():
    """A layer that reads another's cache adds no bytes."""
    alone = cache_layout([[full(2, 256)]], settings())
    with_sharing = cache_layout([[full(2, 256), full(2, 256, shared=True)]], settings())
    assert alone == with_sharing


def test_without_hybrid_manager_every_layer_keeps_all():
    """Switched off, sliding layers take pages for the whole context; states cannot."""
    layers = [sliding(8, 128, 512), full(8, 128)] * 4
    on, off = settings(100000, 512), settings(100000, 512, hybrid_manager=False)
    assert blocks_per_request(cache_layout([layers], on), on, 100000) == 6250 + 64 + 1
    layout = cache_layout([layers], off)
    assert blocks_per_request(layout, off, 100000) == 6250
    assert layout.stage_block_bytes == (8 * 16 * 4096,)
    with pytest.raises(SpecError, match="hybrid"):
        cache_layout([[state_layer(1000), full(8, 128)]], off)


def test_several_windows_without_hybrid_manager_are_refused():
    """vLLM refuses two window sizes in one group; so do we, with both named."""
    layers = [sliding(8, 128, 512), sliding(8, 128, 1024), full(8, 128)]
    with pytest.raises(SpecError, match="512, 1024"):
        cache_layout([layers], settings(hybrid_manager=False))


def test_earlier_versions_had_no_groups():
    """Before 0.10, and in V0, a sliding layer kept the whole context."""
    layers = [sliding(8, 128, 512), full(8, 128)] * 4
    for version in ((0, 9), (0, 6)):
        chosen = settings(rules=cache_rules(version))
        assert len(cache_layout([layers], chosen).groups) == 1


def test_packing_that_is_not_modelled_is_refused():
    """Kinds with pages of several sizes in one block are said to be unknown."""
    layers = [sliding(8, 128, 512), full(4, 128), latent_layer(576)]
    with pytest.raises(SpecError, match="not modelled"):
        cache_layout([layers], settings(block_outermost=True))
    chunked = attention_layer(CHUNKED, kv_heads=8, tensor=1, head_dim=128, window=512)
    with pytest.raises(SpecError, match="made equal"):
        cache_layout([[latent_layer(576), chunked]], settings())


def test_states_in_v0_are_refused():
    """V0 kept states outside the cache, which is not modelled."""
    with pytest.raises(SpecError, match="V1"):
        cache_layout([[state_layer(1000), full(8, 128)]], settings(rules=cache_rules((0, 7))))


# ── requests ────────────────────────────────────────────────────────────────────────────────────


# ── properties ──────────────────────────────────────────────────────────────────────────────────
