"""Which GPUs do we know, and by which label does Ray find them?"""

from __future__ import annotations

import functools
import importlib.resources
import json
import re
from dataclasses import dataclass

import yaml

from rayserve.errors import SpecError
from rayserve.spec import ClusterSpec, NodePool, nearest
from rayserve.units import GIB

CPU = "cpu"
FORM_FACTORS = ("PCIE", "NVL")
BOARD = re.compile(r"\d+GB|SXM\d?|PCIE|NVL|OAM|HBM\w*")
"""What drivers add to the name of a chip; any other word makes it another one (RTX 4090 D, MIG)."""
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Gpu:
    """A GPU model; `data/gpus.yml` has the sources of its figures."""

    name: str
    memory_gib: float
    label: str
    compute_capability: float
    step_tokens: int
    step_seqs: int
    memory_gb_s: float
    """Peak memory bandwidth, 10^9 bytes a second."""
    bf16_tflops: float
    """Peak of dense matrix products in bf16 and fp16."""
    fp8_tflops: float
    """The same in fp8; 0: the chip has no fp8 matrix units."""
    int8_tops: float
    link_gb_s: float
    """NVLink or Infinity Fabric of one GPU, both directions together; 0: none."""
    linked_gpus: int
    """How many GPUs such links join; 1: none but itself."""
    pcie_gb_s: float
    """PCIe in one direction."""
    matmul_fraction: float | None = None
    """Best measured share of `bf16_tflops`; None: not known."""

    @property
    def memory_bytes(self) -> int:
        """Total memory as CUDA reports it."""
        return int(self.memory_gib * GIB)

    @property
    def nvidia(self) -> bool:
        """The GPU is programmed with CUDA; `compute_capability` is NVIDIA's number."""
        return not self.label.startswith("AMD-")

    def linked(self, ranks: int) -> bool:
        """NVLink or Infinity Fabric joins that many GPUs, so PCIe is not in their way."""
        return 1 <= ranks <= self.linked_gpus

    def peer_gb_s(self, ranks: int) -> float:
        """Bandwidth between `ranks` GPUs of one host, of one GPU in one direction."""
        return self.link_gb_s / 2 if ranks > 1 and self.linked(ranks) else self.pcie_gb_s


@functools.lru_cache(maxsize=1)
def gpus() -> dict[str, Gpu]:
    """All GPU models of the catalogue."""
    text = importlib.resources.files("rayserve").joinpath("data", "gpus.yml").read_text("utf-8")
    rows = yaml.load(text, Loader=_Loader)  # noqa: S506  (a safe loader, in C where there is one)
    return {name: Gpu(name=name, **row) for name, row in rows.items()}


@functools.lru_cache(maxsize=1)
def ray_labels() -> dict[str, str]:
    """Ray's accelerator types: label → why Ray never puts it on a node by itself, or empty."""
    name = "ray-2.60.0-accelerators.json"
    text = importlib.resources.files("rayserve").joinpath("data", name).read_text("utf-8")
    labels: dict[str, str] = json.loads(text)
    return labels


def find_gpu(spec: ClusterSpec, pool: NodePool) -> Gpu | None:
    """The pool's GPU model; None for the CPU engine.

    Raises:
        SpecError: the catalogue has no such model.
    """
    if pool.gpu == CPU:
        return None
    known = gpus()
    if pool.gpu in known:
        return known[pool.gpu]
    raise SpecError(
        "a GPU model of the catalogue, or cpu",
        found=f"`{pool.gpu}`",
        do=f"write {meant(pool.gpu)}",
        where=spec.where("node_pools", spec.node_pools.index(pool), "gpu"),
    )


def meant(name: str) -> str:
    """The model of the catalogue that a name of another spelling means, or several to choose from.

    Drivers have names of their own: nvidia-smi's NVIDIA A100-SXM4-80GB, NVIDIA H100 80GB HBM3.
    """
    known = {one.lower(): one for one in gpus()}
    words = set(_words(name)) - {"NVIDIA"}
    alike = [one for one in gpus() if words and words <= set(_words(one))]
    squeezed = "".join(_words(name))
    alike = alike or [one for one in gpus() if "".join(_words(one)).startswith(squeezed)]
    driven = [one for one, gpu in gpus().items() if same_gpu(name, gpu)]
    sized = [one for one in driven if any(word in one for word in words if word.endswith("GB"))]
    close = nearest(name.lower(), known)
    found = alike or sized or driven or ([known[close]] if close else list(gpus()))
    return found[0] if len(found) == 1 else f"one of: {', '.join(found)}"


def _words(name: str) -> list[str]:
    return re.split(r"[-_ ]+", name.strip().upper())


def same_gpu(device_name: str, gpu: Gpu) -> bool:
    """Whether a driver's name, such as NVIDIA A100-SXM4-80GB, is that of a model of the catalogue.

    The chip's name stands in it, and nothing follows but memory and form factor, which is the same:
    boards for PCIe have no links.
    """
    words = _words(device_name)
    chip = re.split(r"-", gpu.label.removeprefix("AMD-").removesuffix("-OAM").upper())
    ends = [
        place for place in range(len(chip), len(words) + 1) if words[:place][-len(chip) :] == chip
    ]
    if not ends or any(BOARD.fullmatch(word) is None for word in words[ends[0] :]):
        return False
    form = gpu.name.upper().split("-")
    return all((factor in words) == (factor in form) for factor in FORM_FACTORS)


def accelerator_type(spec: ClusterSpec, pool: NodePool, gpu: Gpu | None) -> str:
    """Ray's label that the replica's bundles ask for; empty for any.

    Ray accepts every text as a label, and then waits for ever for a node that carries it. So only
    labels that Ray itself puts on a node with this GPU are let through.

    Raises:
        SpecError: no node of the pool will ever carry the label.
    """
    wanted = pool.accelerator_type
    if not wanted:
        return gpu.label if gpu is not None else ""
    if gpu is not None and wanted == gpu.label:
        return wanted
    labels = ray_labels()
    if wanted not in labels:
        why = "Ray has no such label"
    elif gpu is None:
        why = "a CPU host carries no label"
    else:
        why = labels[wanted] or f"Ray labels a node with {gpu.name} `{gpu.label}`"
    right = gpu.label if gpu is not None else ""
    raise SpecError(
        "an accelerator_type that a node of this pool will carry",
        found=f"`{wanted}`: {why}; the replica would wait for ever",
        do=f"write {right}, or leave the key out" if right else "leave the key out",
        where=spec.where("node_pools", spec.node_pools.index(pool), "accelerator_type"),
    )
