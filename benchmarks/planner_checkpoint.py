"""How many bytes and elements of which storage type does a logged start's checkpoint hold?

Other tools read this from the headers of the checkpoint's files. Case files hold no headers, so the
tensors are put together from config.json by this project's own layout: before any cut, without what
vLLM adds when it loads (padding, tables of cosines, repacked copies), with the guessing layers that
vLLM leaves out. `planner_rivals` prints how far this is from the published sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.planner_cases import Inputs
from rayserve.errors import Where
from rayserve.planner.weights.architecture import Architecture, read_architecture
from rayserve.planner.weights.formats import Target, expert_steps, linear_steps
from rayserve.planner.weights.modules import (
    Absorbed,
    Embedding,
    Experts,
    Linear,
    Module,
    Rotary,
    Tensor,
)
from rayserve.planner.weights.storage import FP8, INT8, MXFP4, PACKED, Storage

STORAGE_BYTES = {
    "F32": 4, "I32": 4, "I64": 8, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1
}  # fmt: skip
AS_STORED = Target(capability=9.0, version=(0, 31))
"""Where vLLM makes tensors as checkpoints have them: MXFP4 experts unpadded (2,880 wide in gpt-oss),
GPTQ matrices with their `g_idx`."""
RUNTIME_ONLY = ("_k_scale", "_v_scale", "_q_scale", "_prob_scale")
MODEL_TYPES = {"float32": "F32", "float": "F32", "float16": "F16", "half": "F16"}


@dataclass(frozen=True)
class Checkpoint:
    """What the headers of a checkpoint's files say, summed."""

    elements: tuple[tuple[str, int], ...]
    """(storage type, elements), as safetensors counts them: packed types hold several weights."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(count * STORAGE_BYTES[storage] for storage, count in self.elements)


def case_checkpoint(inputs: Inputs, case_id: str) -> Checkpoint:
    """The checkpoint that a start loaded; the engine's `--dtype` and `--quantization` do not change it.

    Raises:
        SpecError: the planner does not know the architecture or the format.
    """
    stated = str(inputs.config.get("torch_dtype") or "bfloat16")
    where = Where(case_id)
    return checkpoint(read_architecture(inputs.config, where, dtype=stated), stated)


def checkpoint(architecture: Architecture, dtype: str) -> Checkpoint:
    """The tensors of an architecture whose plain ones are stored in `dtype`."""
    plain = MODEL_TYPES.get(dtype.removeprefix("torch."), "BF16")
    counts: Counter[str] = Counter()
    for module in _modules(architecture):
        for storage, size in _stored(architecture, module, plain):
            counts[storage] += size // STORAGE_BYTES[storage]
    return Checkpoint(tuple(sorted(counts.items())))


def _modules(architecture: Architecture) -> Iterator[Module]:
    yield from architecture.tower
    yield from architecture.embedding
    for layer in architecture.layers:
        yield from layer.modules
    yield from architecture.tail
    for layer in architecture.draft:
        # the published files repeat embedding and output head in each guessing layer
        yield from layer.modules
        yield from 2 * architecture.embedding


def _stored(architecture: Architecture, module: Module, plain: str) -> Iterator[tuple[str, int]]:
    """(storage type, bytes) of each tensor of a module."""
    element = STORAGE_BYTES[plain]
    if isinstance(module, Linear | Experts):
        yield from _matrix(architecture, module, plain)
    elif isinstance(module, Tensor):
        if not module.name.endswith(RUNTIME_ONLY):
            size = module.element_bytes or element
            yield "F32" if size == STORAGE_BYTES["F32"] else plain, module.elements * size
    elif isinstance(module, Embedding):
        yield plain, module.vocab * (module.hidden + (1 if module.bias else 0)) * element
    else:
        assert isinstance(module, Rotary | Absorbed)  # made by vLLM, in no file


def _matrix(
    architecture: Architecture, module: Linear | Experts, plain: str
) -> Iterator[tuple[str, int]]:
    storage, element = _storage(architecture, module), STORAGE_BYTES[plain]
    if isinstance(module, Experts):
        held = (module.count, module.width)
        steps, own = expert_steps(module, storage, held, element, AS_STORED), 0
    else:
        steps, own = linear_steps(module, storage, 1, element, AS_STORED), module.element_bytes
    kept = "F32" if own == STORAGE_BYTES["F32"] else plain
    for name, size in steps:
        yield _dtype(name.rpartition(".")[2], storage, kept), size


def _storage(architecture: Architecture, module: Linear | Experts) -> Storage | None:
    formats = architecture.quantization
    if formats is None or (isinstance(module, Linear) and not module.quantizable):
        return None
    return formats.storage(module.name, module.parts, expert=isinstance(module, Experts))


def _dtype(part: str, storage: Storage | None, plain: str) -> str:
    """The storage type of one tensor of a matrix."""
    if storage is None or part.endswith("bias"):
        return plain
    if part == "shape":
        return "I64"
    if part.endswith(("zeros", "g_idx")):
        return "I32"
    if part in {"input_scale", "globals"}:
        return "F32"
    if part.endswith("scale"):
        if storage.kind == PACKED:
            return plain
        return (
            "F32" if storage.kind in {FP8, INT8} else "U8" if storage.kind == MXFP4 else "F8_E4M3"
        )
    return {FP8: "F8_E4M3", INT8: "I8", PACKED: "I32"}.get(storage.kind, "U8")
