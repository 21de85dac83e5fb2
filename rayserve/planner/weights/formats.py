"""Which tensors does a matrix become in its format: when it is made, and after loading?

A step is (name, bytes): allocate a tensor; with `RELEASE` bytes, give the named one back. Follows
`create_weights` and `process_weights_after_loading` of the methods in
vllm/model_executor/layers/quantization and kernels/linear (0.32.0).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rayserve.planner.weights.modules import Experts, Linear
from rayserve.planner.weights.storage import (
    AWQ,
    BLOCK,
    CHANNEL,
    COMPRESSED,
    FP8,
    GPTQ,
    INT8,
    MXFP4,
    NVFP4,
    PACKED,
    TENSOR,
    Storage,
)
from rayserve.units import round_up

Step = tuple[str, int]
RELEASE = -1
FLOAT32 = 4
FP8_COMPUTE = 8.9
"""Compute capability from which FP8 is multiplied; below it Marlin repacks the weights."""
HOPPER, AFTER_HOPPER = 9.0, 10.0
TRITON_MXFP4 = (0, 11)
"""From this version gpt-oss runs on Triton's kernels on Hopper; seen: 65.97 GiB for gpt-oss-120b with
0.10.1, where Marlin's padding explains it, 64.38 with 0.11.0 and 0.14.1 (vllm issues 23278, 33155)."""
TRITON_FREES_SCALES = (0, 32)
"""Before this version the Triton path kept the checkpoint's scales beside the swizzled ones, and did
not pad those along the inputs. 0.32.0 does both; when that began is not known, so older ones are
taken to do as 0.11.0 and 0.14.1 did."""
GPTQ_ORDER_KEPT = (0, 32)
"""Before this version each GPTQ matrix had `g_idx`, 4 bytes an input, which only Marlin freed."""
ROCM_PADDING = 256
"""Bytes that VLLM_ROCM_FP8_PADDING appends to each row of an FP8 matrix."""
MACHETE_GROUPS = {0, 64, 128}


@dataclass(frozen=True, slots=True)
class Target:
    """The hardware and version that decide how weights are repacked."""

    capability: float = 8.0
    rocm: bool = False
    version: tuple[int, int] = (0, 32)


def linear_steps(
    linear: Linear, storage: Storage | None, tensor: int, element: int, target: Target
) -> Iterator[Step]:
    """The tensors of one rank's share of a matrix as it is made, before loading.

    Args:
        linear: the matrix.
        storage: its format; None for an unquantized one.
        tensor: ranks of the tensor group.
        element: bytes of an element of the activations' type.
        target: hardware and version.
    """
    inputs, outputs = linear.local(tensor)
    rows, name = sum(outputs), linear.name
    if storage is None or storage.online:
        yield f"{name}.weight", rows * inputs * (linear.element_bytes or element)
    elif storage.kind in {FP8, INT8}:
        yield f"{name}.weight", rows * inputs
        yield f"{name}.scale", _scale_bytes(storage, inputs, outputs)
        if storage.static_input:
            yield f"{name}.input_scale", FLOAT32 * len(outputs)
    elif storage.kind == PACKED:
        yield from _packed_steps(name, storage, inputs, rows, element, target)
    else:
        group = 16 if storage.kind == NVFP4 else 32
        yield f"{name}.weight", rows * inputs // 2
        yield f"{name}.scale", rows * -(-inputs // group)
        yield f"{name}.globals", FLOAT32 * len(outputs)
    if linear.bias:
        yield f"{name}.bias", rows * element


def _scale_bytes(storage: Storage, inputs: int, outputs: tuple[int, ...]) -> int:
    if storage.scale == TENSOR:
        return FLOAT32 * len(outputs)
    if storage.scale == BLOCK:
        high, wide = storage.block
        return FLOAT32 * -(-inputs // wide) * sum(-(-size // high) for size in outputs)
    return FLOAT32 * sum(outputs)


def _groups(storage: Storage, inputs: int) -> int:
    return max(1, -(-inputs // storage.group)) if storage.group else 1


def _packed_steps(
    name: str, storage: Storage, inputs: int, rows: int, element: int, target: Target
) -> Iterator[Step]:
    groups = _groups(storage, inputs)
    yield f"{name}.weight", rows * inputs * storage.bits // 8
    yield f"{name}.scale", rows * groups * element
    if storage.layout != COMPRESSED or storage.zero_points:
        yield f"{name}.zeros", rows * groups * storage.bits // 8
    if storage.layout == COMPRESSED:
        yield f"{name}.shape", 16
    if storage.layout == GPTQ and target.version < GPTQ_ORDER_KEPT:
        yield f"{name}.g_idx", inputs * 4


def linear_after(
    linear: Linear, storage: Storage | None, tensor: int, element: int, target: Target
) -> Iterator[Step]:
    """What happens to a matrix's tensors once all weights are loaded: repacked, padded, quantized."""
    if storage is None:
        return
    inputs, outputs = linear.local(tensor)
    rows, name = sum(outputs), linear.name
    if storage.kind == FP8:
        if storage.online:
            yield f"{name}.quantized", rows * inputs
            yield f"{name}.scale", _scale_bytes(storage, inputs, outputs)
            yield f"{name}.weight", RELEASE
        made = f"{name}.quantized" if storage.online else f"{name}.weight"
        if target.rocm:
            # rows with a scale each are left as they are (process_fp8_weight_channel_strategy)
            if storage.scale != CHANNEL and inputs % 512 == 0:
                yield f"{name}.padded", rows * (inputs + ROCM_PADDING)
                yield made, RELEASE
        elif target.capability < FP8_COMPUTE:
            yield from _replace(made, f"{name}.marlin", rows * inputs)
            groups = -(-inputs // storage.block[1]) if storage.scale == BLOCK else 1
            yield from _replace(f"{name}.scale", f"{name}.scales", rows * groups * element)
    elif storage.kind == PACKED:
        yield from _packed_after(name, storage, inputs, rows, element, target)
    elif (
        storage.kind in {NVFP4, MXFP4}
        and target.capability >= AFTER_HOPPER
        and (storage.static_input or storage.kind == MXFP4)  # with inputs of 16 bits Marlin runs
    ):
        group = 16 if storage.kind == NVFP4 else 32
        tiles = round_up(rows, 128) * round_up(-(-inputs // group), 4)
        yield from _replace(f"{name}.scale", f"{name}.scales", tiles)


def _replace(old: str, new: str, size: int) -> Iterator[Step]:
    yield new, size
    yield old, RELEASE


def _packed_after(
    name: str, storage: Storage, inputs: int, rows: int, element: int, target: Target
) -> Iterator[Step]:
    packed, groups = rows * inputs * storage.bits // 8, _groups(storage, inputs)
    zeros = storage.layout != COMPRESSED or storage.zero_points
    machete = (
        HOPPER <= target.capability < AFTER_HOPPER
        and storage.group in MACHETE_GROUPS
        and inputs % 64 == 0
        and rows % 128 == 0
        and storage.layout != AWQ
    )
    yield from _replace(f"{name}.weight", f"{name}.repacked", packed)
    if machete:
        if storage.zero_points:
            # zero points already multiplied with the scales, in the activations' type
            yield from _replace(f"{name}.zeros", f"{name}.scaled_zeros", rows * groups * element)
        return  # Machete leaves the zero points of a symmetric GPTQ checkpoint where they are
    yield from _replace(f"{name}.scale", f"{name}.scales", rows * groups * element)
    if storage.zero_points:
        yield from _replace(f"{name}.zeros", f"{name}.repacked_zeros", packed // inputs * groups)
    elif zeros:
        yield f"{name}.zeros", RELEASE
    if storage.layout == GPTQ and target.version < GPTQ_ORDER_KEPT:
        yield f"{name}.g_idx", RELEASE


def expert_steps(
    experts: Experts, storage: Storage | None, held: tuple[int, int], element: int, target: Target
) -> Iterator[Step]:
    """The tensors of one rank's experts as they are made; `held` is (experts, width of each)."""
    count, width = held
    hidden, name = experts.hidden, experts.name
    if storage is not None and storage.kind == MXFP4:
        hidden, width = _mxfp4_sizes(hidden, width, target)
    up = width * (2 if experts.gated else 1)
    first, second = count * up * hidden, count * width * hidden
    if storage is None or storage.online:
        yield f"{name}.w13", first * element
        yield f"{name}.w2", second * element
    elif storage.kind in {FP8, INT8}:
        yield f"{name}.w13", first
        yield f"{name}.w2", second
        sizes = (width,) * (2 if experts.gated else 1)
        yield f"{name}.w13_scale", count * _scale_bytes(storage, hidden, sizes)
        yield f"{name}.w2_scale", count * _scale_bytes(storage, width, (hidden,))
    else:
        group = storage.group or max(hidden, width)
        scale = element if storage.kind == PACKED else 1
        yield f"{name}.w13", first * storage.bits // 8
        yield f"{name}.w2", second * storage.bits // 8
        yield f"{name}.w13_scale", count * up * -(-hidden // group) * scale
        yield f"{name}.w2_scale", count * hidden * -(-width // group) * scale
        if storage.kind == PACKED and (storage.layout != COMPRESSED or storage.zero_points):
            yield f"{name}.w13_zeros", count * up * -(-hidden // group) * storage.bits // 8
            yield f"{name}.w2_zeros", count * hidden * -(-width // group) * storage.bits // 8
    if experts.bias:
        yield f"{name}.w13_bias", count * up * element
        yield f"{name}.w2_bias", count * hidden * element


def _mxfp4_sizes(hidden: int, width: int, target: Target) -> tuple[int, int]:
    """`mxfp4_round_up_hidden_size_and_intermediate_size` of fused_moe/oracle/mxfp4.py."""
    if _triton_mxfp4(target):
        return hidden, round_up(width, 64)
    return round_up(hidden, 256), round_up(width, 128)


def _triton_mxfp4(target: Target) -> bool:
    return HOPPER <= target.capability < AFTER_HOPPER and target.version >= TRITON_MXFP4


def expert_after(
    experts: Experts, storage: Storage | None, held: tuple[int, int], element: int, target: Target
) -> Iterator[Step]:
    """What happens to the experts' tensors once all weights are loaded."""
    if storage is None:
        return
    steps = dict(expert_steps(experts, storage, held, element, target))
    name = experts.name
    if storage.kind == MXFP4:
        yield from _mxfp4_after(experts, held, steps, target)
    elif storage.online:
        for matrix in ("w13", "w2"):
            size = steps[f"{name}.{matrix}"] // element
            yield from _replace(f"{name}.{matrix}", f"{name}.{matrix}_quantized", size)
            yield f"{name}.{matrix}_scale", held[0] * FLOAT32
    elif storage.kind == PACKED or (storage.kind == FP8 and target.capability < FP8_COMPUTE):
        for matrix in ("w13", "w2"):
            yield from _replace(
                f"{name}.{matrix}", f"{name}.{matrix}_repacked", steps[f"{name}.{matrix}"]
            )
            yield from _replace(
                f"{name}.{matrix}_scale",
                f"{name}.{matrix}_scales",
                _marlin_scales(experts, storage, held, matrix, element),
            )
            if f"{name}.{matrix}_zeros" in steps and not storage.zero_points:
                yield f"{name}.{matrix}_zeros", RELEASE


def _marlin_scales(
    experts: Experts, storage: Storage, held: tuple[int, int], matrix: str, element: int
) -> int:
    count, width = held
    up = width * (2 if experts.gated else 1)
    outputs, inputs = (up, experts.hidden) if matrix == "w13" else (experts.hidden, width)
    size = storage.block[1] if storage.scale == BLOCK else storage.group
    groups = -(-inputs // size) if size else 1
    return count * outputs * groups * element


def _mxfp4_after(
    experts: Experts, held: tuple[int, int], steps: dict[str, int], target: Target
) -> Iterator[Step]:
    """Triton swizzles for Hopper and wants biases in 32 bits; Marlin and FlashInfer repack in place."""
    name, count = experts.name, held[0]
    if not _triton_mxfp4(target):
        for matrix in ("w13", "w2", "w13_scale", "w2_scale"):
            size = steps[f"{name}.{matrix}"]
            yield from _replace(f"{name}.{matrix}", f"{name}.{matrix}_repacked", size)
        return
    if experts.bias:
        for matrix in ("w13_bias", "w2_bias"):
            size = 2 * steps[f"{name}.{matrix}"]
            yield from _replace(f"{name}.{matrix}", f"{name}.{matrix}_float32", size)
    frees = target.version >= TRITON_FREES_SCALES
    hidden, width = experts.hidden, round_up(held[1], 64)
    rows = {"w13": (width * (2 if experts.gated else 1), hidden), "w2": (hidden, width)}
    for matrix, (outputs, inputs) in rows.items():
        # the swizzled scales cover tiles of 256 outputs (32 rows for each of 8 warps)
        groups = round_up(-(-inputs // 32), 4 if frees else 1)
        tiles = count * round_up(outputs, 256) * groups
        size = steps[f"{name}.{matrix}"]
        yield from _replace(f"{name}.{matrix}", f"{name}.{matrix}_swizzled", size)
        yield f"{name}.{matrix}_scale_swizzled", tiles
        if frees:
            yield f"{name}.{matrix}_scale", RELEASE
