"""Does hf_quant_config.json beside config.json count as it does for vLLM?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from rayserve import inventory, planning
from rayserve.errors import SpecError, Where
from rayserve.files import read_config
from rayserve.planner.support.modelopt import wants_quant_config, with_quant_config
from rayserve.planner.weights.architecture import read_architecture
from rayserve.planner.weights.tensors import Place, weights_bytes
from tests.bad_specs import ROOT

HERE = Where("hf_quant_config.json")
PLAIN = json.loads((ROOT / "inventories" / "example" / "model" / "config.json").read_text())
PLAIN.pop("quantization_config")
LAYERS = {"model.layers.0.self_attn.o_proj": {"quant_algo": "FP8"}}


def quant(algorithm: str, **more: object) -> dict[str, object]:
    """The file as ModelOpt writes it."""
    inner = {"quant_algo": algorithm, "exclude_modules": ["lm_head"], **more}
    return {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": inner}


def merged(config: dict[str, object], file: object) -> dict[str, object]:
    """Both, brought together."""
    return dict(with_quant_config(config, json.dumps(file).encode(), HERE))


def weights(config: dict[str, object]) -> int:
    """Bytes of all weights."""
    return weights_bytes(read_architecture(config, HERE), Place())


@pytest.mark.parametrize(
    "algorithm, method, share",
    [("FP8", "modelopt", 0.5), ("fp8", "modelopt", 0.5), ("NVFP4", "modelopt_fp4", 0.28)],
)
def test_the_format_of_the_file_is_that_of_the_weights(algorithm, method, share):
    """The method is vLLM's for the algorithm, and the weights shrink with it."""
    config = merged(PLAIN, quant(algorithm))
    assert config["quantization_config"]["quant_method"] == method
    assert weights(config) / weights(PLAIN) == pytest.approx(share, abs=0.02)


def test_only_what_says_nothing_itself_asks_for_the_file():
    """A config.json with a quantization of its own is left alone, but for mixed formats without layers."""
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    assert wants_quant_config(PLAIN)
    assert not wants_quant_config(PLAIN | {"quantization_config": {"quant_method": "fp8"}})
    assert wants_quant_config(PLAIN | {"quantization_config": mixed})
    assert not wants_quant_config(
        PLAIN | {"quantization_config": mixed | {"quantized_layers": LAYERS}}
    )


def test_mixed_formats_take_their_layers_from_the_file():
    """Its list of layers is the quantization, under vLLM's name for mixed formats."""
    mixed = {"quantization_config": {"quant_method": "modelopt_mixed"}}
    config = merged(PLAIN | mixed, quant("MIXED_PRECISION", quantized_layers=LAYERS))
    assert config["quantization_config"]["quant_method"] == "modelopt_mixed"
    assert weights(config) < weights(PLAIN)


@pytest.mark.parametrize(
    "file, needed",
    [
        (quant("MIXED_PRECISION", quantized_layers=LAYERS), "`quant_algo`"),
        (quant("INT3"), "`quant_algo`"),
        ([1], "a JSON object"),
    ],
    ids=["mixed-alone", "unknown", "list"],
)
def test_what_vllm_does_not_take_from_the_file_is_refused(file, needed):
    """An algorithm that vLLM refuses, or no object, is an error that names the file."""
    with pytest.raises(SpecError) as caught:
        merged(PLAIN, file)
    assert needed in caught.value.needed
    assert caught.value.where == HERE


def test_it_is_read_beside_a_config_json_of_that_name(tmp_path):
    """The file beside config.json counts; beside another name it may belong to something else."""
    for name in ("config.json", "w4.json"):
        (tmp_path / name).write_text(json.dumps(PLAIN))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quant("FP8")))
    assert "quantization_config" in (read_config(tmp_path / "config.json") or {})
    assert "quantization_config" not in (read_config(tmp_path / "w4.json") or {})


@pytest.fixture
def env(tmp_path: Path) -> Path:
    """The example with a plain config.json, and its checkpoint on this machine."""
    shutil.copytree(ROOT / "inventories" / "example", tmp_path / "example")
    folder = tmp_path / "example"
    (tmp_path / "checkpoint").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(PLAIN))
    spec = folder / "group_vars" / "all" / "cluster.yml"
    text = yaml.safe_load(spec.read_text())
    text["rayserve_cluster"]["model"]["path"] = str(tmp_path / "checkpoint")
    text["rayserve_cluster"].pop("slo")
    spec.write_text(yaml.safe_dump(text))
    return folder


def test_a_change_of_the_file_is_another_revision(env):
    """Its digest is part of the replica, and goes when the file goes."""
    files, beside = inventory.locate(str(env), None), env / "model" / "hf_quant_config.json"
    beside.write_text(json.dumps(quant("FP8")))
    first = planning.make_plan(files).plan
    inventory.write_all(planning.make_plan(files).texts)
    beside.write_text(json.dumps(quant("FP8", kv_cache_quant_algo="FP8")))
    second = planning.make_plan(files).plan
    assert second.revision != first.revision
    names = [item.name.rpartition("/")[2] for item in first.replica.content]
    assert names == ["config.json", "hf_quant_config.json"]


def test_a_copy_of_config_json_that_left_it_behind_is_refused(env, tmp_path):
    """Where the checkpoint is at hand and has the file, the copy beside the spec needs it too."""
    there = tmp_path / "checkpoint" / "hf_quant_config.json"
    there.write_text(json.dumps(quant("FP8")))
    with pytest.raises(SpecError, match=r"beside the model's config\.json") as caught:
        planning.make_plan(inventory.locate(str(env), None))
    assert str(there) in caught.value.found
