"""What must a host have, by the plan? Without a plan a check asks only for what is sound in itself."""

from __future__ import annotations

from dataclasses import dataclass

MIN_DRIVER = 580
"""Driver branch that CUDA 13 needs, with which the pinned torch and vLLM are built."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the plan asks of each host of its serving pool."""

    gpus: int
    model: str
    """Key of the catalogue, such as `A100-80GB-SXM`."""
    label: str
    """Part of the product's name, such as `A100`."""
    memory_mib: int
    link_gb_s: float = 0.0
    """NVLink of one GPU in one direction, where it joins all GPUs of a host, 10^9 bytes/s; 0: none."""
    ports: tuple[int, ...] = ()
    """Ports that must be free, or be held by Ray or Serve."""
    model_path: str = ""
    """Folder of the checkpoint; empty: from the hub."""
    offload_dir: str = ""
    """Folder of the KV cache's second tier."""
