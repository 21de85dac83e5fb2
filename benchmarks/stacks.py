"""How are the three compared servers started, frozen while another is measured, and stopped?

    vllm            vLLM's own server: python -m vllm.entrypoints.openai.api_server
    rayserve        the whole path: Ray Serve, its HAProxy, the door with a key, the engine
    ray_serve_llm   ray.serve.llm's default application, behind Serve's own proxy

All three run the same model with the engine arguments and the environment of one plan. The two that
need Ray get a cluster each, since Serve's ingress is chosen for a whole cluster.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil
import yaml

from rayserve.plan import Plan
from rayserve.serve_config import serve_config
from tests.ports import free_port
from tests.ray_cluster import RayCluster
from tests.served import first_token, start_ray

START_LIMIT_S = 240.0
STOP_LIMIT_S = 40.0
CHILDREN_LIMIT_S = 10.0
"""For what a server leaves behind, which then is killed."""
WAKE_LIMIT_S = 60.0
DEPLOY_FAILED = b"failed with exception:"
"""What `serve run` says in its log before it goes on to wait."""
PLAIN_SWITCHES = frozenset({"disable_log_stats"})
"""Arguments of which vLLM's parser has no `--no-` form: false is to leave them out."""
PROBE_PERIOD_S = 0.05


class StackError(RuntimeError):
    """A server did not start, or did not answer; the message ends with its log."""


@dataclass
class Stack:
    """One server. `start` may be called again after `stop`."""

    name: str
    plan: Plan
    folder: Path
    """For logs and generated files."""
    base_url: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    cluster: RayCluster | None = None
    process: subprocess.Popen[bytes] | None = None
    cache: Path | None = None
    """VLLM_CACHE_ROOT of the next start; a new one is a cold start."""

    @property
    def log(self) -> Path:
        """Output of the server's own command."""
        return self.folder / f"{self.name}.log"

    def members(self) -> list[psutil.Process]:
        """All processes of this stack: the server's command, and Ray's where there is a Ray."""
        found: dict[int, psutil.Process] = {}
        if self.cluster is not None:
            found |= {process.pid: process for process in self.cluster.members()}
        if self.process is not None and self.process.poll() is None:
            root = psutil.Process(self.process.pid)
            found |= {p.pid: p for p in (root, *root.children(recursive=True))}
        return list(found.values())

    def start(self) -> float:
        """Start the server; returns seconds from its command to the first token.

        Raises:
            StackError: no token within START_LIMIT_S, or the command ended.
        """
        command, environment = COMMANDS[self.name](self)
        began = time.monotonic()
        with self.log.open("ab") as log:
            self.process = _spawn(command, environment, log)
        while time.monotonic() - began < START_LIMIT_S:
            if self.process.poll() is not None:
                raise StackError(
                    f"{self.name} ended with {self.process.returncode}\n{self._tail()}"
                )
            if first_token(self.base_url, self.headers, self.plan.replica.served_model_name):
                return time.monotonic() - began
            if DEPLOY_FAILED in self.log.read_bytes()[-20_000:]:
                raise StackError(f"{self.name} was not deployed\n{self._tail()}")
            time.sleep(PROBE_PERIOD_S)
        raise StackError(f"{self.name}: no token within {START_LIMIT_S:.0f} s\n{self._tail()}")

    def wake(self) -> None:
        """Wait until a server that was frozen streams a token again; Ray and Serve catch up first.

        Raises:
            StackError: no token within WAKE_LIMIT_S.
        """
        if self.process is None:
            return
        began = time.monotonic()
        while not first_token(self.base_url, self.headers, self.plan.replica.served_model_name):
            if time.monotonic() - began > WAKE_LIMIT_S:
                raise StackError(f"{self.name}: frozen, and no token since\n{self._tail()}")
            time.sleep(PROBE_PERIOD_S)

    def stop(self) -> None:
        """Stop the server and wait for its processes; a Ray cluster stays up for the next start."""
        if self.process is None:
            return
        if self.process.poll() is None:
            # `serve run` ends its applications on Ctrl-C; so does vLLM's server.
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        # Asked for after the end: an interrupted start may have begun an engine while it ended.
        _, left = psutil.wait_procs(_group(self.process.pid), CHILDREN_LIMIT_S)
        for process in left:
            process.kill()
        psutil.wait_procs(left)
        self.process = None

    def close(self) -> None:
        """Stop the server and its Ray."""
        self.stop()
        if self.cluster is not None:
            self.cluster.stop()
            self.cluster = None

    def _tail(self) -> str:
        text = self.log.read_text(errors="replace")[-4000:]
        return text if self.cluster is None else text + self.cluster.log_tail()


@contextlib.contextmanager
def only(awake: Stack, stacks: list[Stack]) -> Iterator[None]:
    """Freeze every other stack, since an idle Ray takes about a fifth of a core.

    Raises:
        StackError: the one that is awake was frozen before, and does not come back.
    """
    frozen: list[psutil.Process] = []
    # Twice: one of them may have started another one while the first look was taken.
    for _ in range(2):
        frozen = [process for stack in stacks if stack is not awake for process in stack.members()]
        _signal_all(frozen, signal.SIGSTOP)
    try:
        awake.wake()
        yield
    finally:
        _signal_all(frozen, signal.SIGCONT)


def _signal_all(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def start_ray_for(stack: Stack, *, haproxy: bool) -> RayCluster:
    """A Ray of its own for a stack, patient enough to be frozen while another one is measured."""
    cache: dict[str, Any] = {} if stack.cache is None else {"VLLM_CACHE_ROOT": str(stack.cache)}
    return start_ray(
        stack.plan,
        stack.folder,
        haproxy=haproxy,
        # Ray's own default for workers is 15: then the load generator would go before the server,
        # and rayserve, whose plan sets 0, would win against ray.serve.llm by this alone.
        RAY_worker_niceness="0",
        RAY_health_check_failure_threshold="100",
        RAY_health_check_timeout_ms="60000",
        # Serve would start a proxy anew that was frozen for longer, and for a while nobody listens.
        RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S="600",
        **cache,
    )


def replica_environment(stack: Stack) -> dict[str, str]:
    """The plan's environment of the replica's processes, for a server that is not rayserve."""
    env = {item.name: str(item.value) for item in stack.plan.replica.env}
    if stack.cache is not None:
        env["VLLM_CACHE_ROOT"] = str(stack.cache)
    return env


def server_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Engine arguments as flags of vLLM's own server."""
    flags = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if value is False and name in PLAIN_SWITCHES:
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, dict):
            flags += [f"--{flag}", json.dumps(value)]
        elif isinstance(value, list):
            flags += [f"--{flag}", *map(str, value)]
        else:
            flags += [f"--{flag}", str(value)]
    return flags


Command = tuple[list[str], dict[str, str]]


def _vllm(stack: Stack) -> Command:
    replica, port = stack.plan.replica, free_port()
    stack.base_url = f"http://127.0.0.1:{port}"
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--host", "127.0.0.1", "--port", str(port),
        "--model", replica.model, "--served-model-name", replica.served_model_name,
        *server_flags(replica.engine_arguments() | replica.frontend_arguments()),
    ]  # fmt: skip
    return command, os.environ | replica_environment(stack)


def _rayserve(stack: Stack) -> Command:
    if stack.cluster is None:
        stack.cluster = start_ray_for(stack, haproxy=True)
    config = serve_config(stack.plan)
    prefix = config["applications"][0]["route_prefix"]
    stack.base_url = f"http://127.0.0.1:{stack.plan.endpoint.port}{prefix}"
    key = Path(stack.plan.door.api_key_file).read_text().split()[0]
    stack.headers = {"Authorization": f"Bearer {key}"}
    path = stack.folder / "serve.yml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return _serve_run(path), stack.cluster.environ


def _ray_serve_llm(stack: Stack) -> Command:
    replica, port = stack.plan.replica, free_port()
    if stack.cluster is None:
        stack.cluster = start_ray_for(stack, haproxy=False)
    stack.base_url = f"http://127.0.0.1:{port}"
    arguments = replica.engine_arguments() | replica.frontend_arguments()
    # It sets these two by itself, and refuses to be told.
    arguments.pop("distributed_executor_backend", None)
    config = {
        "model_loading_config": {
            "model_id": replica.served_model_name,
            "model_source": replica.model,
        },
        "accelerator_config": {"kind": "cpu"},
        "engine_kwargs": arguments,
        "runtime_env": {"env_vars": replica_environment(stack)},
    }
    path = stack.folder / "llm.yml"
    document = {
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": "llm",
                "route_prefix": "/",
                "import_path": "ray.serve.llm:build_openai_app",
                "args": {"llm_configs": [config]},
            }
        ],
    }
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return _serve_run(path), stack.cluster.environ


COMMANDS: dict[str, Callable[[Stack], Command]] = {
    "vllm": _vllm,
    "rayserve": _rayserve,
    "ray_serve_llm": _ray_serve_llm,
}


def _serve_run(config: Path) -> list[str]:
    return [str(Path(sys.executable).with_name("serve")), "run", str(config)]


def _spawn(
    command: list[str], environment: Mapping[str, str], log: IO[bytes]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        # Not a session: Linux gives each session the same share of a core (autogroup), and a client in
        # another session than a server whose processes poll waited up to 0.1 s for one (ADR 0030).
        process_group=0,
    )


def _group(leader: int) -> list[psutil.Process]:
    """Processes of the group that a server was started in; they outlive its leader."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == leader:
                found.append(process)
    return found
