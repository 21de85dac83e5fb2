"""Into how many ranks and stages can a model be cut, and which numbers stand in the way?

Works on plain numbers. vLLM asserts most of these while it builds the model, on the GPUs, after
minutes of start; here they cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rayserve.documents import Loc
from rayserve.planner.support.precision import Finding
from rayserve.planner.support.schemes import Scheme
from rayserve.planner.weights.modules import VOCAB_PADDING
from rayserve.planner.weights.stages import stage_layers
from rayserve.units import round_up

MARLIN_TILE = 64
"""Marlin pads a width off this with zeros, where the model's width is a multiple of 128
(utils/marlin_utils.py:222)."""
LEAST_MOE_GROUP = 32
"""Experts whose groups straddle ranks are cut into groups down to this (moe_wna16.py:286)."""
MXFP4_TILE = 128
"""MXFP4 experts are padded to this width on each rank (fused_moe/oracle/mxfp4.py:844)."""
WHOLE_EXPERTS = "or pass engine_args enable_expert_parallel: true, which keeps experts whole"
_TENSOR: Loc = ("parallelism", "tensor")
_PIPELINE: Loc = ("parallelism", "pipeline")
_LINEAR = "model_executor/layers/linear.py"
_QUANT = "model_executor/layers/quantization/utils"


@dataclass(frozen=True)
class CutShape:
    """What a cut must divide, of one kind of layer; 0 where the model has no such part."""

    layers: int
    """Of the whole model."""
    heads: int
    kv_heads: int
    vocab: int
    hidden: int
    head_dim: int = 128
    value_dim: int = 0
    """Head dim of the values, where it is another one; MLA's v_head_dim."""
    latent: bool = False
    """MLA: each rank keeps the whole latent, so KV heads need not divide."""
    mlp_width: int = 0
    shared_width: int = 0
    """Width of the shared expert."""
    experts: int = 0
    expert_width: int = 0
    vision_heads: int = 0
    vision_splits: bool = True
    """The tower is cut like the text model; False: it runs whole where its heads do not divide."""
    linear_heads: tuple[int, ...] = ()
    """Key and value heads of linear attention, or the heads of a Mamba layer."""
    mamba_groups: int = 0
    schemes: tuple[Scheme, ...] = ()
    attention_quantized: bool = True
    """Whether the schemes apply to attention, which many checkpoints leave as it was."""
    mlp_quantized: bool = True
    experts_quantized: bool = True
    fp8_compute: bool = True
    """The GPU computes in FP8 (capability 8.9): then experts in blocks may be cut into finer ones."""


@dataclass(frozen=True)
class _Rule:
    """One number that the cut does not divide."""

    says: str
    """What the ranks do that keep it, such as `divides the 8 KV heads`."""
    source: str
    do: str = ""

    @property
    def needed(self) -> str:
        """As an error says it."""
        return f"tensor that {self.says}"


def check_cut(
    shapes: Sequence[CutShape],
    *,
    tensor: int,
    pipeline: int,
    gpus_per_host: int,
    expert_parallel: bool = False,
) -> tuple[Finding, ...]:
    """What hinders a cut into `tensor` ranks and `pipeline` stages, refusals first.

    `shapes` has one entry for each kind of layer. Each refusal names the numbers and the sizes
    nearest to the wanted one that work on a host.
    """
    works = tensor_sizes(shapes, gpus_per_host, expert_parallel=expert_parallel)
    found = [*_too_wide(tensor, gpus_per_host, max(works, default=gpus_per_host))]
    if not found:
        rules = (_broken(shape, tensor, expert_parallel=expert_parallel) for shape in shapes)
        found += [
            _refusal(rule, shapes, tensor, gpus_per_host, expert_parallel)
            for rule in dict.fromkeys(rule for some in rules for rule in some)
        ]
    found += _check_pipeline(shapes[0].layers, pipeline)
    if not any(item.level == "refuse" for item in found):
        for shape in shapes:
            found += _padding(shape, tensor, expert_parallel=expert_parallel)
    return tuple(dict.fromkeys(found))


def tensor_sizes(
    shapes: Sequence[CutShape], most: int, *, expert_parallel: bool = False
) -> tuple[int, ...]:
    """The sizes of tensor parallelism up to `most` that a model can be cut into."""

    def works(tensor: int) -> bool:
        return not broken_rule(shapes, tensor, expert_parallel=expert_parallel)

    return tuple(tensor for tensor in range(1, most + 1) if works(tensor))


def broken_rule(shapes: Sequence[CutShape], tensor: int, *, expert_parallel: bool = False) -> str:
    """The first rule that a cut into `tensor` ranks breaks, as a verb and its object; empty: none."""
    rules = (_broken(shape, tensor, expert_parallel=expert_parallel) for shape in shapes)
    return next((rule.says for some in rules for rule in some), "")


def _broken(shape: CutShape, tensor: int, *, expert_parallel: bool) -> Iterator[_Rule]:
    uneven = [
        *_broken_heads(shape, tensor),
        *_broken_widths(shape, tensor, expert_parallel=expert_parallel),
    ]
    yield from uneven
    if not uneven:  # else a rank has no width that could be judged
        yield from _broken_groups(shape, tensor, expert_parallel=expert_parallel)
        yield from _broken_blocks(shape, tensor, expert_parallel=expert_parallel)


def _broken_heads(shape: CutShape, tensor: int) -> Iterator[_Rule]:
    if shape.heads % tensor:
        yield _divides(f"the {shape.heads} attention heads", "config/model.py:1546")
    kv = shape.kv_heads
    if kv and not shape.latent and (kv % tensor if tensor < kv else tensor % kv):
        what = f"the {kv} KV heads, or is a multiple of them, which keeps copies"
        yield _divides(what, f"{_LINEAR}:1053")
    for heads in shape.linear_heads:
        if heads % tensor:
            yield _divides(f"the {heads} heads of linear attention", f"{_LINEAR}:494")
    groups = shape.mamba_groups
    if groups > 1 and groups % tensor:
        source = "model_executor/layers/mamba/mamba_mixer2.py:319"
        yield _divides(f"the {groups} groups of the Mamba layers", source)
    if shape.vision_heads and shape.vision_splits and shape.vision_heads % tensor:
        do = (
            "or pass engine_args mm_encoder_tp_mode: data, which keeps the tower whole on each rank"
        )
        source = "model_executor/models/vision.py:141"
        yield _divides(f"the {shape.vision_heads} heads of the vision tower", source, do)


def _broken_widths(shape: CutShape, tensor: int, *, expert_parallel: bool) -> Iterator[_Rule]:
    padded = round_up(shape.vocab, VOCAB_PADDING)
    if padded % tensor:
        source = "model_executor/layers/vocab_parallel_embedding.py:305"
        yield _divides(f"the vocabulary of {shape.vocab}, padded to {padded}", source)
    if shape.mlp_width % tensor:
        yield _divides(f"the MLP width {shape.mlp_width}", f"{_LINEAR}:494")
    if shape.shared_width % tensor:
        yield _divides(f"the shared expert's width {shape.shared_width}", f"{_LINEAR}:494")
    if not expert_parallel and shape.expert_width % tensor:
        source = "model_executor/layers/fused_moe/config.py:1341"
        yield _divides(f"the width of an expert, {shape.expert_width}", source, WHOLE_EXPERTS)


def _divides(what: str, source: str, do: str = "") -> _Rule:
    return _Rule(f"divides {what}", source, do)


def _inputs(shape: CutShape) -> Iterator[tuple[str, int]]:
    """Quantized input widths that are cut: of the layers after attention and after the MLP."""
    if shape.attention_quantized:
        yield "the attention output's input", shape.heads * (shape.value_dim or shape.head_dim)
    if shape.mlp_quantized:
        yield "the MLP width", shape.mlp_width
        yield "the shared expert's width", shape.shared_width


def _broken_groups(shape: CutShape, tensor: int, *, expert_parallel: bool) -> Iterator[_Rule]:
    for scheme in shape.schemes:
        group = scheme.group
        if group <= 0 or scheme.block or scheme.weights == "mxfp4":
            continue
        for what, width in _inputs(shape):
            if width % tensor == 0 and group < width and width // tensor % group:
                says = f"leaves a rank whole groups of {group} of {what}, {width}"
                yield _Rule(says, "distributed/utils.py:65")
        width = shape.expert_width
        if expert_parallel or not shape.experts_quantized:
            continue
        # GPTQ and AWQ repeat their scales for smaller groups; no other format does.
        refines = scheme.weights.startswith("int") and scheme.method != "compressed-tensors"
        least = min(group, LEAST_MOE_GROUP) if refines else group
        if _finest(width // tensor, group) < least:
            says = f"leaves a rank whole groups of {group} of an expert's {width}"
            source = "model_executor/layers/quantization/moe_wna16.py:286"
            yield _Rule(says, source, WHOLE_EXPERTS)


def _finest(width: int, size: int) -> int:
    """The part of `size` by halving that divides a width: the group or block that is used."""
    return math.gcd(width, size) if width else size


def _broken_blocks(shape: CutShape, tensor: int, *, expert_parallel: bool) -> Iterator[_Rule]:
    block = next((scheme.block for scheme in shape.schemes if scheme.block), None)
    if block is None:
        return
    rows, columns = block
    source = f"{_QUANT}/fp8_utils.py:1296"
    kv = max(1, shape.kv_heads // tensor) * shape.head_dim
    outputs = []
    if shape.attention_quantized and not shape.latent:
        outputs = [("of query rows", shape.heads // tensor * shape.head_dim), ("of key rows", kv)]
    if shape.mlp_quantized:
        outputs += [("of MLP rows", w // tensor) for w in (shape.mlp_width, shape.shared_width)]
    inputs = [(f"of {what}", width // tensor) for what, width in _inputs(shape) if tensor > 1]
    for size, parts in ((rows, outputs), (columns, inputs)):
        for what, width in parts:
            if width % size:
                says = f"leaves a rank whole blocks of {size} {what}"
                yield _Rule(f"{says}; it has {width}", source)
    width = shape.expert_width // (1 if expert_parallel else tensor)
    width = width if shape.experts_quantized else 0
    least = LEAST_MOE_GROUP if shape.fp8_compute else min(block)
    if _finest(width, min(block)) < least:
        says = f"leaves a rank blocks of {least} or more of an expert; it has {width}"
        yield _Rule(says, "model_executor/layers/fused_moe/oracle/fp8.py:288", WHOLE_EXPERTS)


def _refusal(
    rule: _Rule, shapes: Sequence[CutShape], tensor: int, most: int, expert_parallel: bool
) -> Finding:
    works = tensor_sizes(shapes, max(most, tensor), expert_parallel=expert_parallel)
    below = [n for n in works if n < tensor]
    above = [n for n in works if tensor < n <= most]
    near = [str(n) for n in (*below[-1:], *above[:1])]
    do = f"write tensor: {' or '.join(near)}" if near else "take another checkpoint"
    if rule.do and _helps(rule, shapes, tensor, expert_parallel=expert_parallel):
        do = f"{do}, {rule.do}" if near else rule.do.removeprefix("or ")
    return Finding("refuse", _TENSOR, rule.needed, f"tensor: {tensor}", do, rule.source)


def _helps(rule: _Rule, shapes: Sequence[CutShape], tensor: int, *, expert_parallel: bool) -> bool:
    """Whether what a rule proposes is enough for so many ranks: another rule may be broken too."""
    if rule.do == WHOLE_EXPERTS:
        return not broken_rule(shapes, tensor, expert_parallel=True)
    whole = [replace(shape, vision_splits=False) for shape in shapes]
    return not broken_rule(whole, tensor, expert_parallel=expert_parallel)


def _too_wide(tensor: int, gpus_per_host: int, widest: int) -> Iterator[Finding]:
    if tensor > gpus_per_host:
        yield Finding(
            "refuse",
            _TENSOR,
            f"ranks of one stage on one host, of {gpus_per_host} GPUs",
            f"tensor: {tensor}",
            f"write tensor: {widest}, and `pipeline` for more hosts",
        )


def _check_pipeline(layers: int, pipeline: int) -> Iterator[Finding]:
    if pipeline > layers:
        needed = f"a layer for each stage; the model has {layers}"
        do = f"write pipeline: {layers} at most"
        source = "distributed/utils.py:126"
        yield Finding("refuse", _PIPELINE, needed, f"pipeline: {pipeline}", do, source)
    elif layers % pipeline:
        counts = stage_layers(layers, pipeline)
        yield Finding(
            "note",
            _PIPELINE,
            f"stages of equal length, of {layers} layers",
            f"{', '.join(map(str, counts))}: the longest decides memory and speed",
            _even(layers, pipeline),
            "distributed/utils.py:126",
        )


def _even(layers: int, pipeline: int) -> str:
    near = [n for n in range(2, layers + 1) if layers % n == 0 and abs(n - pipeline) <= pipeline]
    best = min(near, key=lambda n: abs(n - pipeline), default=0)
    return f"pipeline: {best} would be even" if best else ""


def _padding(shape: CutShape, tensor: int, *, expert_parallel: bool) -> Iterator[Finding]:
    """Notes on shapes that vLLM pads, which costs memory and a copy in each step."""
    split = 1 if expert_parallel else tensor
    width = shape.expert_width // split if shape.experts else 0
    if width and any(scheme.weights == "mxfp4" for scheme in shape.schemes):
        padded = -(-width // MXFP4_TILE) * MXFP4_TILE
        if padded != width:
            yield Finding(
                "note",
                _TENSOR,
                f"expert width of a rank in whole tiles of {MXFP4_TILE}",
                f"{width}, padded to {padded}: {padded / width - 1:.0%} more memory for experts",
                "",
                "model_executor/layers/fused_moe/oracle/mxfp4.py:844",
            )
    packed = any(s.weights in ("int4", "int8") and s.activations == "16" for s in shape.schemes)
    mlp = shape.mlp_width // tensor
    if packed and mlp % MARLIN_TILE:
        yield Finding(
            "note",
            _TENSOR,
            f"MLP width of a rank in whole Marlin tiles of {MARLIN_TILE}",
            f"{mlp}: vLLM pads it, which costs memory and a copy in each step",
            "",
            f"{_QUANT}/marlin_utils.py:222",
        )
