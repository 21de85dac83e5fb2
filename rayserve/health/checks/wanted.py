"""What must a host have, by the plan? Without a plan a check asks only for what is sound in itself."""

from __future__ import annotations

from dataclasses import dataclass

MIN_DRIVER = 580
"""Driver branch that CUDA 13 needs, with which the pinned torch and vLLM are built."""

LINK_GB_S = {8.0: 50.0, 8.6: 28.125, 9.0: 50.0, 10.0: 100.0}
"""One NVLink in both directions together, 10^9 bytes/s, by compute capability. By NVIDIA's white papers: 12
links make the 600 of an A100, 18 the 900 of an H100, 4 the 112.5 of a GA102; 18 the 1800 of a B200."""


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
    links: int = 0
    """NVLinks of one GPU, where they join all GPUs of a host; 0: none, or not known."""
    key_file: str = ""
    """File of the API keys; empty: none."""
    token: bool = False
    """Ray asks for its token."""
    host: str = ""
    """Address that Serve binds."""
    port: int = 0
    route: str = ""
    """Of the plan's revision."""
    without_gpus: str = ""
    """A node pool of the plan whose hosts have no GPU; empty: there is none."""
