"""Does the hardware catalogue say what each GPU is, and from where each figure comes?"""

from __future__ import annotations

import re

import pytest

from rayserve.planner.catalogue import gpus, meant
from tests.bad_specs import ROOT

SOURCES = ("vllm-log", "torch-error", "ray", "cuda", "vllm", "datasheet", "whitepaper", "pcie",
           "mamf", "rocm")  # fmt: skip
LINES = (ROOT / "rayserve" / "data" / "gpus.yml").read_text("utf-8").splitlines()
KEPT = ("A100-40GB-SXM", "A100-40GB-PCIe", "A100-80GB-SXM", "A100-80GB-PCIe", "H100-80GB-SXM",
        "H100-80GB-PCIe", "H200-141GB-SXM", "L40S-48GB", "L4-24GB")  # fmt: skip


@pytest.fixture(params=sorted(gpus()))
def gpu(request):
    """Each GPU of the catalogue."""
    return gpus()[request.param]


def test_every_figure_names_its_source():
    """Each line of a GPU ends with a comment that begins with a source of the file's legend."""
    figures = [line for line in LINES if line.startswith("  ")]
    assert len(figures) >= 12 * len(gpus())
    assert [line for line in figures if not line.partition("# ")[2].startswith(SOURCES)] == []


def test_the_legend_explains_every_key_and_source():
    """The file's head has a line for each key and each source that its entries use."""
    head = "\n".join(line for line in LINES if line.startswith("#"))
    keys = {line.split(":")[0].strip() for line in LINES if line.startswith("  ")}
    assert {key for key in keys if f"#   {key} " not in head} == set()
    assert {source for source in SOURCES if f"#   {source} " not in head} == set()


def test_no_gpu_was_dropped_or_renamed():
    """Specs that name a GPU of an earlier release still find it."""
    assert set(KEPT) <= set(gpus())
    assert len(gpus()) >= 17


def test_the_total_is_below_the_catalogue_number(gpu):
    """CUDA's total is a little less than the memory that the GPU is sold with."""
    match = re.search(r"-(\d+)GB", gpu.name)
    assert match is not None
    sold_gib = int(match[1])
    assert 0.90 * sold_gib < gpu.memory_gib < sold_gib
    assert gpu.memory_bytes == int(gpu.memory_gib * 2**30)


def test_rates_are_dense(gpu):
    """8-bit products run at about twice the 16-bit rate: a sparse figure would be four times."""
    assert 1.9 <= gpu.int8_tops / gpu.bf16_tflops <= 4.01
    if gpu.fp8_tflops:
        assert 1.9 <= gpu.fp8_tflops / gpu.bf16_tflops <= 2.1


def test_fp8_units_begin_with_ada(gpu):
    """No NVIDIA chip before compute capability 8.9 multiplies in fp8, and each since then does."""
    assert gpu.nvidia == (not gpu.label.startswith("AMD-"))
    if gpu.nvidia:
        assert bool(gpu.fp8_tflops) == (gpu.compute_capability >= 8.9)


def test_vllms_own_defaults_follow_memory_and_name(gpu):
    """Step sizes are those of vLLM's arg_utils: 160 GiB and more, 70 and more, the A100 apart."""
    if gpu.memory_gib >= 160:
        expected = (16384, 1024)
    elif gpu.memory_gib >= 70 and gpu.label != "A100":
        expected = (8192, 1024)
    else:
        expected = (2048, 256)
    assert (gpu.step_tokens, gpu.step_seqs) == expected


def test_a_link_joins_somebody(gpu):
    """A GPU has NVLink or its like exactly when it reaches another GPU through it."""
    assert (gpu.link_gb_s > 0) == (gpu.linked_gpus > 1)
    assert gpu.linked(1)
    assert gpu.linked(gpu.linked_gpus)
    assert not gpu.linked(gpu.linked_gpus + 1)


@pytest.mark.parametrize(
    "name, ranks, gb_s",
    [
        ("A100-80GB-SXM", 8, 300),
        ("A100-80GB-PCIe", 2, 300),
        ("A100-80GB-PCIe", 4, 32),
        ("L40S-48GB", 2, 32),
        ("H100-80GB-SXM", 16, 64),
    ],
)
def test_beyond_its_links_a_gpu_speaks_over_pcie(name, ranks, gb_s):
    """The bandwidth is half of the link's in both directions, or PCIe's where links end."""
    assert gpus()[name].peer_gb_s(ranks) == gb_s


def test_measured_shares_are_shares():
    """What a matrix product reached is below the peak, and known for the A100 and the H100."""
    known = {name: gpu.matmul_fraction for name, gpu in gpus().items() if gpu.matmul_fraction}
    assert {"A100-80GB-SXM", "H100-80GB-SXM"} <= set(known)
    assert all(0.5 < share < 1 for share in known.values())


@pytest.mark.parametrize(
    "name, written",
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB-SXM"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB-SXM"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB-PCIe"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB-SXM"),
        ("NVIDIA H100 PCIe", "H100-80GB-PCIe"),
        ("NVIDIA H100 NVL", "H100-94GB-NVL"),
        ("NVIDIA H200", "H200-141GB-SXM"),
        ("NVIDIA L40S", "L40S-48GB"),
        ("NVIDIA L4", "L4-24GB"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090-24GB"),
        ("NVIDIA RTX A6000", "RTX-A6000-48GB"),
        ("AMD Instinct MI300X OAM", "MI300X-192GB"),
        ("a100-80gb-sxm", "A100-80GB-SXM"),
        ("A100-80GB-SMX", "A100-80GB-SXM"),
        ("RTX4090", "RTX-4090-24GB"),
        ("4090", "RTX-4090-24GB"),
        ("A100", "one of: A100-40GB-SXM, A100-40GB-PCIe, A100-80GB-SXM, A100-80GB-PCIe"),
        ("A100 80GB", "one of: A100-80GB-SXM, A100-80GB-PCIe"),
        ("GTX 1080", f"one of: {', '.join(gpus())}"),
    ],
)
def test_another_spelling_of_a_gpu_gets_the_catalogues(name, written):
    """nvidia-smi's product names, other capitals and slips name the model, a bare chip its boards."""
    assert meant(name) == written
