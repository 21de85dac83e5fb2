"""The Serve deployment: one replica, which holds a gang of GPUs and runs vLLM in process."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final, Literal

import psutil
from ray import serve

from rayserve.autoscaling import ReplicaLoad, report
from rayserve.errors import RayserveError, StartError
from rayserve.health.facts import deaths, evidence
from rayserve.plan import NamedValue, ReplicaPlan, ScalingPlan
from rayserve.serving import guards, prefork
from rayserve.serving.door import Door
from rayserve.serving.drain import drain_probe
from rayserve.serving.ledger import (
    PHASE_FILE,
    StartLedger,
    append,
    show_vllm_messages,
    write_logging_config,
)
from rayserve.serving.load import EngineLoad
from rayserve.serving.schemas import constrains_every_tool
from rayserve.serving.suspects import Suspects
from rayserve.serving.vitals import Gauges, Vitals
from rayserve.starts import LEDGER, identity

logger = logging.getLogger("ray.serve")

PROBE_PROMPT: Final = 4
"""Tokens of a probe's prompt."""


class Engine:
    """A replica: vLLM's engine in process, its own OpenAI app, and the door in front of it.

    Serve calls the methods below by name; `__serve_build_asgi_app__` hands it the app.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        replica: ReplicaPlan,
        environment: list[NamedValue],
        profile: Literal["local", "production"],
    ) -> None:
        self._replica = replica
        self._profile = profile
        self._load = EngineLoad()
        self._engine: Any = None
        self._door: Door | None = None
        self._vitals: Vitals | None = None
        self._processes: tuple[evidence.Member, ...] = ()
        self._scaling: ScalingPlan | None = None
        self._ledger = StartLedger(replica.revision)
        guards.check_environment(environment, profile)
        guards.check_gang(replica.placement)
        guards.check_stages(replica.placement)
        await asyncio.to_thread(guards.check_limits, _coming_limits(), profile)
        try:
            async with asyncio.timeout(replica.start_timeout_s) as budget:
                await self._start()
        except Exception as error:
            # Entry of the replica's process: whatever failed, its children must not keep the GPUs.
            # A start that still runs in its thread ends with this process, and its children with it.
            _kill_children()
            if not budget.expired():
                raise
            raise StartError(
                f"a ready engine within the start budget of {replica.start_timeout_s:.0f} s",
                found=f"not ready after phases {self._ledger.phases}",
                do="read the replica's log, or raise timeouts.start_s and plan again",
            ) from error

    async def _start(self) -> None:
        ledger, replica = self._ledger, self._replica
        with tempfile.TemporaryDirectory(prefix="rayserve-start-") as name:
            folder = Path(name)
            vllm, args, config = await self._start_engine(folder)
            ledger.read_engine_phases(folder / "phases.jsonl")
        with ledger.phase("app"):
            app = await vllm.build_openai_app(self._engine, args)
        with ledger.phase("warm-up"):
            await vllm.warm_up(self._engine, replica.warmup_prompt_tokens)
            await vllm.warm_up_chat(app, replica.served_model_name)
            # As vLLM's own server does once it is up: collections pass over what stays for good.
            gc.collect()
            gc.freeze()
        every_tool = constrains_every_tool(vars(args))
        self._door = Door(
            app,
            None,
            is_draining=drain_probe(),
            is_dead=lambda: self._vitals is not None and self._vitals.notice_death(),
            every_tool=every_tool,
            suspects=await _suspects(replica, self._load),
        )
        self._door.open()
        self._processes = evidence.members(psutil.Process().children(recursive=True))
        self._vitals = Vitals(
            self._engine,
            self._load,
            self._door,
            ask=lambda name: vllm.ask(self._engine, PROBE_PROMPT, 1, name),
            evidence=self._write_evidence,
            gauges=Gauges(),
        )
        memory = await self._engine.collective_rpc("rayserve_memory")
        record = ledger.line(identity(replica), memory, vllm.engine_facts(config))
        await asyncio.to_thread(append, Path(replica.state_dir, LEDGER), record)
        logger.info("start %s: ready after %.2f s", replica.revision, record["total_s"])

    async def _start_engine(self, folder: Path) -> tuple[Any, Any, Any]:
        """Import vLLM, configure it and start its processes, which write their phases to `folder`.

        In threads, so that Serve's own calls to this replica are answered meanwhile. Returns our
        engine module, vLLM's arguments and its configuration.
        """
        ledger, replica = self._ledger, self._replica
        os.environ.pop("VLLM_API_KEY", None)  # the door asks for keys; vLLM sees none to compare
        os.environ[PHASE_FILE] = str(folder / "phases.jsonl")
        os.environ["VLLM_LOGGING_CONFIG_PATH"] = str(write_logging_config(folder))
        forked = replica.placement.executor == "mp" and replica.start_method == "forkserver"
        if forked:
            prefork.start_server(replica.device)
        with ledger.phase("import"):
            vllm = await asyncio.to_thread(_import_engine)
        with ledger.phase("config"):
            args = await asyncio.to_thread(vllm.engine_namespace, replica)
            vllm.keep_logging(args)
            config = await asyncio.to_thread(vllm.engine_config, args)
        with ledger.phase("engine"), prefork.engine_core_forked() if forked else nullcontext():
            self._engine = await asyncio.to_thread(vllm.start_engine, config, self._load)
        return vllm, args, config

    def __serve_build_asgi_app__(self) -> Door:
        assert self._door is not None  # set by __init__, before Serve asks for the app
        return self._door

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take new limits while requests run. Serve calls it before the first request too.

        Raises:
            RayserveError: the first limits cannot work. Later ones that cannot are logged and the old
                ones stay, because Serve stops a replica that raises here.
        """
        try:
            live = guards.read_limits(user_config)
            await asyncio.to_thread(
                guards.check_keys,
                live.door.api_key_file,
                self._profile,
                os.environ,
                guards.serve_host,
            )
            assert self._door is not None
            assert self._vitals is not None
            self._door.update(live.door, live.digest())
            self._vitals.update(live.stall_s)
        except RayserveError as error:
            if self._scaling is None:
                raise
            logger.error("the new limits were refused, the old ones stay: %s", error)  # noqa: TRY400
            return
        self._scaling = live.scaling

    async def check_health(self) -> None:
        """Fail when the engine is dead or hangs: then Serve replaces the replica.

        Raises:
            vllm.v1.engine.exceptions.EngineDeadError: the engine's processes are gone.
            EngineHungError: it makes no step and answers no probe.
        """
        assert self._vitals is not None  # set by __init__, before Serve asks
        await self._vitals.check()

    def _write_evidence(self, verdict: dict[str, Any]) -> str:
        """Remember what ran, and write the bundle of a verdict; where it is, and which rank is silent."""
        if self._door is not None:
            try:
                self._door.suspects.died(verdict["running"])
            except OSError as error:
                logger.warning("what was running is not remembered: %s", error)
        folder = Path(self._replica.state_dir, evidence.FOLDER)
        known = {"revision": self._replica.revision, "phases": self._ledger.phases, **verdict}
        path, silent = evidence.bundle(
            folder, known, self._processes, logs=evidence.own_logs(), metrics=_metrics
        )
        named = "; ".join(str(rank) for rank in silent) or "no rank stands out"
        return f"{path}: {named}"

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
        vitals = getattr(self, "_vitals", None)
        if vitals is not None:
            vitals.stop()
        if getattr(self, "_engine", None) is not None:
            self._engine.shutdown()
            self._engine = None


async def _suspects(replica: ReplicaPlan, load: EngineLoad) -> Suspects:
    """What earlier engines of this revision died of. A disk that fails does not keep a model from serving."""
    record = deaths.Deaths(Path(replica.state_dir, deaths.FOLDER), replica.revision)
    suspects = Suspects(record, steps=lambda: load.steps)
    try:
        await suspects.exchange()
    except OSError as error:
        logger.warning("requests that kill the engine are not told from others yet: %s", error)
    return suspects


def _coming_limits() -> Any:
    """What Serve hands to `reconfigure` once the replica is up: seen here, before minutes of weights."""
    return serve.get_replica_context()._deployment_config.user_config  # noqa: SLF001


def _metrics() -> str:
    from prometheus_client import generate_latest

    return str(generate_latest(), "utf-8")


def _import_engine() -> Any:
    """Our engine module, and with it vLLM.

    vLLM's messages of this process are set up by hand (`keep_logging` says why).
    """
    from rayserve.serving import engine

    show_vllm_messages()
    return engine


def _kill_children() -> None:
    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
