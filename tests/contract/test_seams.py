"""Do the places where we reach into Ray and vLLM look as we expect in the pinned versions?

None of them is public, so an upgrade may move them without a word: then these tests say which.
"""

from __future__ import annotations

import inspect
import multiprocessing
from types import SimpleNamespace

import pytest

from rayserve.haproxy import haproxy_files
from rayserve.serving import guards
from tests.errors_of import error_of


def test_serve_sets_the_flag_that_the_drain_probe_reads():
    """The replica has `_shutting_down`, and sets it first of all when it is told to stop."""
    from ray.serve._private.replica import Replica, ReplicaActor

    begin = inspect.getsource(Replica._perform_graceful_shutdown)
    assert begin.index("self._shutting_down = True") < begin.index("await ")
    assert "self._shutting_down = False" in inspect.getsource(Replica.__init__)
    assert "self._replica_impl" in inspect.getsource(ReplicaActor.__init__)


def test_the_drain_probe_finds_nothing_outside_of_a_replica():
    """A process that runs no replica is never draining."""
    from rayserve.serving.drain import drain_probe

    assert drain_probe()() is False


def test_vllm_leaves_the_logging_of_a_replica_alone(tmp_path, monkeypatch):
    """Creating a configuration applies its logging, which closes all handlers, unless it holds already."""
    import logging.handlers

    from vllm import logger
    from vllm.engine.arg_utils import AsyncEngineArgs

    from rayserve.serving import engine, ledger

    path = ledger.write_logging_config(tmp_path)
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", str(path))
    monkeypatch.setattr(logger, "_last_configured_logging_config", None)
    args = engine.make_arg_parser(engine._ArgumentParser()).parse_args([])
    config = AsyncEngineArgs.from_cli_args(args).create_logging_config()
    assert config.pylogging_config_file == str(path)
    assert "configure_logging_if_needed(logging_config)" in inspect.getsource(
        AsyncEngineArgs.create_engine_config
    )
    target = logging.StreamHandler()
    handler = logging.handlers.MemoryHandler(10, target=target)
    engine.keep_logging(args)
    logger.configure_logging_if_needed(config)
    assert handler.target is target


def test_the_engine_core_is_started_the_way_that_its_module_is_told():
    """`vllm.v1.engine.utils` looks `get_mp_context` up by name when it starts the engine core."""
    from vllm.v1.engine import utils

    from rayserve.serving.prefork import engine_core_forked

    source = inspect.getsource(utils.CoreEngineProcManager.__init__)
    assert "context = get_mp_context()" in source
    before = utils.get_mp_context
    with engine_core_forked():
        assert utils.get_mp_context() is multiprocessing.get_context("forkserver")
    assert utils.get_mp_context is before


def test_the_preloaded_modules_can_be_imported_and_touch_no_device():
    """Python's fork server skips what it cannot import; a CUDA context in it would break its children."""
    import subprocess
    import sys

    from rayserve.serving import prefork

    modules = [*prefork._COMMON[1:], prefork._WORKER["cpu"]]
    lines = [f"import {module}" for module in modules]
    lines += ["import torch", "assert not torch.cuda.is_initialized()"]
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_vllms_request_states_hold_what_is_charged():
    """A state knows the prompt's length, and its detokenizer how much was generated."""
    from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    assert "self.prompt_len = " in inspect.getsource(RequestState.__init__)
    assert hasattr(BaseIncrementalDetokenizer, "num_output_tokens")
    source = inspect.getsource(OutputProcessor.__init__)
    assert "self.request_states" in source
    assert "self.external_req_ids" in source


def test_vllm_still_logs_the_messages_that_the_ledger_reads():
    """Each message prefix stands in vLLM's source, and its seconds where the ledger looks."""
    from pathlib import Path

    import vllm

    from rayserve.serving.ledger import ENGINE_MESSAGES

    root = Path(vllm.__file__).parent
    folders = [root / "v1", root / "model_executor" / "model_loader"]
    text = "\n".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    for prefix in ENGINE_MESSAGES:
        assert prefix in text, prefix


def test_the_gpu_worker_still_keeps_what_the_ledger_reports():
    """The worker's attributes are read by name, and its sum is the one that a line must keep."""
    from pathlib import Path

    import vllm

    source = (Path(vllm.__file__).parent / "v1" / "worker" / "gpu_worker.py").read_text()
    for name in (
        "init_snapshot",
        "requested_memory",
        "total_consumed",
        "peak_activation_memory",
        "cudagraph_memory_estimate",
        "available_kv_cache_memory_bytes",
    ):
        assert f"self.{name} = " in source, name
    assert "total_consumed + profile_result.transient_peak_headroom" in source
    assert "transient_peak_headroom + cudagraph_memory_estimate_applied" in source
    assert "- profile_result.non_kv_cache_memory" in source


def test_the_cpu_engine_refuses_the_ray_executor():
    """Why TP x PP over hosts is proven here for placement only: vLLM's CPU platform names no Ray device."""
    from vllm.platforms import current_platform
    from vllm.v1.executor import ray_utils

    assert current_platform.ray_device_key == ""
    source = inspect.getsource(ray_utils.initialize_ray_cluster)
    assert "does not support ray" in source


@pytest.mark.parametrize(
    "variable",
    [
        "RAY_SERVE_ENABLE_HA_PROXY",
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S",
        *haproxy_files("/h"),
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S",
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS",
        "RAY_SERVE_HAPROXY_RETRY_ON",
        "RAY_SERVE_PORT_QUARANTINE_S",
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD",
    ],
)
def test_serve_reads_the_variables_that_a_plan_sets(variable):
    """A variable that Serve no longer reads would be set in vain."""
    from ray.serve._private import constants

    assert f'"{variable}"' in inspect.getsource(constants)


def test_vllm_waits_for_its_engine_as_long_as_the_plan_says(monkeypatch):
    """Both waits of the engine's client for its core end after VLLM_ENGINE_READY_TIMEOUT_S."""
    from vllm import envs
    from vllm.v1.engine import core_client

    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", "1234")
    assert envs.environment_variables["VLLM_ENGINE_READY_TIMEOUT_S"]() == 1234
    source = inspect.getsource(core_client)
    assert "from vllm.envs import VLLM_ENGINE_READY_TIMEOUT_S" in source
    assert source.count("VLLM_ENGINE_READY_TIMEOUT_S * 1000") == 2


def test_serves_haproxy_folder_holds_config_and_admin_socket():
    """Why `rayserve-haproxy` closes the folder of its configuration: the socket for all lies in it."""
    from ray.serve._private import haproxy, haproxy_templates

    assert "socket_path }} mode 666 level admin" in inspect.getsource(haproxy_templates)
    source = inspect.getsource(haproxy)
    assert '[haproxy_bin, "-db", "-f", self.config_file_path]' in source
    assert "socket_path=_per_node(RAY_SERVE_HAPROXY_SOCKET_PATH)" in source
    assert "config_file_path=_per_node(RAY_SERVE_HAPROXY_CONFIG_FILE_LOC)" in source


def test_a_gpu_that_cannot_be_named_costs_no_start(monkeypatch):
    """The driver's refusal is vLLM's own NVMLError; the ledger then does without the name."""
    from vllm.platforms import current_platform
    from vllm.third_party.pynvml import NVML_ERROR_GPU_IS_LOST, NVMLError

    from rayserve.serving.ledger import device_name

    class Platform:
        error: Exception = NVMLError(NVML_ERROR_GPU_IS_LOST)

        def get_device_name(self, index):
            raise self.error

    assert device_name(0) == current_platform.get_device_name(0)
    monkeypatch.setattr("vllm.platforms.current_platform", Platform())
    assert device_name(0) == ""
    Platform.error = NotImplementedError()
    assert device_name(0) == ""


@pytest.mark.parametrize(
    "host, bound", [("0.0.0.0", "0.0.0.0"), (None, "0.0.0.0"), ("127.0.0.1", "127.0.0.1")]
)
def test_serve_itself_says_where_it_listens(monkeypatch, host, bound):
    """Its running config is asked, and a door without keys opens behind loopback alone."""
    from ray.serve.config import HTTPOptions

    options = HTTPOptions(host=host)
    monkeypatch.setattr(
        "ray.serve.context._get_global_client", lambda: SimpleNamespace(http_config=options)
    )
    assert guards.serve_host() == bound
    error = error_of(guards.check_keys, "", "local", {}, guards.serve_host)
    assert (error is None) is (bound == "127.0.0.1")
    assert error is None or error.found == f"none, and Serve listens on {bound}"
