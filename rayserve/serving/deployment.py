"""The Serve deployment: one replica, which holds a gang of GPUs and runs vLLM in process."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from importlib import resources
from pathlib import Path
from typing import Any

import psutil
import ray

from rayserve.autoscaling import ReplicaLoad, report
from rayserve.errors import HostError, StartError
from rayserve.plan import LivePlan, NamedValue, Placement, ReplicaPlan, ScalingPlan
from rayserve.serve_config import HAPROXY_SWITCH, missing_environment
from rayserve.serving import prefork
from rayserve.serving.door import Door
from rayserve.serving.drain import drain_probe
from rayserve.serving.ledger import PHASE_FILE, StartLedger, append
from rayserve.serving.load import EngineLoad

logger = logging.getLogger("ray.serve")


class Engine:
    """A replica: vLLM's engine in process, its own OpenAI app, and the door in front of it.

    Serve calls the methods below by name; `__serve_build_asgi_app__` hands it the app.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, replica: ReplicaPlan, environment: list[NamedValue], profile: str
    ) -> None:
        self._replica = replica
        self._load = EngineLoad()
        self._engine: Any = None
        self._door: Door | None = None
        self._scaling: ScalingPlan | None = None
        self._ledger = StartLedger(replica.revision)
        _check_environment(environment, profile)
        check_gang(replica.placement)
        check_stages(replica.placement)
        try:
            async with asyncio.timeout(replica.start_timeout_s):
                await self._start()
        except TimeoutError:
            _kill_children()
            raise StartError(
                f"a ready engine within the start budget of {replica.start_timeout_s:.0f} s",
                found=f"not ready after phases {self._ledger.phases}",
                do="read the replica's log, or raise timeouts.start_s and plan again",
            ) from None
        except Exception:
            # Entry of the replica's process: whatever failed, its children must not keep the GPUs.
            _kill_children()
            raise

    async def _start(self) -> None:
        ledger, replica = self._ledger, self._replica
        phase_file = Path(tempfile.gettempdir()) / f"rayserve-phases-{os.getpid()}.jsonl"
        phase_file.unlink(missing_ok=True)
        os.environ[PHASE_FILE] = str(phase_file)
        os.environ.setdefault(
            "VLLM_LOGGING_CONFIG_PATH", str(resources.files("rayserve") / "data/vllm-logging.json")
        )
        forked = replica.placement.executor == "mp" and replica.start_method == "forkserver"
        if forked:
            prefork.start_server(replica.device)
        # In threads, so that Serve's own calls to this replica are answered meanwhile.
        with ledger.phase("import"):
            vllm = await asyncio.to_thread(_import_engine)
        with ledger.phase("config"):
            args = await asyncio.to_thread(vllm.engine_namespace, replica)
            config = await asyncio.to_thread(vllm.engine_config, args)
        with ledger.phase("engine"), prefork.engine_core_forked() if forked else nullcontext():
            self._engine = await asyncio.to_thread(vllm.start_engine, config, self._load)
        ledger.read_engine_phases(phase_file)
        phase_file.unlink(missing_ok=True)
        with ledger.phase("app"):
            app = await vllm.build_openai_app(self._engine, args)
        with ledger.phase("warm-up"):
            await vllm.warm_up(self._engine, replica.warmup_prompt_tokens)
        self._door = Door(app, None, is_draining=drain_probe())
        self._door.set_ready(True)
        memory = await self._engine.collective_rpc("rayserve_memory")
        record = ledger.line(memory, vllm.engine_facts(config))
        await asyncio.to_thread(append, Path(replica.state_dir), record)
        logger.info("start %s: ready after %.2f s", replica.revision, record["total_s"])

    def __serve_build_asgi_app__(self) -> Door:
        assert self._door is not None  # set by __init__, before Serve asks for the app
        return self._door

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take new limits while requests run. Serve calls it before the first request too."""
        live = LivePlan.model_validate(user_config)
        if not live.door.api_key_file and os.environ.get(HAPROXY_SWITCH) == "1":
            raise HostError(
                "an API key file, since Serve's HAProxy binds 0.0.0.0",
                found=f"{HAPROXY_SWITCH}=1 and no key file",
                do="set endpoint.api_key_file and plan again",
            )
        assert self._door is not None
        self._door.update(live.door)
        self._scaling = live.scaling

    async def check_health(self) -> None:
        """Fail when the engine is dead: then Serve replaces the replica.

        Raises:
            vllm.v1.engine.exceptions.EngineDeadError: the engine's processes are gone.
        """
        await self._engine.check_health()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What the autoscaling policy reads; empty until Serve has handed over the plan."""
        if self._scaling is None or self._door is None:
            return {}
        load = ReplicaLoad(
            in_flight=self._door.in_flight,
            running=self._load.running,
            waiting=self._load.waiting,
            kv_usage=self._load.kv_usage,
            ttft_ms=self._load.ttft_ms(time.monotonic()),
        )
        return report(load, self._scaling)

    def __del__(self) -> None:
        if getattr(self, "_engine", None) is not None:
            self._engine.shutdown()
            self._engine = None


def _import_engine() -> Any:
    from rayserve.serving import engine

    return engine


def _check_environment(environment: list[NamedValue], profile: str) -> None:
    missing = missing_environment(environment, os.environ)
    if not missing:
        return
    if profile == "production":
        raise HostError(
            "the environment of a production start on this Ray node",
            found="missing " + " ".join(missing),
            do="start Ray on every node with what `rayserve env <plan.yml>` prints",
        )
    logger.warning("this Ray node lacks %s: Serve's own timers apply", " ".join(missing))


def check_gang(placement: Placement) -> None:
    """A replica on one host must hold exactly its GPUs, or vLLM would share somebody else's."""
    if placement.executor != "mp" or "GPU" not in placement.bundles[0]:
        return
    held = len(ray.get_gpu_ids())
    if held != placement.gpus:
        raise HostError(
            f"{placement.gpus} GPUs held by this replica",
            found=str(held),
            do="deploy the generated Serve config, which asks for the whole gang in one bundle",
        )


def check_stages(placement: Placement) -> None:
    """Across hosts, each pipeline stage must sit whole on one host: its all-reduce uses NVLink.

    vLLM orders its ranks by node, so a stage is whole exactly when each node holds a multiple of
    tensor_parallel_size bundles.
    """
    if placement.executor != "ray":
        return
    group = ray.util.get_current_placement_group()
    nodes = Counter(ray.util.placement_group_table(group)["bundles_to_node_id"].values())
    split = [count for count in nodes.values() if count % placement.tensor_parallel_size]
    if split:
        raise HostError(
            f"a multiple of {placement.tensor_parallel_size} GPUs of this replica on each host",
            found=f"{sorted(nodes.values())} GPUs on {len(nodes)} hosts",
            do="free whole hosts for this replica; a stage split over hosts is slower than useful",
        )


def _kill_children() -> None:
    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
