"""How long do a layer's matrix products and its attention take on a GPU, at best and in practice?

Two kinds of figure, never mixed. A *bound* follows from the maker's peak rates: nothing is faster.
An *expectation* is a range: the peak rate times the share of it that kernels of this kind reached
where somebody measured them. Sources of the shares:

    building blocks   kernel tables of NVIDIA's AIConfigurator (Apache-2.0), A100-SXM4: matrix
                      products of vLLM 0.14 in bf16, of TensorRT-LLM in int4 and int8. vLLM's own
                      Marlin kernels are not in it.
    assumption        said so below, where nothing measured was at hand

On other GPUs than the A100 the shares of bandwidth are taken over unchanged, which nobody measured
here; the shares of compute are scaled by each GPU's own best matrix product (`matmul_fraction`).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from enum import StrEnum

from rayserve.planner.catalogue import Gpu

A100_MATMUL = 0.86
"""`matmul_fraction` of the GPU that the compute shares below were measured on."""
UNKNOWN_MATMUL = (0.70, 1.0)
"""Compute share against the A100's where no matrix product was measured; measured: 0.70-1.0."""


@dataclass(frozen=True)
class Span:
    """A duration in ms: `bound`, which nothing beats, and the expectation from `low` to `high`."""

    bound: float = 0.0
    low: float = 0.0
    high: float = 0.0

    @property
    def middle(self) -> float:
        """The expectation as one number, for rankings: it is no more certain than the range."""
        return (self.low + self.high) / 2

    def __add__(self, other: Span) -> Span:
        """One after the other, and wrong together: errors of one cause add up."""
        return Span(self.bound + other.bound, self.low + other.low, self.high + other.high)

    def __mul__(self, times: float) -> Span:
        """So many times the same."""
        return Span(self.bound * times, self.low * times, self.high * times)

    def holds(self, measured: float) -> bool:
        """The measured value lies in the expectation."""
        return self.low <= measured <= self.high


def longest(*spans: Span) -> Span:
    """What takes longest, of things that happen at the same time."""
    return Span(
        max(span.bound for span in spans),
        max(span.low for span in spans),
        max(span.high for span in spans),
    )


def independent(*spans: Span) -> Span:
    """One after the other, where errors have different causes: they add up as a root of squares.

    The bounds add up; the middles add up; the half widths add up in quadrature. The range never
    begins below the bound.
    """
    bound = sum(span.bound for span in spans)
    middle = sum(span.middle for span in spans)
    width = math.sqrt(sum((span.high - span.middle) ** 2 for span in spans))
    return Span(bound, max(bound, middle - width), middle + width)


class WeightFormat(StrEnum):
    """How the weights of a layer are kept and multiplied.

    What vLLM does with a checkpoint's format depends on the chip: fp8 is multiplied in fp8 where
    the chip can, and otherwise widened to bf16 in the kernel (Marlin).
    """

    BF16 = "bf16"
    FP8 = "fp8"
    W8A8 = "w8a8"
    """int8 weights and activations, multiplied in int8."""
    W8A16 = "w8a16"
    """8-bit weights, widened in the kernel."""
    W4A16 = "w4a16"
    """4-bit weights (GPTQ, AWQ, mxfp4), widened in the kernel."""


BANDWIDTH_SHARES = {
    WeightFormat.BF16: (0.66, 0.82),
    WeightFormat.FP8: (0.64, 0.82),  # assumption: as int8 x int8, which reads the same bytes
    WeightFormat.W8A8: (0.64, 0.82),
    WeightFormat.W8A16: (0.55, 0.74),
    WeightFormat.W4A16: (0.63, 0.71),
}
"""Share of the peak memory bandwidth when few tokens read all weights (building blocks)."""
THIN_SHARE = 0.40
"""The share that thin int4 products reached; the low end where few narrow experts are read."""
UNEVEN_SHARE = 0.75
"""Assumption: experts that real routers touch, at least, against even and independent choices."""
ATTENTION_BANDWIDTH_SHARES = (0.45, 0.80)
"""Assumption: reading a paged KV cache, few sequences (low) or many (high)."""
COMPUTE_SHARES = ((64, 0.40, 0.75), (512, 0.60, 0.87), (2048, 0.70, 0.95))
"""(tokens, low, high): share of `bf16_tflops`. Single products reached 0.68-0.87 and 0.82-0.95
(building blocks). The low ends are what whole prompts reached: 0.69 of 2035 tokens on an A100
(Llama-3.1-8B, vLLM 0.31), about 0.6 of 1052 on four H100 (vllm #12101). The row of 64 is an
assumption."""
ATTENTION_COMPUTE_SHARES = (0.35, 0.75)
"""FlashAttention-2 and -3, as their authors report forward passes on A100 and H100."""
WIDENING_SHARE = 0.90
"""int4 and int8 weights that are widened first multiply about 10 % slower (building blocks)."""
INT8_GAINS = (1.5, 1.87)
"""W8A8 against bf16 on an A100, whose int8 peak is twice the bf16 peak: "up to 1.87" (building
blocks); the low end is an assumption."""
FP8_SHARES = (0.80, 1.0)
"""Assumption: fp8's share of its peak against bf16's share of its own."""


@dataclass(frozen=True)
class Weights:
    """Weights of one format on one rank of tensor parallelism, all pipeline stages together."""

    name: str
    format: WeightFormat
    size_bytes: float
    parameters: float
    """Weights, each of which a token meets with one multiplication and one addition."""
    experts: int = 0
    """Routed experts among which a token chooses; 0: every token meets all weights."""
    experts_per_token: int = 0
    sampled_only: bool = False
    """Only tokens that are sampled from meet these weights: the output vocabulary."""

    def touched(self, tokens: float) -> float:
        """Expected share of the weights that `tokens` tokens read.

        1 - (1 - k/E)^tokens for k of E experts chosen evenly and independently. Real routers choose
        less evenly and touch fewer, so this is the upper end; `least` is the lowest possible.
        """
        if not self.experts:
            return 1.0
        missed: float = (1.0 - self.least) ** tokens
        return 1.0 - missed

    @property
    def least(self) -> float:
        """Share of the weights that is read even if all tokens choose the same experts."""
        return min(1.0, self.experts_per_token / self.experts) if self.experts else 1.0

    def rows(self, tokens: float) -> float:
        """Tokens that meet in one matrix product: of experts, a share of the step's tokens."""
        if not self.experts:
            return tokens
        return max(1.0, tokens * self.experts_per_token / self.experts)

    def flops(self, tokens: float) -> float:
        """Multiplications and additions of a step."""
        chosen = self.experts_per_token / self.experts if self.experts else 1.0
        return 2 * self.parameters * chosen * tokens


def reading(weights: Weights, gpu: Gpu, tokens: float) -> Span:
    """Time to read the weights that `tokens` tokens need from GPU memory."""
    low, high = BANDWIDTH_SHARES[_multiplied(weights.format, gpu)]
    whole = weights.size_bytes / gpu.memory_gb_s / 1e6
    if not weights.experts:
        return Span(whole, whole / high, whole / low)
    touched, least = weights.touched(tokens), weights.least
    if touched < 0.5:
        low = min(low, THIN_SHARE)
    fewest = max(least, UNEVEN_SHARE * touched)
    return Span(whole * least, whole * fewest / high, whole * touched / low)


def multiplying(weights: Weights, gpu: Gpu, tokens: float) -> Span:
    """Time of the matrix products of `tokens` tokens, were the weights already at hand."""
    peak, low, high = compute_rate(weights.format, gpu, weights.rows(tokens))
    bound = weights.flops(tokens) / peak / 1e9
    return Span(bound, bound / high, bound / low)


def compute_rate(kind: WeightFormat, gpu: Gpu, rows: float) -> tuple[float, float, float]:
    """(peak TFLOPS, lower share, upper share) of a matrix product of so many rows.

    The peak is that of the format in which the chip multiplies.
    """
    low, high = _compute_share(rows)
    chip_low, chip_high = UNKNOWN_MATMUL
    if gpu.matmul_fraction is not None:
        chip_low = chip_high = gpu.matmul_fraction / A100_MATMUL
    low, high = low * chip_low, min(1.0, high * chip_high)
    kind = _multiplied(kind, gpu)
    if kind is WeightFormat.FP8:
        return gpu.fp8_tflops, low * FP8_SHARES[0], high * FP8_SHARES[1]
    if kind is WeightFormat.W8A8:
        return gpu.int8_tops, low * INT8_GAINS[0] / 2, high * INT8_GAINS[1] / 2
    if kind is WeightFormat.BF16:
        return gpu.bf16_tflops, low, high
    return gpu.bf16_tflops, low * WIDENING_SHARE, high * WIDENING_SHARE


def attention_reading(size_bytes: float, gpu: Gpu) -> Span:
    """Time to read so many bytes of KV cache from GPU memory."""
    low, high = ATTENTION_BANDWIDTH_SHARES
    bound = size_bytes / gpu.memory_gb_s / 1e6
    return Span(bound, bound / high, bound / low)


def attention_multiplying(flops: float, gpu: Gpu) -> Span:
    """Time of attention's two matrix products, in bf16."""
    low, high = ATTENTION_COMPUTE_SHARES
    bound = flops / gpu.bf16_tflops / 1e9
    return Span(bound, bound / high, bound / low)


def streaming(size_bytes: float, gpu: Gpu) -> Span:
    """Time of kernels between the matrix products, which read and write so many bytes.

    Their share of the bandwidth is taken as that of bf16 weights.
    """
    low, high = BANDWIDTH_SHARES[WeightFormat.BF16]
    bound = size_bytes / gpu.memory_gb_s / 1e6
    return Span(bound, bound / high, bound / low)


def _multiplied(kind: WeightFormat, gpu: Gpu) -> WeightFormat:
    """The format as this chip multiplies it: without fp8 units, fp8 weights are widened."""
    if kind is WeightFormat.FP8 and not gpu.fp8_tflops:
        return WeightFormat.W8A16
    return kind


def _compute_share(rows: float) -> tuple[float, float]:
    """Shares at so many rows: on a logarithmic scale between the measured ones, flat beyond."""
    first, last = COMPUTE_SHARES[0], COMPUTE_SHARES[-1]
    if rows <= first[0]:
        return first[1:]
    for left, right in itertools.pairwise(COMPUTE_SHARES):
        if rows <= right[0]:
            part = math.log(rows / left[0]) / math.log(right[0] / left[0])
            return (
                left[1] + part * (right[1] - left[1]),
                left[2] + part * (right[2] - left[2]),
            )
    return last[1:]
