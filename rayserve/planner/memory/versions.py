"""What does each vLLM version do with GPU memory? Its defaults, and how it turns memory into tokens.

Read in the installed vLLM 0.32 and in the wheels of earlier releases; where only start-up logs tell,
the fact says so. Between two wheels that were read, a change is dated to the later one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum

from rayserve.engine import VLLM_VERSION
from rayserve.units import GIB

Number = tuple[int, int]

FIRST_V1: Number = (0, 8)
"""The V1 engine is the default from 0.8; logs of models that it did not take yet say V0."""
NO_SORT: Number = (0, 17)
"""From here top-k and top-p are a kernel over the logits; before, the whole vocabulary was sorted."""
KEPT_WORKSPACE: Number = (0, 12)
"""From here the buffers of the experts stay allocated between layers and steps."""
GRAPHS_COUNTED: Number = (0, 20)
"""From here the estimate for CUDA graphs is taken off the KV cache; its log dates it to 0.21."""
TOKENS_FROM_CONCURRENCY: Number = (0, 21)
CONSUMED: Number = (0, 27)
"""From here weights and everything else that stays are one measured number, "consumed memory"."""

SECOND_RUNNER: Number = (0, 31)
"""From here, or somewhat earlier, runner V2 is the default: the source of 0.32 says so, and logs of up
to 0.26 have the peak of runner V1."""


class Runner(StrEnum):
    """Which code runs a step, and so which buffers live at the peak of its profile run."""

    V0 = "V0"
    V1 = "V1"
    EITHER = "V1 or V2"
    """Versions whose default is not known here: either runner may profile."""
    V2 = "V2"


class Usage(StrEnum):
    """What vLLM's defaults of a step depend on, beside the GPU."""

    SERVER = "vllm serve"
    LIBRARY = "the LLM class"


@dataclass(frozen=True)
class VersionFacts:
    """How one version of vLLM budgets a GPU.

    `known` is False where the text was not a version, and the pinned one stands in for it.
    """

    label: str
    number: Number
    known: bool
    runner: Runner
    default_utilization: float
    sorts_vocabulary: bool
    keeps_expert_workspace: bool
    counts_graphs: bool
    """The estimate for CUDA graphs comes off the KV cache; else graphs live outside the budget."""
    activation_includes_graphs: bool
    """The printed "peak activation memory" holds the estimate for CUDA graphs."""
    measures_consumed: bool
    tokens_from_concurrency: bool
    """The printed cache size is concurrency x max_model_len; else blocks // groups x block size,
    which is wrong for hybrids (github.com/vllm-project/vllm/issues/43308)."""


@dataclass(frozen=True)
class Batch:
    """The two limits of a step."""

    step_tokens: int
    """max_num_batched_tokens."""
    seqs: int
    """max_num_seqs."""


def version_number(text: str) -> Number | None:
    """Major and minor of a vLLM version; of "0.24-0.26" and "0.10.x" the first; None if there is none.

    Development versions, release candidates and remarks after the number are read through.
    """
    match = re.match(r"\s*v?(\d+)\.(\d+)", text) or re.search(r">=\s*(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def version_facts(version: str | None) -> VersionFacts:
    """The facts of a version as people or logs write it; "(V0" in the text names the old engine.

    Without a number in the text the pinned version stands in, with `known` False.
    """
    text = version or ""
    found = version_number(text)
    number = found or version_number(VLLM_VERSION) or (0, 0)
    facts = VersionFacts(
        label=text or VLLM_VERSION,
        number=number,
        known=found is not None,
        runner=_runner(number),
        default_utilization=0.92 if number >= GRAPHS_COUNTED else 0.9,
        sorts_vocabulary=number < NO_SORT,
        keeps_expert_workspace=number >= KEPT_WORKSPACE,
        counts_graphs=number >= GRAPHS_COUNTED,
        activation_includes_graphs=number >= CONSUMED,
        measures_consumed=number >= CONSUMED,
        tokens_from_concurrency=number >= TOKENS_FROM_CONCURRENCY,
    )
    return replace(facts, runner=Runner.V0) if "(V0" in text else facts


def _runner(number: Number) -> Runner:
    if number < FIRST_V1:
        return Runner.V0
    if number < CONSUMED:
        return Runner.V1
    return Runner.EITHER if number < SECOND_RUNNER else Runner.V2


def default_batch(
    facts: VersionFacts,
    *,
    gpu_name: str,
    total_bytes: int,
    max_model_len: int,
    usage: Usage = Usage.SERVER,
) -> Batch:
    """max_num_batched_tokens and max_num_seqs where nobody chose them.

    V1: `EngineArgs.get_batch_defaults` (vllm/engine/arg_utils.py). A100 are a class of their own,
    since large steps cost them throughput (github.com/vllm-project/vllm/pull/17885). V0: the whole
    prompt in one step, from 0.5.3 in chunks where it may be longer than 32,768 tokens.
    """
    if facts.runner is Runner.V0:
        return Batch(_v0_step(facts, max_model_len), 256)
    library = usage is Usage.LIBRARY
    if total_bytes >= 160 * GIB and facts.counts_graphs:
        return Batch(16384, 1024)
    if total_bytes >= 70 * GIB and "a100" not in gpu_name.lower():
        return Batch(16384 if library else 8192, 1024)
    return Batch(8192 if library else 2048, 256)


def _v0_step(facts: VersionFacts, max_model_len: int) -> int:
    if max_model_len > 32768 and facts.number >= (0, 5):
        return 2048 if facts.number >= (0, 7) else 512
    return max(max_model_len, 2048)


def capture_sizes(
    facts: VersionFacts,
    batch: Batch,
    *,
    capability: float,
    query_tokens: int = 1,
    interactivity: bool = False,
) -> list[int]:
    """Batch sizes that get a CUDA graph by default, ascending (`_set_cudagraph_sizes`).

    `query_tokens`: tokens a sequence and step, more than 1 with speculative decoding;
    `interactivity`: `--performance-mode interactivity`, a graph for each size up to 32.
    """
    if facts.runner is Runner.V0:
        return [1, 2, 4, *range(8, min(256, batch.seqs) + 1, 8)]
    ceiling = 1024 if int(capability) == 10 and facts.counts_graphs else 512
    largest = min(2 * batch.seqs * query_tokens, ceiling, batch.step_tokens)
    fine = range(1, min(largest, 32) + 1) if interactivity else ()
    coarse = [n for n in (1, 2, 4) if n <= largest]
    stride = range(8, min(largest + 1, 256), 8)
    if facts.number < (0, 14):
        return sorted({*coarse, *range(8, largest + 1, 8)})
    whole = {n for n in (batch.seqs, batch.step_tokens) if facts.counts_graphs and n <= largest}
    return sorted({*fine, *coarse, *stride, *range(256, largest + 1, 16), *whole})
