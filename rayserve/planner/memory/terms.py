"""What does vLLM need beside weights and KV cache? Each term as a range, and what the range rests on.

The peak of the profile run is derived: the buffers that live at once, read in the installed vLLM
(vllm/v1/worker/gpu_model_runner.py, gpu/model_runner.py, vllm/v1/sample) and checked against the
start-up logs of github.com/llm-d-incubation/llm-d-planner (accuracy/results) for earlier versions.
What no source gives (NCCL, CUDA graphs) is taken from such logs, with their spread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from rayserve.planner.memory.ranges import Range
from rayserve.planner.memory.versions import Runner, VersionFacts
from rayserve.units import MIB


class ExpertKernel(StrEnum):
    """Which kernel computes the experts, and so which scratch space it asks for."""

    TRITON = "triton"
    """bf16, fp16 and fp8 without a faster kernel."""
    MARLIN = "marlin"
    """Weights of 4 or 8 bits that are expanded in the kernel: AWQ, GPTQ, W4A16, fp8 on Ampere."""
    OTHER = "other"
    """FlashInfer, CUTLASS, TRT-LLM, gpt-oss: between one copy of the hidden states and Triton's."""


@dataclass(frozen=True)
class Experts:
    """The routed experts of a layer as a rank computes them."""

    top_k: int
    width: int
    """Intermediate size of one expert on this rank: whole with expert parallelism."""
    kernel: ExpertKernel = ExpertKernel.TRITON
    shared_width: int = 0
    """Intermediate size, on this rank, of the experts that every token takes."""


@dataclass(frozen=True)
class Vision:
    """The dummy images that the profile run encodes: as many as fill one step's encoder budget."""

    pixels: int
    """Elements of all their pixel tensors."""
    patches: int
    """Positions in the vision tower, before they are merged to tokens."""
    output_tokens: int
    """Embeddings that they become; see `images_profiled`."""
    hidden: int
    width: int
    """Intermediate size of the MLP on a rank; half as much again where it is gated."""


@dataclass(frozen=True)
class Work:
    """What a rank computes in a step of the profile run. Widths are elements a token on this rank."""

    step_tokens: int
    seqs: int
    hidden: int
    padded_vocab: int
    mlp_width: int
    """Intermediate size of the widest dense MLP on this rank; 0: every layer routes to experts."""
    dtype_bytes: int = 2
    tensor: int = 1
    first_stage: bool = True
    last_stage: bool = True
    mixer_width: int = 0
    """Elements that attention, MLA or a recurrent layer holds beside the residual."""
    mixer_bytes: int = 0
    """What it takes beyond that, whatever the step: see `mla_prefill_bytes`."""
    int8_inputs: bool = False
    """Inputs of the linear layers are quantized to one byte: W8A8."""
    experts: Experts | None = None
    vision: Vision | None = None

    @property
    def rows(self) -> int:
        """Sequences whose logits are computed at once."""
        return min(self.seqs, self.step_tokens)


@dataclass(frozen=True)
class GraphMemory:
    """CUDA graphs: what vLLM estimates before it records them, and what they then take."""

    estimate: Range
    actual: Range

    def beside(self, more: Range) -> GraphMemory:
        """With what is made as they are first recorded, and so counted among them."""
        return GraphMemory(self.estimate + more, self.actual + more)


def images_profiled(step_tokens: int, seqs: int, image_tokens: int, per_prompt: int = 1) -> int:
    """Images of the largest size that the profile run encodes (vllm/multimodal/encoder_budget.py):
    those that fit a budget of max(step, one image) tokens, at most `per_prompt` a sequence.
    """
    budget = max(step_tokens, image_tokens)
    return max(1, min(budget // max(1, image_tokens), seqs * per_prompt))


def mla_prefill_bytes(heads: int, head_dims: int, context_tokens: int, dtype_bytes: int) -> int:
    """Keys and values that MLA expands for a chunk of context, on one rank; sparse MLA expands none.

    `head_dims`: qk_nope_head_dim + v_head_dim. `context_tokens`: the larger of 8 x max_model_len and
    4 x max_num_seqs x block size, of which a chunk takes 65,536 at most
    (MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size).
    """
    return min(context_tokens, 65536) * heads * head_dims * dtype_bytes


# ── activation ──────────────────────────────────────────────────────────────────────────────────

SORTED_BYTES = 36
"""Beside the logits themselves, a row and vocabulary entry, up to 0.16: float32 copy (4), the sort's
values and int64 indices (12) and its own workspace (20). Five logs of 0.11 and three of 0.6 agree
within 1 %."""
FLASHINFER_SAMPLES = (0, 8)
"""From here until nothing was sorted any more, runner V1 sampled with FlashInfer wherever that package
was installed (v1/sample/ops/topk_topp_sampler.py: in V1 an unset VLLM_USE_FLASHINFER_SAMPLER means
yes), and that sorts nothing. vLLM's images had the package, its dependencies at first had not, and a
table of figures does not say. Of seven logs five have sorted; two (Mistral-Small on 0.11, Qwen3-0.6B
on 0.10.2 with FlashInfer's attention) have not."""
DRAWN_BYTES = 12
"""The same from 0.17, where nothing is sorted: float32 copy, probabilities, exponential noise. Also of
models in float32, by one log, though there the copy is none."""
MULTIPROCESSORS = {8.0: 108, 8.6: 84, 8.9: 142, 9.0: 132, 10.0: 148, 12.0: 170}
"""Of a large GPU of each compute capability: rows of the top-k kernel's buffer."""
WORKSPACE_HOPPER = 32 * MIB
WORKSPACE_OTHER = 8 * MIB
"""cuBLAS' scratch space in PyTorch, by compute capability 9.0 (aten/src/ATen/cuda/CUDABlas.cpp)."""
LOOSE_BYTES = 2 * MIB
"""Index and metadata tensors."""


def activation(facts: VersionFacts, work: Work, *, capability: float) -> Range:
    """The peak of the profile run beyond what is allocated before it, on one rank.

    The larger of: sampling, with the logits of every sequence; one layer's forward pass; the vision
    tower. Scratch space of experts, encoder outputs and images stay alive meanwhile.
    """
    kept = _kept(work)
    floor = LOOSE_BYTES + (WORKSPACE_HOPPER if capability >= 9 else WORKSPACE_OTHER)
    scratch = _expert_workspace(facts, work)
    drawn = _sampling(facts, work, capability)
    peak = _peak(facts, work, scratch.expected, drawn)
    basis = "; ".join(text for text in (_basis(facts), scratch.basis, kept.basis) if text)
    if facts.runner in {Runner.V0, Runner.V1}:
        least = drawn
        if facts.sorts_vocabulary and facts.number >= FLASHINFER_SAMPLES:
            least = _sampling(replace(facts, sorts_vocabulary=False), work, capability)
        low = int(0.98 * _peak(facts, work, scratch.low, least, copies=1))
        high = math.ceil(_stretch(facts, work) * _peak(facts, work, scratch.high, drawn))
    else:
        low = _peak(facts, work, scratch.low, _plain_sampling(work), copies=1)
        table = work.padded_vocab * work.hidden * work.dtype_bytes // work.tensor
        high = _peak(facts, work, scratch.high, drawn)
        high = max(high, low + table if work.first_stage else low)
        peak = (_peak(facts, work, scratch.expected, _plain_sampling(work)) + high) // 2
    total = Range(low, peak, high) + kept + Range(0, floor, floor + 24 * MIB)
    return replace(total, basis=basis)


def _stretch(facts: VersionFacts, work: Work) -> float:
    """How far above the derived peak logs of runner V1 lie."""
    if facts.number < (0, 20):
        return 1.02
    return 1.4 if work.experts is not None else 1.1


def _peak(
    facts: VersionFacts, work: Work, scratch: int, sampling: int, *, copies: int | None = None
) -> int:
    """The largest of the moments that may set the peak. Dense layers come before the first experts,
    whose scratch space is still there at the end if the version keeps it. `copies`: as `_layer`,
    for the layers of experts alone.
    """
    moments = [_layer(facts, work, work.mlp_width, None), _tower(work)]
    if work.experts is not None:
        moments.append(_layer(facts, work, work.experts.shared_width, copies) + scratch)
    moments.append(sampling + (scratch if facts.keeps_expert_workspace else 0))
    return max(moments)


def _basis(facts: VersionFacts) -> str:
    if facts.runner is Runner.V0:
        return "derived; five logs of 0.6 within 2 %, not so two with MLA and one with bitsandbytes"
    if facts.number < (0, 20):
        return "derived; 5 of 6 logs of 0.11 and 40 of 41 of 0.19 on H100 within 3 %"
    if facts.runner is Runner.V1:
        return "derived as for 0.19; five logs of 0.23-0.26, all with experts: 0.74 to 1.58 of that"
    return (
        "low end: what the source of 0.32 allocates; high end: as 0.19, or a copy of the embedding: "
        "the one log of 0.31 (A100) has 1.2 GiB where the source explains 0.24"
    )


def _layer(facts: VersionFacts, work: Work, width: int, copies: int | None) -> int:
    """One layer's forward pass: gate, up and their product, with the residual and its neighbours.

    Those are 3 hidden states in eager mode (V0), 4 where compiled pieces hold on to their inputs, and
    of layers with experts as few as 1 in logs. Or attention, with as many.
    """
    hidden = work.hidden * (copies or (3 if facts.runner is Runner.V0 else 4))
    token = work.dtype_bytes * (3 * width + hidden) + (width if work.int8_inputs else 0)
    mixer = work.dtype_bytes * (work.mixer_width + hidden)
    return max(work.step_tokens * token, work.step_tokens * mixer + work.mixer_bytes)


def _sampling(facts: VersionFacts, work: Work, capability: float) -> int:
    """Sampling with top-k and top-p, as runner V1 profiles it; the hidden states are still there."""
    if not work.last_stage:
        return 0
    each = work.dtype_bytes + (SORTED_BYTES if facts.sorts_vocabulary else DRAWN_BYTES)
    hidden = (work.step_tokens + 2 * work.rows) * work.hidden * work.dtype_bytes
    buffer = 0
    if not facts.sorts_vocabulary:
        programs = MULTIPROCESSORS.get(capability, 132)
        rows = min(programs, 2 ** math.ceil(math.log2(max(1, min(programs, work.rows)))))
        buffer = rows * work.padded_vocab * 4
    return each * work.rows * work.padded_vocab + buffer + hidden


def _plain_sampling(work: Work) -> int:
    """Sampling as runner V2 profiles it: the logits, gathered from the ranks, and no copy of them."""
    if not work.last_stage:
        return 0
    logits = work.rows * work.padded_vocab * work.dtype_bytes
    gathered = logits if work.tensor == 1 else 2 * logits + logits // work.tensor
    return gathered + (work.step_tokens + work.rows) * work.hidden * work.dtype_bytes


def _tower(work: Work) -> int:
    """One layer of the vision tower, which is not compiled: MLP in and out, residual, neighbours."""
    vision = work.vision
    if vision is None or not work.first_stage:
        return 0
    return vision.patches * work.dtype_bytes * (2 * vision.width + 3 * vision.hidden)


def _kept(work: Work) -> Range:
    """What the profile run allocates and keeps to its end."""
    kept = Range.exact(0)
    if not work.first_stage:
        # hidden states and residual of the stage before
        kept += Range.exact(2 * work.step_tokens * work.hidden * work.dtype_bytes)
    if work.vision is not None and work.first_stage:
        outputs = work.vision.output_tokens * work.hidden * work.dtype_bytes
        images = work.vision.pixels * work.dtype_bytes
        basis = "images and their embeddings; 9 logs of 0.19, 0 to 0.07 GiB above"
        kept += Range(outputs // 2, outputs + images, 2 * outputs + 2 * images + 32 * MIB, basis)
    return kept


def _expert_workspace(facts: VersionFacts, work: Work) -> Range:
    """Two buffers of a row for each token and expert of it (`workspace_shapes` of each kernel in
    vllm/model_executor/layers/fused_moe/experts).
    """
    experts = work.experts
    if experts is None:
        return Range.exact(0)
    width, hidden = experts.width, work.hidden
    row = work.step_tokens * experts.top_k * work.dtype_bytes
    two = row * (max(width, hidden) + max(2 * width, hidden))
    if experts.kernel is ExpertKernel.TRITON:
        return Range(int(0.97 * two), two, int(1.03 * two), "experts: Triton's two buffers, 4 logs")
    if experts.kernel is ExpertKernel.MARLIN:
        one = row * (max(2 * width, hidden) + width)
        likely = two if facts.measures_consumed else one
        return Range(one, likely, two, "experts: Marlin's buffers, three logs of 0.23")
    least = work.step_tokens * hidden * work.dtype_bytes
    return Range(least, (least + two) // 2, two, "experts: kernel not known")


# ── buffers, NCCL and graphs ────────────────────────────────────────────────────────────────────


def kept_buffers(facts: VersionFacts, work: Work) -> Range:
    """Torch's memory that is neither weights nor transient; 0 before 0.27, which did not count it.

    Runner V2 keeps counts of every sequence's output tokens and a bit for each prompt token, for
    penalties (vllm/v1/worker/gpu/sample/penalties.py); and what the allocator cannot give back.
    """
    if not facts.measures_consumed:
        return Range.exact(0)
    penalties = work.seqs * (4 * work.padded_vocab + 4 * -(-work.padded_vocab // 32))
    basis = "penalty counters by shape; up to 0.5 GiB of other buffers, not measured"
    return Range(0, penalties + 64 * MIB, penalties + 512 * MIB, basis)


def non_torch(facts: VersionFacts, *, tensor: int, pipeline: int, capability: float) -> Range:
    """CUDA modules and NCCL's and the all-reduce kernels' buffers, as vLLM counts them on a rank."""
    if facts.runner is Runner.V0:
        return _v0_non_torch(tensor, capability)
    if tensor == 1:
        low, nccl = (0.05, 0.3) if pipeline > 1 else (0.2, 0.0)
        if facts.number < (0, 17):
            return Range.gib(0.05, 0.13, 0.35 + nccl, "one log of 0.11 on H100")
        return Range.gib(
            low, 0.25, 0.48 + nccl, "31 logs of 0.19 on H100: 0.24-0.26, three of 0.46"
        )
    if facts.counts_graphs:
        high = 1.5 if tensor < 8 else 2.3
        return Range.gib(0.05, 0.6, high, "six logs of 0.23-0.26, 4 ranks: 0.07-0.95")
    if facts.number < (0, 17):
        high = 1.0 if tensor == 2 else 2.3
        return Range.gib(0.4, 0.55, high, "two logs of 0.11, 2 H100: 0.54 and 0.55")
    doublings = math.log2(tensor)
    if capability >= 9:
        likely = 2.08 + 0.1 * (doublings - 1)
        high = likely + 0.06 + 0.3 * max(0.0, doublings - 2)
        return Range.gib(likely - 0.1, likely, high, "nine logs of 0.19 on 2 and 4 H100: 2.06-2.21")
    likely = 0.4 + 0.2 * doublings
    basis = "one log on 2 A100 (0.5-0.6 left over); none with more"
    return Range.gib(0.3, likely, likely + 0.5 * doublings, basis)


def _v0_non_torch(tensor: int, capability: float) -> Range:
    if tensor == 1 and capability < 9:
        return Range.gib(0.0, 0.3, 0.45, "six logs of 0.6-0.8: 0.01-0.39")
    if tensor == 1:
        return Range.gib(0.1, 0.6, 1.9, "one log of 0.6 on H100: 1.79")
    if tensor < 8:
        return Range.gib(0.2, 1.2, 3.7, "0.33 on 2 RTX 5090, 3.58 on 2 H100")
    return Range.gib(0.2, 3.0, 7.3, "0.2 on 16 RTX 3090, 7.16 on 8 H200")


FLASHINFER_BYTES = 394 * MIB
"""VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE: the least that FlashInfer's attention takes for itself."""
FLASHINFER_ELEMENT_BYTES = 16
"""FLASHINFER_PREFILL_WORKSPACE_BYTES_PER_ELEM of v1/attention/backends/flashinfer.py."""
FLASHINFER_GROWS = (0, 32)
"""From here the buffer grows with the step and the heads; when that began is not known, so that older
versions have it as their high end."""


def flashinfer_buffer(facts: VersionFacts, *, step_tokens: int, query_width: int) -> Range:
    """FlashInfer's buffer of intermediate results, made when graphs are first recorded or estimated.

    `query_width`: elements of a token's queries on the rank.
    """
    grown = max(FLASHINFER_BYTES, step_tokens * query_width * FLASHINFER_ELEMENT_BYTES)
    likely = grown if facts.number >= FLASHINFER_GROWS else FLASHINFER_BYTES
    return Range(min(FLASHINFER_BYTES, likely), likely, grown, "FlashInfer's workspace")


LAYER_GRAPH_BYTES = 0.32 * MIB
MOE_LAYER_GRAPH_BYTES = 0.45 * MIB
"""A layer of one batch size's graphs."""
GRAPH_POOL_BYTES = 0.84 * MIB
"""A token of the largest batch size: the graphs' shared memory pool."""
V2_SHARE = 0.5
"""Runner V2 records fewer pieces: the one log (0.31, 8B on an A100) has a quarter of V1's bytes."""


def graph_memory(
    facts: VersionFacts, sizes: Sequence[int], *, layers: int, experts: bool = False
) -> GraphMemory:
    """CUDA graphs of the given batch sizes for a rank's `layers`; no sizes: eager mode, nothing."""
    if not sizes:
        return GraphMemory(Range.exact(0), Range.exact(0))
    layer = MOE_LAYER_GRAPH_BYTES if experts else LAYER_GRAPH_BYTES
    likely = int(len(sizes) * layers * layer + max(sizes) * GRAPH_POOL_BYTES)
    if facts.runner is Runner.V2:
        likely = int(V2_SHARE * likely)
        unsure = Range.exact(likely, "one log of 0.31; 0.19 took twice as much").scaled(0.4, 2.4)
        return GraphMemory(unsure, unsure)
    if facts.runner is Runner.V0:
        one = Range.exact(likely, "two logs of 0.6-0.8").scaled(0.3, 2.0)
        return GraphMemory(Range.exact(0), one)
    logs = "41 logs of 0.19 on H100, 24 to 80 layers, 51 sizes"
    before = Range.exact(likely, f"{logs}: 0.59 to 1.51 of this").scaled(0.55, 2.0)
    after = Range.exact(likely, f"{logs}: 0.76 to 1.46 of this").scaled(0.7, 1.6)
    return GraphMemory(before, after)
