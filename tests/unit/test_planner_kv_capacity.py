"""How many blocks does a request take, and how many tokens does the cache hold?"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as tries
from hypothesis import strategies as st

from rayserve.errors import SpecError
from rayserve.planner.kv.cache import (
    blocks_per_request,
    cache_capacity,
    cache_layout,
    cache_rules,
    concurrent_batches,
    max_concurrency,
)
from rayserve.planner.kv.layers import (
    LayerCache,
    attention_layer,
    state_layer,
)
from rayserve.units import GIB
from tests.unit.kv_layers import CHUNKED, FULL, SLIDING, V0_19, capacity, full, settings, sliding


@pytest.mark.parametrize(
    "layer, length, expected",
    [
        (full(8, 128), 1, 1),
        (full(8, 128), 17, 2),
        (sliding(8, 128, 1024), 100, 7 + 1),
        (sliding(8, 128, 1024), 100000, -(-(1023 + 512) // 16) + 1),
        (attention_layer(CHUNKED, kv_heads=8, tensor=1, head_dim=128, window=1024), 9999, 96),
        (state_layer(1000), 100000, 2),
        (state_layer(1000, checkpoint_blocks=1), 100000, 3),
    ],
)
def test_blocks_of_a_request(layer, length, expected):
    """A window keeps itself, the step in flight and one block more; a chunk no more block."""
    chosen = settings(batched=512)
    assert blocks_per_request(cache_layout([[layer]], chosen), chosen, length) == expected


def test_batches_in_flight_keep_their_windows():
    """Asynchronous scheduling keeps a window for one step more, from 0.21."""
    assert concurrent_batches(async_scheduling=True, pipeline=1, v2_runner=False) == 2
    assert concurrent_batches(async_scheduling=True, pipeline=2, v2_runner=False) == 2
    assert concurrent_batches(async_scheduling=True, pipeline=2, v2_runner=True) == 3
    assert concurrent_batches(async_scheduling=False, pipeline=2, v2_runner=True) == 2
    layers = [sliding(8, 128, 1024)]
    new = settings(batched=512, concurrent_batches=2)
    old = replace(new, rules=V0_19)
    assert blocks_per_request(cache_layout([layers], new), new, 100000) == 2047 // 16 + 2
    assert blocks_per_request(cache_layout([layers], old), old, 100000) == 1535 // 16 + 2


def test_context_parallel_multiplies_tokens():
    """Four ranks that share out the tokens hold four times as many; windows cannot be shared."""
    one, four = settings(8192), settings(8192, context_parallel=4)
    layers = [full(8, 128)] * 4
    assert capacity(layers, 1, four).printed_tokens == 4 * capacity(layers, 1, one).printed_tokens
    with pytest.raises(SpecError, match="context_parallel"):
        cache_layout([[sliding(8, 128, 512), full(8, 128)]], four)


def test_poorest_stage_decides():
    """With a pipeline, blocks are those of the stage that holds the fewest."""
    chosen = settings()
    layout = cache_layout([[full(8, 128)] * 16, [full(8, 128)] * 17], chosen)
    first, second = layout.stage_block_bytes
    assert (first, second) == (16 * 65536, 17 * 65536)
    got = cache_capacity(layout, [1000 * first, 900 * second], chosen)
    assert got.num_blocks == 900
    assert got.request_bytes == (512 * first, 512 * second)
    with pytest.raises(SpecError, match="2 pipeline stages"):
        cache_capacity(layout, [GIB], chosen)


def test_null_block_is_never_lent():
    """Bytes for exactly one request are one block short, and the proposal is what remains."""
    chosen = settings(length=160)
    layout = cache_layout([[full(8, 128)]], chosen)
    block = layout.stage_block_bytes[0]
    exact = cache_capacity(layout, [10 * block], chosen)
    assert (exact.fits, exact.estimated_max_model_len) == (False, 144)
    more = cache_capacity(layout, [11 * block], chosen)
    assert (more.fits, more.estimated_max_model_len, more.num_blocks) == (True, 160, 11)


@pytest.mark.parametrize("available", [0, -GIB, 1])
def test_no_bytes_hold_nothing(available):
    """Without bytes there is no block, no request, and no length to propose."""
    chosen = settings()
    got = cache_capacity(cache_layout([[full(8, 128)]], chosen), [available], chosen)
    assert (got.num_blocks, got.fits, got.estimated_max_model_len) == (0, False, 0)
    assert got.max_concurrency == 0


def test_model_without_cache():
    """A model that keeps nothing fits, and its concurrency has no limit."""
    chosen = settings()
    got = cache_capacity(cache_layout([[]], chosen), [0], chosen)
    assert (got.num_blocks, got.fits, got.printed_tokens) == (1, True, 0)
    assert got.max_concurrency == math.inf


def test_stage_that_keeps_nothing_is_refused():
    """A pipeline stage without a cache layer is named: vLLM would divide by zero there."""
    with pytest.raises(SpecError, match="stage 2 of 2"):
        cache_layout([[full(8, 128)], [full(8, 128, shared=True)]], settings())


def test_override_decides():
    """num_gpu_blocks_override sets the blocks, and the check counts with them."""
    chosen = settings(length=1600, blocks_override=50)
    got = capacity([full(8, 128)] * 4, 1000, chosen)
    assert (got.num_blocks, got.max_concurrency, got.fits) == (50, 0.5, False)
    assert got.estimated_max_model_len == 49 * 16


def test_printed_tokens_changed_with_0_21():
    """Of the same bytes, a hybrid printed blocks // groups x block size until 0.20."""
    layers = [*[sliding(8, 256, 1024)] * 5, full(8, 256)] * 8
    new = settings(131072, 2048)
    old = replace(new, rules=cache_rules((0, 20)))
    assert capacity(layers, 20, new).num_blocks == capacity(layers, 20, old).num_blocks == 20480
    assert capacity(layers, 20, old).printed_tokens == 20480 // 6 * 16
    # One request: 131072 / 16 blocks, and 5 windows of ceil((1023 + 2048) / 16) + 1.
    assert capacity(layers, 20, new).printed_tokens == int(20480 / (8192 + 5 * 193) * 131072)


some_layers = st.lists(
    st.sampled_from(
        [
            full(8, 128),
            full(2, 256),
            sliding(8, 128, 512),
            sliding(4, 128, 4096),
            attention_layer(CHUNKED, kv_heads=8, tensor=1, head_dim=128, window=2048),
            state_layer(20000, 500000),
        ]
    ),
    min_size=1,
    max_size=40,
)


@tries(deadline=None)  # a loaded machine is not a failure
@given(some_layers, st.integers(1, 60000), st.integers(0, 2**34))
def test_longest_request_is_the_longest(layers, length, available):
    """The proposed length fits, and one token more does not."""
    chosen = settings(length=length)
    layout = cache_layout([layers], chosen)
    longest = cache_capacity(layout, [available], chosen).estimated_max_model_len
    assert 0 <= longest <= length
    usable = available - layout.stage_block_bytes[0]

    def needs(tokens: int) -> int:
        return layout.stage_block_bytes[0] * blocks_per_request(layout, chosen, tokens)

    assert longest == 0 or needs(longest) <= usable
    assert longest == length or needs(longest + 1) > usable


@tries(deadline=None)  # a loaded machine is not a failure
@given(some_layers, st.integers(1, 60000))
def test_every_layer_is_in_one_group(layers, length):
    """Groups hold each layer once, with pages of one size, and a block holds the widest group."""
    layout = cache_layout([layers], settings(length=length))
    assert sorted(i for group in layout.groups for i in group.layers) == list(range(len(layers)))
    widths = [sum(spec.page_bytes for spec in group.specs) for group in layout.groups]
    assert layout.stage_block_bytes == (max(widths),)
    if len(layout.groups) > 1:
        assert {group.page_bytes for group in layout.groups} == {layout.page_bytes}


@tries(deadline=None)  # a loaded machine is not a failure
@given(some_layers, st.integers(2, 60000))
def test_longer_requests_are_never_more(layers, length):
    """Concurrency does not rise with the length."""
    chosen = settings(length=length)
    layout = cache_layout([layers], chosen)
    shorter = max_concurrency(layout, 1000, chosen, length // 2)
    assert shorter >= max_concurrency(layout, 1000, chosen, length)


def test_layers_are_plain_values():
    """A layer is hashable and equal by its figures, so that plans can be compared."""
    assert full(8, 128) == full(8, 128)
    assert hash(full(8, 128)) == hash(full(8, 128))
    assert LayerCache(kind=FULL) != LayerCache(kind=SLIDING)
