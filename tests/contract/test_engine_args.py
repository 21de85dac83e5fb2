"""Is what we believe of vLLM and Ray still true of the installed ones?

Imports vLLM and builds its configuration, which checks every rule that needs no accelerator; starts
no engine.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from rayserve.engine import VLLM_VERSION
from rayserve.plan import parse_plan
from rayserve.planner.catalogue import gpus, ray_labels

ROOT = Path(__file__).parent.parent.parent
DATA = ROOT / "rayserve" / "data"
GOLDEN = ROOT / "tests" / "golden"
PLANS = sorted(GOLDEN.glob("*.plan.yml"))


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")


def namespace(path: Path, tmp_path: Path, **changes):
    """vLLM's arguments of a golden plan, with the architecture alone in place of a checkpoint."""
    from rayserve.serving.engine import engine_namespace

    plan = parse_plan(yaml.safe_load(path.read_text()), str(path))
    spec = yaml.safe_load((GOLDEN / path.name.replace(".plan", "")).read_text())
    config = (GOLDEN / spec["rayserve_cluster"]["model"]["config"]).read_text()
    (tmp_path / "config.json").write_text(config)
    frontend = [item for item in plan.replica.frontend_args if item.name != "chat_template"]
    replica = plan.replica.model_copy(
        update={"model": str(tmp_path), "lora_adapters": [], "frontend_args": frontend}
    )
    args = engine_namespace(replica)
    # What a folder with config.json alone cannot give, or this machine lacks.
    args.skip_tokenizer_init = True
    args.revision = args.speculative_config = None
    for name, value in changes.items():
        setattr(args, name, value)
    return args


def test_snapshot_of_arguments_is_fresh():
    """The committed snapshot is what the installed vLLM accepts, word for word."""
    from rayserve.engine.snapshot import build, render

    path = DATA / f"vllm-{VLLM_VERSION}-args.json"
    assert path.read_text() == render(build())


def test_snapshot_of_models_is_fresh():
    """The committed list of architectures is that of the installed vLLM and Transformers."""
    from rayserve.engine.snapshot import build_models, render_models

    path = DATA / f"vllm-{VLLM_VERSION}-models.json"
    assert path.read_text() == render_models(build_models())


def test_ray_knows_our_accelerator_labels():
    """Our list of Ray's labels is the installed Ray's own."""
    from ray.util.accelerators import accelerators

    theirs = {v for k, v in vars(accelerators).items() if k[0].isupper() and isinstance(v, str)}
    assert set(ray_labels()) == theirs


@pytest.mark.parametrize(
    "product, label",
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA H100 NVL", "H100"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA GeForce RTX 3090", "GeForce-RTX-3090"),
        ("NVIDIA GeForce RTX 5090", "GeForce-RTX-5090"),
    ],
)
def test_ray_labels_a_node_as_the_catalogue_says(product, label):
    """Ray derives from a GPU's product name the label that our bundles ask for (trap 1)."""
    from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager

    assert NvidiaGPUAcceleratorManager._gpu_name_to_accelerator_type(product) == label
    assert label in {gpu.label for gpu in gpus().values()}


def test_ray_reads_the_environment_that_we_set():
    """Every variable of the plan's environment is one that Ray's or Serve's own source reads."""
    import ray
    import ray._common.usage.usage_constants as usage
    from ray._private.authentication import authentication_token_setup as token
    from ray.serve._private import constants

    modules = (constants, usage, token)
    source = "".join(Path(str(module.__file__)).read_text() for module in modules)
    raylet = (Path(ray.__file__).parent / "core" / "src" / "ray" / "raylet" / "raylet").read_bytes()
    names = {
        item["name"]
        for path in PLANS
        for item in yaml.safe_load(path.read_text())["rayserve_plan"]["environment"]
    }
    assert len(names) >= 7
    # The raylet's own settings are lower case, and its binary holds their names without `RAY_`.
    unread = [
        name
        for name in names
        if f'"{name}"' not in source
        and not (name != name.upper() and name.removeprefix("RAY_").encode() in raylet)
    ]
    assert unread == []


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.name.removesuffix(".plan.yml"))
def test_vllm_accepts_the_arguments_of_a_golden_plan(path, tmp_path):
    """vLLM's own argument classes take every engine and frontend argument that we plan."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    args = namespace(path, tmp_path)
    engine = AsyncEngineArgs.from_cli_args(args)
    for item in yaml.safe_load(path.read_text())["rayserve_plan"]["replica"]["engine_args"]:
        if item["name"] in ("revision", "speculative_config"):
            continue
        held = getattr(engine, item["name"])
        assert held == item["value"] or not isinstance(held, int | float | str | bool), item


def test_vllm_builds_the_configuration_of_the_demo_model(tmp_path):
    """The CPU plan becomes a whole vLLM configuration with our limits and sampling defaults."""
    from rayserve.serving.engine import engine_config

    config = engine_config(namespace(GOLDEN / "cpu-two-stages.plan.yml", tmp_path,
                                     distributed_executor_backend="mp"))  # fmt: skip
    assert config.model_config.max_model_len == 1024
    assert config.parallel_config.tensor_parallel_size == 2
    assert config.model_config.get_diff_sampling_param() == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
    }


@pytest.mark.parametrize("mode, unpadded", [("interactivity", 32), ("balanced", 2)])
def test_interactivity_records_a_graph_for_each_small_batch(tmp_path, mode, unpadded):
    """vLLM takes our performance_mode beside our other arguments, and captures sizes 1 to 32."""
    from vllm.config import CUDAGraphMode

    from rayserve.serving.engine import engine_config

    config = engine_config(namespace(GOLDEN / "cpu-two-stages.plan.yml", tmp_path,
                                     distributed_executor_backend="mp", performance_mode=mode,
                                     enforce_eager=False))  # fmt: skip
    assert config.performance_mode == mode
    # The CPU engine records none, so the choice of sizes is asked for as a GPU would have it made.
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    config.compilation_config.cudagraph_capture_sizes = None
    config.compilation_config.max_cudagraph_capture_size = None
    config._set_cudagraph_sizes()
    sizes = config.compilation_config.cudagraph_capture_sizes
    assert sizes[:unpadded] == list(range(1, unpadded + 1))
    assert unpadded == 32 or 3 not in sizes


def test_a_replica_binds_the_address_of_http_options():
    """Why HAProxy takes loopback or every address alone: replicas bind what it binds."""
    import inspect

    from ray.serve._private import haproxy, replica

    assert '{**self._http_options.model_dump(), "port": port}' in inspect.getsource(replica)
    source = inspect.getsource(haproxy.HAProxyManager._target_to_server)
    assert "get_localhost_ip() if target.ip == self._node_ip_address else target.ip" in source


def test_kv_offload_reaches_the_engine(tmp_path):
    """Host-memory and disk tier of kv_offload stand in vLLM's transfer configuration."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    args = namespace(GOLDEN / "everything.plan.yml", tmp_path)
    keep = ("kv_offloading_size", "kv_offloading_backend", "kv_transfer_config")
    tiny = json.loads((GOLDEN / "configs" / "tiny.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(tiny))
    engine = AsyncEngineArgs(
        model=str(tmp_path), skip_tokenizer_init=True, enforce_eager=True,
        **{name: getattr(args, name) for name in keep},
    )  # fmt: skip
    transfer = engine.create_engine_config().kv_transfer_config
    assert transfer.kv_connector == "OffloadingConnector"
    assert transfer.kv_role == "kv_both"
    extra = transfer.kv_connector_extra_config
    assert extra["cpu_bytes_to_use"] == 256 * 2**30
    assert extra["spec_name"] == "TieringOffloadingSpec"
    assert extra["secondary_tiers"] == [{"type": "fs", "root_dir": "/nvme/kv"}]


def test_rope_scaling_reaches_the_model_config(tmp_path):
    """rope_scaling replaces the checkpoint's positions and lengthens the context."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    planned = namespace(GOLDEN / "everything.plan.yml", tmp_path).hf_overrides
    tiny = json.loads((GOLDEN / "configs" / "tiny.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(tiny))
    engine = AsyncEngineArgs(
        model=str(tmp_path),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=262144,
        hf_overrides=planned,
    )
    config = engine.create_engine_config()
    assert config.model_config.max_model_len == 262144
    assert config.model_config.hf_config.rope_parameters["rope_type"] == "yarn"


def test_an_empty_list_of_media_domains_would_allow_every_domain():
    """The reason for our placeholder domain: vLLM treats an empty list as no restriction."""
    import inspect

    from vllm.multimodal.media.connector import MediaConnector

    source = inspect.getsource(MediaConnector._assert_url_in_allowed_media_domains)
    assert "self.allowed_media_domains\n            and " in source


def test_vllm_knows_our_speculative_methods():
    """Every method that a spec may name is one of the installed vLLM's."""
    from typing import get_args

    from vllm.config.speculative import SpeculativeMethod

    from rayserve.spec.model import Speculative

    ours = get_args(Speculative.model_fields["method"].annotation)
    theirs = {name for name in get_args(SpeculativeMethod) if isinstance(name, str)}
    assert set(ours) <= theirs


def test_usage_reporting_is_off_under_our_environment(monkeypatch):
    """vLLM's own switch reads the variables that every plan sets."""
    from vllm.usage import usage_lib

    monkeypatch.setattr(usage_lib, "_USAGE_STATS_ENABLED", None)
    monkeypatch.setenv("DO_NOT_TRACK", "1")
    assert usage_lib.is_usage_stats_enabled() is False
