"""Is a KV cache of as many blocks as `num_gpu_blocks_override` says planned as vLLM allocates it?"""

from __future__ import annotations

import json
import re

import pytest

from rayserve.errors import DoesNotFitError, SpecError
from rayserve.plan import Plan
from tests.plans import planned
from tests.unit.test_planner_remedies import (
    CONFIGS,
    LARGE,
    SMALL,
    length,
    plan,
    refusal,
    surely,
    text,
    value,
)

WHERE = ("L4-24GB", 1)
UNKNOWN = {**SMALL, "architectures": ["ArceeForCausalLM"], "model_type": "arcee"}


def fixed(blocks: int) -> str:
    """The sections that ask for so many blocks, and a context of 512 of them."""
    return f"  engine_args: {{num_gpu_blocks_override: {blocks}}}\n{length(8192)}"


def numbers(do: str) -> list[int]:
    """The numbers of blocks that a remedy tells."""
    return [int(found) for found in re.findall(r"(\d{3,})", do)]


def test_blocks_beyond_memory_are_refused_with_the_most_that_fit():
    """vLLM would run out of memory: the first number told fits, the second may, one more cannot."""
    do = refusal(SMALL, *WHERE, add=fixed(10**15))
    sure, best = numbers(do)
    assert "at the very best" in do
    assert surely(plan(SMALL, *WHERE, add=fixed(sure)))
    assert plan(SMALL, *WHERE, add=fixed(best)).memory.verdict.startswith("within")
    assert numbers(refusal(SMALL, *WHERE, add=fixed(best + 1))) == [sure, best]


def test_too_few_blocks_are_refused_with_the_fewest_that_hold_one_request():
    """512 blocks of a request and the null block; one fewer is refused."""
    do = refusal(SMALL, *WHERE, add=fixed(100))
    least, most = numbers(do)
    assert least == 8192 // 16 + 1
    for blocks in (least, most):
        assert plan(SMALL, *WHERE, add=fixed(blocks)).memory
    assert refusal(SMALL, *WHERE, add=fixed(least - 1)) == do


def test_fewer_blocks_than_there_is_room_for_make_a_smaller_cache():
    """Tokens and sequences follow the blocks, not the memory; so do the bytes of the account."""

    def cached(made: Plan) -> tuple[int, int]:
        return made.memory.kv_tokens, made.memory.kv_bytes

    free = plan(SMALL, "A100-80GB-SXM", 8, add=length(8192))
    few = plan(SMALL, "A100-80GB-SXM", 8, add=fixed(2000))
    tokens, size = cached(few)
    assert tokens == 2000 * 16
    assert size == 2000 * 16 * few.memory.kv_bytes_per_token
    assert cached(free)[0] > tokens
    assert value(free, "max_num_seqs") > value(few, "max_num_seqs") >= 1


def test_blocks_are_counted_on_every_stage():
    """A pipeline of two hosts: what the remedy tells fits there too."""
    where = ("A100-80GB-SXM", 8, 2)
    sure, best = numbers(refusal(LARGE, *where, add=fixed(10**9)))
    assert surely(plan(LARGE, *where, add=fixed(sure)))
    assert plan(LARGE, *where, add=fixed(best)).memory
    assert refusal(LARGE, *where, add=fixed(best + 1))


@pytest.mark.parametrize("blocks", [100, 10**15])
def test_blocks_of_an_unknown_architecture_are_bounded_too(blocks):
    """Blocks of 16 tokens of the widths: what is told plans."""

    def sized(blocks: int) -> Plan:
        sum_of_it = f"config.json, checkpoint_bytes: {15 * 2**30}"
        return planned(text(*WHERE, add=fixed(blocks)).replace("config.json", sum_of_it), UNKNOWN)

    with pytest.raises(DoesNotFitError, match="num_gpu_blocks_override") as caught:
        sized(blocks)
    told = numbers(caught.value.do)
    assert told
    for one in told:
        assert sized(one).memory.model == "simple"


def test_where_no_number_of_blocks_helps_it_is_told_to_write_none():
    """A request that no cache of this GPU holds needs the usual remedy, and no override."""
    add = "  engine_args: {num_gpu_blocks_override: 10000}\n" + length(131072)
    do = refusal(SMALL, *WHERE, add=add)
    assert do.startswith("remove engine_args.num_gpu_blocks_override, and write max_model_len: ")
    assert plan(SMALL, *WHERE, add=length(numbers(do)[0])).memory


# ── block_size ──────────────────────────────────────────────────────────────────────────────────

DEEPSEEK = json.loads((CONFIGS / "deepseek-v3.json").read_text())
SPARSE = {**DEEPSEEK, "architectures": ["DeepseekV32ForCausalLM"],
    "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128
}  # fmt: skip


@pytest.mark.parametrize(
    "model, where, add, size, told",
    [
        (SMALL, WHERE, "", 1, [16]),
        (SMALL, WHERE, "", 8, [16]),
        (SMALL, WHERE, "", 100, [96, 112]),
        (SMALL, ("B200-180GB-SXM", 1), "", 40, [32, 48]),
        (DEEPSEEK, ("H200-141GB-SXM", 8), "", 100, [96, 112]),
        (DEEPSEEK, ("H200-141GB-SXM", 8), ", attention_backend: FLASHMLA", 96, [64, 128]),
        (SPARSE, ("H200-141GB-SXM", 8), "", 96, [64, 128]),
    ],
)
def test_a_block_that_no_attention_backend_takes_is_refused_with_the_nearest(
    model, where, add, size, told
):
    """Blocks are multiples of what a kernel of the GPU takes; what is told plans."""

    def sized(size: int) -> Plan:
        return plan(model, *where, add=f"  engine_args: {{block_size: {size}{add}}}\n")

    with pytest.raises(SpecError, match=f"found: {size}") as raised:
        sized(size)
    assert raised.value.where.key.endswith("engine_args.block_size")
    found = raised.value.do.removeprefix("write ").removesuffix(", or remove it")
    assert [int(one) for one in found.split(" or ")] == told
    for one in told:
        assert value(sized(one), "block_size") == one
