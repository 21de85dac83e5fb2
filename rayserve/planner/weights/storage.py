"""How is one matrix of a checkpoint stored? What its bytes follow from.

How it is multiplied, and whether a chip can, follows from its number formats (`support.schemes`).
"""

from __future__ import annotations

from dataclasses import dataclass

FP8, INT8, PACKED, MXFP4, NVFP4 = "fp8", "int8", "packed", "mxfp4", "nvfp4"
TENSOR, CHANNEL, GROUP, BLOCK = "tensor", "channel", "group", "block"
COMPRESSED, GPTQ, AWQ = "compressed", "gptq", "awq"


@dataclass(frozen=True, slots=True)
class Storage:
    """The layout of one matrix, as a checkpoint holds it or as loading makes it."""

    kind: str
    scale: str = CHANNEL
    bits: int = 8
    group: int = 0
    """Elements along the inputs that share a scale; 0: all of them."""
    block: tuple[int, int] = (0, 0)
    """Outputs and inputs that share a scale, for `BLOCK`."""
    zero_points: bool = False
    layout: str = COMPRESSED
    online: bool = False
    static_input: bool = False
