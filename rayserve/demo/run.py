"""How does a demo go from nothing to an answer, and back to nothing?

    check → model → plan → ray → serve → answer → stop

Each step may fail or be interrupted; `close` then stops what was started so far.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import psutil

from rayserve.clients import answers
from rayserve.demo import chat, cluster, host, local_ray, logs
from rayserve.demo.cluster import Deployment
from rayserve.demo.interrupts import EXIT_CODE, Interrupted, Interrupts
from rayserve.demo.local_ray import LocalRay
from rayserve.demo.model import make_model
from rayserve.demo.progress import Progress
from rayserve.demo.workdir import Running, WorkDir
from rayserve.errors import HostError, StartError
from rayserve.ingress import node_environment

QUESTION = "What is the capital of France?"
ANSWER_TOKENS = 64
STATUS_POLL_S = 1.0
TICK_S = 0.2
BEYOND_ENGINE_S = 60.0
"""On top of the engine's own start budget: Serve's actors, the ingress, imports."""


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    directory: Path
    port: int
    ranks: int
    keep: bool


class Demo:
    """One run. `close` may be called at any time, and more than once."""

    def __init__(self, options: Options, progress: Progress, interrupts: Interrupts) -> None:
        self._options = options
        self._progress = progress
        self._interrupts = interrupts
        self._work = WorkDir(options.directory)
        self._lock: int | None = None
        self._temp_dir: Path | None = None
        self._ray: LocalRay | None = None

    def run(self) -> dict[str, Any]:
        """The whole demo.

        Returns:
            Figures of this run, for `--json`.

        Raises:
            HostError, StartError: with what to do about it.
        """
        began = time.monotonic()
        options, progress = self._options, self._progress
        with progress.step("check", "memory, shared memory, port"):
            host.check_host(options.ranks)
            with self._interrupts.hold():
                self._lock = self._work.lock()
            self._sweep_earlier()
            host.check_port(options.port, "HTTP (--port)")
        with progress.step("model", "Llama, 3.7 million random parameters"):
            make_model(self._work.model)
        with progress.step("plan"):
            deployment = cluster.prepare(self._work, port=options.port, ranks=options.ranks)
            progress.done(f"revision {deployment.plan.revision}")
        with progress.step("ray", "own session, ports and token"):
            ray = self._start_ray(deployment)
            ray.wait_until_up(progress.tick)
        with progress.step("serve"):
            phases = self._deploy(ray, deployment)
            progress.done(phases)
        answer = self._ask(deployment)
        result = report(deployment, answer, progress.timings, time.monotonic() - began)
        show_figures(result, progress.say)
        if options.keep:
            self._keep(deployment)
        return {**result, "kept": options.keep}

    def close(self) -> None:
        """Stop what was started, and nothing else."""
        if self._ray is not None:
            with self._progress.step("stop"):
                left = self._ray.stop()
                self._progress.done("no process left" if not left else f"still there: {left}")
            self._ray = None
            self._temp_dir = None
        if self._temp_dir is not None:
            host.remove_tree(self._temp_dir)
            self._temp_dir = None
        if self._lock is not None:
            with suppress(OSError):
                self._work.forget()
            os.close(self._lock)
            self._lock = None

    def _sweep_earlier(self) -> None:
        """Stop what an earlier demo here has left: only where somebody killed its keeper."""
        earlier = self._work.running()
        if earlier is not None:
            local_ray.sweep(earlier.demo_id, Path(earlier.temp_dir))
            self._work.forget()

    def _start_ray(self, deployment: Deployment) -> LocalRay:
        environment = node_environment(deployment.plan)
        with self._interrupts.hold():
            self._temp_dir = host.make_temp_dir()
            assert self._lock is not None
            try:
                self._ray = local_ray.start(
                    temp_dir=self._temp_dir,
                    log=self._work.logs / "ray.log",
                    gpus=self._options.ranks,
                    serve_environment=environment,
                    pass_fds=(self._lock,),
                )
                self._work.write_running(self._running(self._ray, deployment))
            except OSError as error:
                raise HostError(
                    f"to write the demo's files to {self._temp_dir} and {self._work.path}",
                    found=error.strerror or str(error),
                    do="free some space there",
                ) from error
        return self._ray

    def _running(self, ray: LocalRay, deployment: Deployment) -> Running:
        return Running(
            demo_id=ray.demo_id,
            keeper_pid=ray.process.pid,
            keeper_started=psutil.Process(ray.process.pid).create_time(),
            temp_dir=str(ray.temp_dir),
            url=deployment.base_url,
        )

    def _deploy(self, ray: LocalRay, deployment: Deployment) -> str:
        """Deploy, wait until requests are answered; return the phases of the start."""
        try:
            ray.api.deploy(deployment.config)
        except OSError as error:
            raise self._failed(ray, "Ray Serve takes the generated config", str(error)) from error
        budget_s = deployment.plan.replica.start_timeout_s + BEYOND_ENGINE_S
        deadline = time.monotonic() + budget_s
        next_look = 0.0
        while True:
            ray.check_running()
            if time.monotonic() > deadline:
                raise self._failed(
                    ray, f"a ready replica within {budget_s:.0f} s", "none when the time was over"
                )
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + STATUS_POLL_S
                if self._is_running(ray, deployment) and answers(f"{deployment.root_url}/health"):
                    return logs.read_phase(ray.session)
            phase = logs.read_phase(ray.session) or "Serve's controller, proxy and replica"
            inner = logs.read_engine_phases(ray.engine_temp)
            self._progress.tick(f"{phase} ({inner})" if inner else phase)
            time.sleep(TICK_S)

    def _is_running(self, ray: LocalRay, deployment: Deployment) -> bool:
        try:
            status = ray.api.status(deployment.app)
        except OSError:
            return False  # the dashboard is busy; whether Ray lives is asked elsewhere
        # Serve would try three times, which takes minutes and ends the same way.
        if status.state == "DEPLOY_FAILED" or "failed to start" in status.message:
            raise self._failed(ray, "a replica that starts", status.message or status.state)
        return status.state == "RUNNING" and status.proxies_healthy

    def _failed(self, ray: LocalRay, needed: str, found: str) -> StartError:
        lines = logs.read_explanation(ray.session)
        kept = self._work.logs / "session"
        with suppress(OSError):
            logs.save(ray.session, kept)
        shown = "\n".join(f"    {line[:300]}" for line in lines)
        message = logs.first_and_last(found)
        return StartError(
            needed,
            found=f"{message}\n  the log says:\n{shown}" if lines else message,
            do=f"read all of them in {kept}",
        )

    def _ask(self, deployment: Deployment) -> chat.Answer:
        say = self._progress.say
        say(f"\n  user       {QUESTION}")
        say("  assistant  ", end="")
        answer = chat.stream_answer(
            deployment.base_url,
            deployment.api_key,
            deployment.plan.replica.served_model_name,
            QUESTION,
            max_tokens=ANSWER_TOKENS,
            show=lambda piece: say(piece.replace("\n", " "), end=""),
        )
        say("\n             (random weights: words in no order are the right answer)\n")
        self._progress.timings["answer"] = answer.ttft_s + answer.decode_s
        return answer

    def _keep(self, deployment: Deployment) -> None:
        with self._interrupts.hold():
            assert self._ray is not None
            assert self._lock is not None
            self._ray.keep()
            self._ray = self._temp_dir = None
            os.close(self._lock)  # the keeper has it too
            self._lock = None
        for line in how_to_use(deployment, self._work):
            self._progress.say(line)


def report(
    deployment: Deployment, answer: chat.Answer, timings: dict[str, float], total_s: float
) -> dict[str, Any]:
    """The figures of a run."""
    return {
        "revision": deployment.plan.revision,
        "base_url": deployment.base_url,
        "metrics_url": f"{deployment.root_url}/metrics",
        "api_key_file": deployment.plan.door.api_key_file,
        "answer": answer.text,
        "prompt_tokens": answer.prompt_tokens,
        "answer_tokens": answer.answer_tokens,
        "events": answer.events,
        "ttft_ms": round(answer.ttft_s * 1000, 1),
        "tokens_per_s": round(answer.tokens_per_s, 1),
        "timings_s": {name: round(seconds, 2) for name, seconds in timings.items()},
        "total_s": round(total_s, 2),
    }


def how_to_use(deployment: Deployment, work: WorkDir) -> list[str]:
    """What a person may do with a demo that was kept."""
    return [
        "\nIt keeps running. Use it:",
        f"    export OPENAI_BASE_URL={deployment.base_url}",
        f"    export OPENAI_API_KEY=$(cat {work.keys})",
        '    curl -H "Authorization: Bearer $OPENAI_API_KEY" $OPENAI_BASE_URL/models',
        f"Stop it:\n    {work.stop_command()}",
    ]


def run(options: Options, stream: TextIO, interrupts: Interrupts) -> tuple[int, dict[str, Any]]:
    """Run a demo from beginning to end.

    Args:
        options: what the command line asks for.
        stream: where a person looks.
        interrupts: already entered, since importing this module takes a moment too.

    Returns:
        The exit code, and the figures of the run (empty after an interruption).

    Raises:
        HostError, StartError: after everything that was started has been stopped.
    """
    progress = Progress(stream)
    demo = Demo(options, progress, interrupts)
    try:
        # Twice: an interruption may come while the inner one runs, and there is only one.
        try:
            return 0, demo.run()
        finally:
            demo.close()
    except Interrupted:
        progress.say("\n  interrupted")
        return EXIT_CODE, {}
    finally:
        interrupts.ignore()
        demo.close()


def show_figures(result: dict[str, Any], say: Callable[[str], None]) -> None:
    """The figures of a run, for a person."""
    say(
        f"  first token {result['ttft_ms']:.0f} ms · {result['tokens_per_s']:.0f} tokens/s · "
        f"{result['answer_tokens']} tokens in {result['events']} events · "
        f"from nothing to the answer {result['total_s']:.1f} s"
    )
    say(
        f"  metrics     {result['metrics_url']} (while it serves, with the key in {result['api_key_file']})"
    )


def stop(directory: Path, stream: TextIO) -> int:
    """Stop a demo that was kept.

    Raises:
        HostError: none is running in this folder, or it does not end.
    """
    work = WorkDir(directory)
    running = work.running()
    if running is None:
        raise HostError(
            f"a demo that runs in {work.path}", found="none", do="name its folder with --dir"
        )
    progress = Progress(stream)
    with progress.step("stop"):
        keeper = running.keeper()
        if keeper is not None:
            keeper.terminate()
            with suppress(psutil.TimeoutExpired):
                keeper.wait(local_ray.STOP_TIMEOUT_S)
        left = local_ray.sweep(running.demo_id, Path(running.temp_dir))
        if left:
            raise HostError(
                "every process of the demo to end", found=f"still there: {left}", do="kill them"
            )
        work.forget()
        progress.done("no process left")
    return 0
