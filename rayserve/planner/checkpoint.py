"""What do the checkpoint's own files say of its size, and does the planner agree?

The headers are read elsewhere (rayserve/files.py); here come bytes by type.
"""

from __future__ import annotations

from collections.abc import Mapping

from rayserve.errors import SpecError
from rayserve.planner.profile import ModelProfile
from rayserve.planner.weights.architecture import Architecture
from rayserve.planner.weights.checkpoint import held_bytes
from rayserve.planner.weights.tensors import stored_bytes
from rayserve.spec import ClusterSpec

AGREE = 0.01
"""Files hold a little that vLLM does not (indices, shapes of packed matrices), or the other way round."""
DIFFERS = (
    "The checkpoint's files hold {found:,} bytes, and {name} by config.json {needed:,}: either they do "
    "not belong together, or the planner does not know all of it. Its weights are as config.json says."
)


def checkpoint_sum(
    spec: ClusterSpec,
    profile: ModelProfile,
    architecture: Architecture | None,
    stored: Mapping[str, int],
) -> int:
    """Bytes of all weights as they are loaded, which an unknown architecture needs; 0: known otherwise.

    `stored`: bytes of the files' tensors by type; empty: nobody read them.

    Raises:
        SpecError: neither files nor spec tell, or they tell different things.
    """
    told, found = spec.model.checkpoint_bytes, sum(stored.values())
    if architecture is not None:
        return 0
    if not told and not found:
        raise SpecError(
            "`model.checkpoint_bytes`, or *.safetensors files beside config.json or in model.path, since "
            "the planner does not know this architecture or its number format",
            found="neither",
            do="plan where the checkpoint is, of which only headers are read; or add the sum of its "
            "tensor sizes in bytes, which is not always the `total_size` of its index",
            where=spec.where("model"),
        )
    if told and found and told != found:
        raise SpecError(
            f"{found}, the sum of the tensor sizes in the checkpoint's files",
            found=f"checkpoint_bytes: {told}",
            do=f"write checkpoint_bytes: {found}, or remove it",
            where=spec.where("model", "checkpoint_bytes"),
        )
    if not found:
        return told
    # In 32 bits vLLM computes only where it is told to.
    element = 4 if spec.precision.dtype == "float32" else 2
    return held_bytes(stored, element_bytes=element, quantized=bool(profile.quantization))


def differences(architecture: Architecture | None, stored: Mapping[str, int]) -> list[str]:
    """A note where files and config.json of a known architecture disagree on the weights."""
    if architecture is None or not stored:
        return []
    found = held_bytes(
        stored,
        element_bytes=architecture.element_bytes,
        quantized=architecture.quantization is not None,
    )
    # Checkpoints come with and without the layers that guess, and the tower.
    sizes = [
        stored_bytes(architecture, draft=draft, vision=vision)
        for draft in (False, True)
        for vision in (True, False)
    ]
    nearest = min(sizes, key=lambda size: abs(size - found))
    if abs(nearest - found) <= AGREE * found:
        return []
    return [DIFFERS.format(found=found, name=architecture.name, needed=nearest)]
