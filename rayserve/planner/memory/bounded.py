"""Does a model fit whose layers are not known, but whose weights have a known sum?

The same budget and verdict as for a known architecture (memory/estimate.py), with the widths of
config.json in place of layers: the sum of the weights is exact, each rank's part and all else is a
range.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rayserve.planner.memory import terms
from rayserve.planner.memory.budget import Budget, Terms, Verdict, judge, kv_budget
from rayserve.planner.memory.estimate import PREFILL_BLOCK_TOKENS, Setup
from rayserve.planner.memory.offload import BASIS as OFFLOAD_BASIS
from rayserve.planner.memory.offload import without
from rayserve.planner.memory.ranges import Range
from rayserve.planner.memory.simple import Cut, weights_range
from rayserve.planner.profile import ModelProfile

UNKNOWN_LOW, UNKNOWN_HIGH = 0.1, 2.0
"""How far the step's peak may be from that of a known model with the same widths. 21 published models,
taken for unknown at 1 to 8 ranks, have ends from 0.11 (sparse MLA, which expands nothing) to 1.6 of it
by memory/terms.py; the upper one has room for others."""
LATENT_HEAD_DIMS = 256
"""Elements of a head's key and value that MLA expands: in all published models, or somewhat more."""


@dataclass(frozen=True)
class Bounded:
    """Budget and verdict of the fullest rank."""

    budget: Budget
    verdict: Verdict


def bounded(
    profile: ModelProfile, setup: Setup, *, checkpoint_bytes: int, request_bytes: int
) -> Bounded:
    """What a start would find at best and at worst.

    Args:
        profile: the widths.
        setup: hardware and engine settings.
        checkpoint_bytes: of all weights together, as they are loaded.
        request_bytes: KV cache of one sequence of max_model_len on a rank.
    """
    cut = Cut(setup.tensor, setup.pipeline)
    weights = weights_range(profile, cut, checkpoint_bytes)
    if setup.offload:  # how much of which parameters is not known
        kept = Range(0, min(setup.offload.most_bytes, weights.low), weights.low, OFFLOAD_BASIS)
        weights = without(weights, kept)
    weights += setup.extra + setup.draft_weights
    work = _work(profile, setup)
    activation = terms.activation(setup.facts, work, capability=setup.capability)
    activation = replace(
        activation.scaled(UNKNOWN_LOW, UNKNOWN_HIGH),
        basis="by the widths; known models have 0.1 to 1.6 of it, here a tenth to twice",
    )
    sizes = setup.graph_sizes
    budget = kv_budget(
        setup.facts,
        Terms(
            weights=weights,
            activation=activation,
            non_torch=terms.non_torch(
                setup.facts,
                tensor=setup.tensor,
                pipeline=setup.pipeline,
                capability=setup.capability,
            ),
            buffers=terms.kept_buffers(setup.facts, work),
            graphs=terms.graph_memory(
                setup.facts,
                sizes,
                layers=cut.stage_layers(profile.layers),
                experts=bool(profile.experts),
            ),
        ),
        total_bytes=setup.total_bytes,
        utilization=setup.utilization,
        pinned_kv_bytes=setup.pinned_kv_bytes,
        ranks=setup.tensor * setup.pipeline,
    )
    if setup.blocks_override:
        block = setup.block_size * request_bytes // setup.max_model_len
        budget = budget.with_cache(setup.blocks_override * block)
    return Bounded(budget, judge(budget, request_bytes, free_bytes=setup.free_bytes))


def _work(profile: ModelProfile, setup: Setup) -> terms.Work:
    """What a rank computes in the profile run, as if it were the first stage and the last."""
    tensor = setup.tensor
    experts = None
    if profile.experts:
        whole = setup.expert_ranks > 1
        experts = terms.Experts(
            top_k=profile.experts_per_token,
            width=profile.expert_intermediate // (1 if whole else tensor),
            kernel=terms.ExpertKernel.OTHER,
            shared_width=profile.shared_intermediate // tensor,
        )
    mixer_width = mixer_bytes = 0
    if profile.latent_dim:
        heads = -(-profile.heads // tensor)
        context = max(8 * setup.max_model_len, 4 * setup.batch.seqs * PREFILL_BLOCK_TOKENS)
        mixer_width = 2 * heads * LATENT_HEAD_DIMS
        mixer_bytes = terms.mla_prefill_bytes(
            heads, LATENT_HEAD_DIMS, context, profile.dtype_bits // 8
        )
    return terms.Work(
        step_tokens=setup.batch.step_tokens,
        seqs=setup.batch.seqs,
        hidden=profile.hidden,
        padded_vocab=profile.padded_vocab,
        mlp_width=profile.intermediate // tensor,
        dtype_bytes=profile.dtype_bits // 8,
        tensor=tensor,
        mixer_width=mixer_width,
        mixer_bytes=mixer_bytes,
        experts=experts,
    )
