"""Do the rows of data/precisions.yml say what the installed vLLM's own code says?

Imports vLLM; needs no GPU. Classes that only a CUDA build can import are compared by their source.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import sys
import types
from pathlib import Path
from typing import get_args

import pytest
import vllm

from rayserve.planner.support.precision import Attention, backends_for, table
from rayserve.planner.support.schemes import ONLINE

ROOT = Path(vllm.__file__).parent
TABLE = table()
CHIPS = (75, 80, 86, 89, 90, 100, 103, 120)
HEADS = {"full": (64, 80, 96, 128, 192, 256, 512), "mla": (320, 576), "sparse_mla": (512, 576)}
FULL = tuple(name for name, row in TABLE.attention.items() if row["kind"] == "full")
CLASSES = {
    "FLASH_ATTN": "flash_attn.FlashAttentionBackend",
    "FLASHINFER": "flashinfer.FlashInferBackend",
    "TRITON_ATTN": "triton_attn.TritonAttentionBackend",
    "FLEX_ATTENTION": "flex_attention.FlexAttentionBackend",
    "TURBOQUANT": "turboquant_attn.TurboQuantAttentionBackend",
    "FLASH_ATTN_MLA": "mla.flashattn_mla.FlashAttnMLABackend",
    "FLASHMLA": "mla.flashmla.FlashMLABackend",
    "FLASHINFER_MLA": "mla.flashinfer_mla.FlashInferMLABackend",
    "CUTLASS_MLA": "mla.cutlass_mla.CutlassMLABackend",
    "TRITON_MLA": "mla.triton_mla.TritonMLABackend",
    "FLASH_ATTN_MLA_SPARSE": "mla.flashattn_mla_sparse.FlashAttnMLASparseBackend",
    "FLASHMLA_SPARSE": "mla.flashmla_sparse.FlashMLASparseBackend",
    "FLASHINFER_MLA_SPARSE": "mla.flashinfer_mla_sparse.FlashInferMLASparseTRTLLMBackend",
    "FLASHINFER_MLA_SPARSE_SM90": "mla.flashinfer_mla_sparse_sm90.FlashInferMLASparseSM90Backend",
    "FLASHINFER_MLA_SPARSE_SM120": "mla.flashinfer_mla_sparse.FlashInferMLASparseSM120Backend",
}


def names_of(name: str) -> set[str]:
    """What a class of the table lists as its KV types, read from its source."""
    module, _, wanted = CLASSES[name].rpartition(".")
    path = ROOT / "v1" / "attention" / "backends" / f"{module.replace('.', '/')}.py"
    for node in ast.walk(ast.parse(path.read_text())):
        for line in node.body if isinstance(node, ast.ClassDef) and node.name == wanted else ():
            if isinstance(line, ast.AnnAssign) and "supported_kv_cache_dtypes" in ast.dump(line):
                return set(ast.literal_eval(line.value))
    raise AssertionError(f"{name} has no list of KV types")


def blocks_of(name: str) -> int:
    """The least number in what a class of the table returns as its kernel's block sizes."""
    module, _, wanted = CLASSES[name].rpartition(".")
    path = ROOT / "v1" / "attention" / "backends" / f"{module.replace('.', '/')}.py"
    tree = ast.parse(path.read_text())
    owner = next(one for one in ast.walk(tree) if getattr(one, "name", "") == wanted)
    named = "get_supported_kernel_block_sizes"
    method = next(one for one in owner.body if getattr(one, "name", "") == named)
    returned = [
        node for one in ast.walk(method) if isinstance(one, ast.Return) for node in ast.walk(one)
    ]
    return min(node.value for node in returned if isinstance(node, ast.Constant))


def test_the_table_is_of_the_installed_version():
    """The table names the version that is installed."""
    assert vllm.__version__.startswith(TABLE.vllm)


def test_the_kernels_of_quantized_weights_take_the_types_of_the_table():
    """Where a method takes more, cutlass_scaled_mm asserts these; Marlin's own are compiled."""
    tree = ast.parse((ROOT / "_custom_ops.py").read_text())
    scaled = next(one for one in tree.body if getattr(one, "name", "") == "cutlass_scaled_mm")
    first = next(one for one in ast.walk(scaled) if isinstance(one, ast.Assert))
    types = {node.attr for node in ast.walk(first.test) if isinstance(node, ast.Attribute)}
    assert types == set(TABLE.kernel_act)


def test_every_method_of_vllm_has_a_row_and_the_removed_have_none():
    """Methods are those that --quantization takes, no more and no less."""
    from vllm.model_executor.layers.quantization import (
        DEPRECATED_QUANTIZATION_METHODS,
        QUANTIZATION_METHODS,
    )

    assert set(TABLE.methods) == set(QUANTIZATION_METHODS)
    assert not set(TABLE.removed) & set(QUANTIZATION_METHODS)
    deprecated = {name for name, row in TABLE.methods.items() if row.get("deprecated")}
    assert deprecated == set(DEPRECATED_QUANTIZATION_METHODS)


@pytest.mark.parametrize("name", TABLE.methods)
def test_capability_and_compute_types_of_a_method(name):
    """Each row has the method's own minimum capability and compute types."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    method = get_quantization_config(name)
    assert method.get_min_capability() == TABLE.methods[name]["min"]
    try:
        types = method.get_supported_act_dtypes()
    except TypeError:  # some are methods of an instance, though they read nothing of it
        types = method.get_supported_act_dtypes(None)
    # float8 is what a kernel takes, never a model's type
    assert {str(t).removeprefix("torch.") for t in types} - {"float8_e4m3fn"} == set(
        TABLE.methods[name]["act"]
    )


def test_online_methods_are_vllms():
    """What the spec may ask of an unquantized checkpoint is what vLLM quantizes while it loads."""
    from vllm.config.quantization import _ONLINE_SHORTHANDS

    assert set(_ONLINE_SHORTHANDS) <= set(ONLINE)
    assert set(ONLINE) - set(_ONLINE_SHORTHANDS) <= {"fp8", "experts_int8"}


def test_names_of_kv_cache_types():
    """The names are those of --kv-cache-dtype."""
    from vllm.config.cache import CacheDType

    assert list(TABLE.kv_cache_dtypes) == list(get_args(CacheDType))


def test_every_source_is_a_line_of_the_installed_package():
    """Each row points to a line that exists and is not blank."""
    rows = [*TABLE.methods.values(), *TABLE.formats.values(), *TABLE.attention.values()]
    for source in sorted({str(row["source"]) for row in rows}):
        file, _, line = source.partition(":")
        text = (ROOT / file).read_text().splitlines()[int(line) - 1]
        assert text.strip(), source
        if "quantization/" in file and "compressed_tensors" not in file:
            assert "def get_min_capability" in text, source


@pytest.mark.parametrize("name", CLASSES)
def test_kv_types_of_an_attention_backend(name):
    """The KV types of a row are those that the backend's class lists."""
    ours = {kv for rule in TABLE.attention[name]["kv"] for kv in rule["types"]}
    # no GPU of any capability in the table reads these in the two sparse backends of SM90 and 120
    assert ours == names_of(name)


@pytest.mark.parametrize("name", CLASSES)
def test_blocks_of_an_attention_backend(name):
    """The least block of a row is that of the backend's class."""
    assert TABLE.attention[name]["blocks"] == blocks_of(name)


@pytest.fixture
def on_chip(monkeypatch):
    """Lets vLLM's backends believe that they are asked for on a CUDA GPU."""
    from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum

    class Cuda(Platform):
        _enum = PlatformEnum.CUDA
        device_name, device_type = "cuda", "cuda"
        capability = DeviceCapability(8, 0)

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return cls.capability

    config = types.SimpleNamespace(
        attention_config=types.SimpleNamespace(flash_attn_version=None),
        cache_config=types.SimpleNamespace(),
        model_config=types.SimpleNamespace(
            hf_text_config=None, rswa_window=None, is_diffusion=False
        ),
        parallel_config=types.SimpleNamespace(decode_context_parallel_size=1),
    )
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: config)

    def turn(chip: int, kv: str, *, images: bool) -> DeviceCapability:
        Cuda.capability = DeviceCapability(chip // 10, chip % 10)
        config.cache_config.cache_dtype = kv
        config.model_config.is_mm_prefix_lm = images
        return Cuda.capability

    import vllm.utils.flashinfer as flashinfer_tools
    from vllm.v1.attention.backends import fa_utils, flash_attn, turboquant_attn

    assert turboquant_attn  # imported before the platform changes

    # A CPU build has the package without its kernels, and its __init__ refuses to be imported.
    package = types.ModuleType("vllm.vllm_flash_attn")
    package.__path__ = [str(ROOT / "vllm_flash_attn")]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    interface = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")

    for module in (
        fa_utils,
        flash_attn,
        flashinfer_tools,
        importlib.import_module("vllm.platforms"),
    ):
        monkeypatch.setattr(module, "current_platform", Cuda(), raising=False)
    for version in (2, 3, 4):
        monkeypatch.setattr(interface, f"FA{version}_AVAILABLE", True, raising=False)
    monkeypatch.setattr(fa_utils.logger, "error", lambda *_: None)
    monkeypatch.setattr(flash_attn, "is_flash_attn_varlen_func_available", lambda: True)
    for name in ("flash_attn_supports_sinks", "flash_attn_supports_kv_cache_dtype"):
        monkeypatch.setattr(flash_attn, name, getattr(fa_utils, name), raising=False)
    return turn


@pytest.mark.parametrize("name", ["FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION", "TURBOQUANT"])
def test_a_backend_takes_what_vllm_says_it_takes(name, on_chip):
    """Head dims, KV types, sinks and images on eight chips: the class and our row agree.

    But for one thing, which vLLM finds only as it builds the layer: Triton's FP8 below 8.9.
    """
    import torch

    module, _, cls_name = CLASSES[name].rpartition(".")
    backend = getattr(importlib.import_module(f"vllm.v1.attention.backends.{module}"), cls_name)
    kinds = [kv for kv in TABLE.kv_cache_dtypes if kv != "ultraquant_4bit"]
    asked = itertools.product(CHIPS, HEADS["full"], kinds, (False, True), (False, True))
    compared, differ = 0, []
    for chip, dim, kv, sinks, images in asked:
        if name == "TRITON_ATTN" and kv.startswith("fp8") and chip < 89:
            continue
        reasons = backend.validate_configuration(
            head_size=dim, dtype=torch.bfloat16, kv_cache_dtype=kv, block_size=None, use_mla=False,
            has_sink=sinks, use_sparse=False, use_mm_prefix=images, use_per_head_quant_scales=False,
            device_capability=on_chip(chip, kv, images=images), attn_type="decoder",
        )  # fmt: skip
        layer = Attention("full", dim, sinks=sinks, images=images)
        ours = name in backends_for(layer, dtype="bfloat16", kv=kv, capability=chip)
        if ours is bool(reasons):
            differ.append((chip, dim, kv, sinks, images, reasons))
        compared += 1
    assert not differ, "\n".join(map(str, differ))
    assert compared > 1000
