"""The watch in a replica: it looks at the engine, asks it for a token, and says when to give it up.

`health.progress` decides; here is what it needs: a look every second, the probe, and what follows a
verdict. The door closes at once, the evidence is written, and only then does Serve's health check
fail, since Serve kills the replica for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Enum, Gauge

from rayserve.errors import EngineHungError
from rayserve.health.progress import Limits, Look, Progress, State, follow, judge, wants_probe
from rayserve.serving.door import UNHEALTHY, Door
from rayserve.serving.load import EngineLoad

logger = logging.getLogger("ray.serve")

EVIDENCE_S: Final = 20.0
"""Longest that the evidence may put off the health check's failure."""

Evidence = Callable[[dict[str, Any]], str]
"""Writes a bundle for a verdict, and says in a sentence what it found. Called in a thread."""


class Gauges:
    """What /metrics says of the watch."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.state = Enum(
            "rayserve_engine_state",
            "What the watch makes of the engine",
            states=[state.value for state in State],
            registry=registry,
        )
        self.quiet = Gauge(
            "rayserve_engine_quiet_seconds",
            "Time without an engine step while work is pending",
            registry=registry,
        )
        self.probes = Counter(
            "rayserve_engine_probes",
            "Probes of one token, by how they ended",
            ["outcome"],
            registry=registry,
        )


class Vitals:
    """Watches one engine from when it is warm until it is given up.

    `engine` is vLLM's; `ask` sends it the probe of the given name and returns when it was answered.
    """

    def __init__(
        self,
        engine: Any,
        load: EngineLoad,
        door: Door,
        *,
        ask: Callable[[str], Awaitable[None]],
        evidence: Evidence,
        gauges: Gauges,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._load = load
        self._door = door
        self._ask = ask
        self._evidence = evidence
        self._gauges = gauges
        self._clock = clock
        self._limits: Limits | None = None
        self._probe = 0
        self._sent = 0
        self._paused = False
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failure: Exception | None = None
        self._told = asyncio.Event()
        self._last_error = ""
        self._progress = Progress(self._look())

    def update(self, stall_s: float) -> None:
        """Take another limit, and begin to watch with the first one."""
        self._limits = Limits(stall_s)
        if "watch" not in self._tasks:
            self._start("watch", self._watch())

    async def check(self) -> None:
        """Raise once the engine was given up and the evidence is written; until then all is well.

        It does not wait for the evidence: Serve takes a check that is late for one that failed, and
        kills the replica at the third.

        Raises:
            EngineHungError: it hangs.
            vllm.v1.engine.exceptions.EngineDeadError: it is dead.
        """
        self.notice_death()
        if self._failure is None:
            await self._engine.check_health()
        elif self._told.is_set():
            # Without the frames of earlier checks, which would pile up.
            raise self._failure.with_traceback(None)

    def notice_death(self) -> bool:
        """Whether vLLM calls its engine dead; if so it is given up here, since that need not wait for a look."""
        dead = bool(self._engine.errored)
        if dead and self._failure is None and self._limits is not None:
            self._consider(self._limits)
        return dead

    def stop(self) -> None:
        """End the watch and its probe: what an engine that is shut down says of itself is no verdict."""
        self._limits = None
        for task in self._tasks.values():
            task.cancel()

    async def _watch(self) -> None:
        while self._failure is None and self._limits is not None:
            await asyncio.sleep(self._limits.look_s)
            self._consider(self._limits)

    def _consider(self, limits: Limits) -> None:
        """One look, and what it asks for; none once the engine was given up."""
        if self._failure is not None:
            return
        self._progress = follow(self._progress, self._look(), limits)
        state = judge(self._progress, limits)
        self._gauges.state.state(state.value)
        self._gauges.quiet.set(self._progress.quiet_s)
        if state in {State.DEAD, State.HUNG}:
            self._give_up(state)
            return
        if wants_probe(self._progress, limits):
            self._sent += 1
            self._probe = self._sent
            self._start("probe", self._send_probe(self._sent))
        if self._probe or self._paused:
            self._ask_whether_paused(limits)
        if "suspects" not in self._tasks:
            self._start("suspects", self._door.suspects.exchange())

    def _look(self) -> Look:
        return Look(
            at_s=self._clock(),
            steps=self._load.steps,
            pending=self._door.pending,
            probe=self._probe,
            sent=self._sent,
            paused=self._paused,
            dead=self._engine.errored,
        )

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run in a task that is kept: asyncio itself holds only weak references."""
        task = asyncio.ensure_future(work)
        self._tasks[name] = task
        task.add_done_callback(lambda done: self._ended(name, done))

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(name) is task:
            del self._tasks[name]
        if task.cancelled() or (error := task.exception()) is None:
            return
        if repr(error) != self._last_error:
            self._last_error = repr(error)
            logger.error("the watch's %s failed", name, exc_info=error)
        if name == "watch":
            # A look that failed must not leave the replica without a watch.
            self._start("watch", self._watch())

    async def _send_probe(self, number: int) -> None:
        """Ask for a token. One that fails says nothing of the engine: mostly it never got there."""
        outcome = "failed"
        try:
            await self._ask(f"rayserve-probe-{number}")
            outcome = "answered"
            self._door.suspects.engine_is_well()
        finally:
            self._gauges.probes.labels(outcome).inc()
            self._probe = 0

    def _ask_whether_paused(self, limits: Limits) -> None:
        if "paused" not in self._tasks:
            self._start("paused", self._read_paused(limits.probe_s))

    async def _read_paused(self, limit_s: float) -> None:
        """Ask the engine whether somebody paused it. One that does not answer is not."""
        paused = False
        try:
            async with asyncio.timeout(limit_s):
                paused = await self._engine.is_paused()
        except TimeoutError:
            pass
        finally:
            self._paused = paused

    def _give_up(self, state: State) -> None:
        pending, quiet_s = self._progress.look.pending, self._progress.quiet_s
        failure: Exception
        if state is State.DEAD:
            failure = self._engine.dead_error
            message = f"the engine is dead with {pending} sequences pending"
        else:
            message = (
                f"the engine hangs: no step for {quiet_s:.0f} s with {pending} sequences pending, "
                f"and its probe did not come back in {self._progress.probe_s:.0f} s"
            )
            failure = _hung(message, self._limits)
        self._door.close(*UNHEALTHY)
        logger.error("%s; no new request reaches it", message)
        verdict = {
            "state": state.value,
            "quiet_s": quiet_s,
            "pending": pending,
            "says": message,
            "running": list(self._door.suspects.at_death(hung=state is State.HUNG)),
        }
        self._start("evidence", self._write_evidence(verdict))
        self._failure = failure

    async def _write_evidence(self, verdict: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(EVIDENCE_S):
                found = await asyncio.to_thread(self._evidence, verdict)
            logger.error("evidence: %s", found)
        except OSError as error:  # a full disk, or TimeoutError
            logger.error("no evidence was written: %r", error)  # noqa: TRY400 - the reason is enough
        finally:
            self._told.set()


def _hung(found: str, limits: Limits | None) -> EngineHungError:
    stall_s = limits.stall_s if limits else 0.0
    return EngineHungError(
        f"an engine step within {stall_s:g} s (timeouts.stall_s) while work is pending",
        found=found,
        do="read the newest file below state_dir/evidence, or ask `rayserve doctor`",
    )
