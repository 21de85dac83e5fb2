"""How does the demo start a Ray of its own on this machine, beside any other one?

Ports are free ones, the session lives in a short temporary folder, and a token closes Ray's ports
to everybody else, because Ray binds most of them to the host's own address and not to loopback.
Nothing is ever stopped with `ray stop`, which would end every Ray of this machine.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

import rayserve
from rayserve.clients import ServeApi
from rayserve.demo import host, keeper, logs, processes
from rayserve.errors import StartError
from rayserve.haproxy import haproxy_files

START_TIMEOUT_S = 180.0
"""For Ray's own processes and the dashboard: 7 s on a quiet machine, over 90 on a very busy one."""
STOP_TIMEOUT_S = 40.0
POLL_S = 0.2

RAY_PORTS = {
    "gcs": "--port",
    "dashboard": "--dashboard-port",
    "dashboard agent": "--dashboard-agent-listen-port",
    "dashboard agent grpc": "--dashboard-agent-grpc-port",
    "runtime env agent": "--runtime-env-agent-port",
    "metrics export": "--metrics-export-port",
    "ray client": "--ray-client-server-port",
    "node manager": "--node-manager-port",
    "object manager": "--object-manager-port",
}
SERVE_PORTS = {
    "haproxy stats": "RAY_SERVE_HAPROXY_STATS_PORT",
    "haproxy metrics": "RAY_SERVE_HAPROXY_METRICS_PORT",
    "fallback proxy": "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "fallback grpc": "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
}


class LocalRay:
    """One Ray head with its keeper. Made by `start`; `stop` may be called more than once."""

    def __init__(
        self,
        demo_id: str,
        temp_dir: Path,
        log: Path,
        api: ServeApi,
        process: subprocess.Popen[bytes],
        lifeline: int,
    ) -> None:
        self.demo_id = demo_id
        self.temp_dir = temp_dir
        self.log = log
        self.api = api
        self.process = process
        self._lifeline: int | None = lifeline

    @property
    def session(self) -> Path:
        """Folder of the Ray session."""
        return self.temp_dir / "session_latest"

    @property
    def engine_temp(self) -> Path:
        """TMPDIR of everything below the keeper."""
        return self.temp_dir / "t"

    def check_running(self) -> None:
        """Raise if Ray has ended by itself.

        Raises:
            StartError: with the lines of its log that explain it.
        """
        if self.process.poll() is not None or (self.temp_dir / keeper.ENDED).exists():
            raise StartError(
                "a running Ray",
                found="it ended by itself\n"
                + "\n".join(f"    {x}" for x in logs.tail_of(self.log)),
                do=f"read {self.log}",
            )

    def wait_until_up(self, tick: Callable[[str], None]) -> None:
        """Wait for Ray and for the dashboard's Serve interface.

        Raises:
            StartError: it ended, or did not come up in time.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        time.sleep(POLL_S)
        while missing := self.api.missing():
            self.check_running()
            if time.monotonic() > deadline:
                raise StartError(
                    f"Ray's dashboard on {self.api.url} within {START_TIMEOUT_S:.0f} s",
                    found=missing,
                    do=f"read {self.log}; is the machine overloaded?",
                )
            tick("head, dashboard, agents")
            time.sleep(POLL_S)

    def keep(self) -> None:
        """Let Ray live on after this process."""
        if self._lifeline is not None:
            os.write(self._lifeline, keeper.KEEP)
            os.close(self._lifeline)
            self._lifeline = None

    def stop(self) -> list[int]:
        """Stop everything that descends from this Ray, and remove its temporary folder.

        Returns:
            Pids that did not end; empty unless something is stuck in the kernel.
        """
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        return sweep(self.demo_id, self.temp_dir)


def sweep(demo_id: str, temp_dir: Path) -> list[int]:
    """Stop what a killed keeper may have left, and remove its folder.

    Returns:
        Pids that did not end.
    """

    def find() -> list[psutil.Process]:
        return processes.marked(demo_id, str(temp_dir))

    left = processes.stop(find, grace_s=keeper.GRACE_S)
    if temp_dir.name.startswith(host.TEMP_PREFIX):  # it may come from a file
        host.remove_tree(temp_dir)
    return [process.pid for process in left]


def start(
    *,
    temp_dir: Path,
    log: Path,
    gpus: int,
    serve_environment: Mapping[str, str],
    pass_fds: tuple[int, ...] = (),
) -> LocalRay:
    """Start a Ray head with `gpus` logical GPUs.

    Args:
        temp_dir: a private folder with a short path, removed in the end.
        log: output of the keeper and of `ray start`.
        gpus: how many GPUs Ray is told that there are.
        serve_environment: what the plan asks of every node.
        pass_fds: open files that live as long as Ray does.
    """
    demo_id = temp_dir.name.removeprefix(host.TEMP_PREFIX) + secrets.token_hex(4)
    ports = host.free_ports([*RAY_PORTS, *SERVE_PORTS])
    token = secrets.token_hex(32)
    host.write_private(temp_dir / "token", token)
    (temp_dir / "t").mkdir()
    env = environment(os.environ, temp_dir, ports)
    env.update(serve_environment)
    env[processes.MARK] = demo_id
    process, lifeline = keeper.start(
        ray_command(temp_dir, ports, gpus),
        demo_id=demo_id,
        temp_dir=temp_dir,
        log=log,
        env=env,
        pass_fds=pass_fds,
    )
    return LocalRay(demo_id, temp_dir, log, ServeApi(ports["dashboard"], token), process, lifeline)


def ray_command(temp_dir: Path, ports: Mapping[str, int], gpus: int) -> list[str]:
    """The command line of the head."""
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block",
        "--temp-dir", str(temp_dir),
        "--node-ip-address", "127.0.0.1",
        "--dashboard-host", "127.0.0.1",
        "--include-dashboard", "true",
        "--include-log-monitor", "false",
        "--num-cpus", "2",
        "--num-gpus", str(gpus),
        "--object-store-memory", str(host.OBJECT_STORE_BYTES),
        "--disable-usage-stats",
        "--log-style", "record",
        "--log-color", "false",
    ]  # fmt: skip
    for name, option in RAY_PORTS.items():
        command += [option, str(ports[name])]
    return command


def environment(
    base: Mapping[str, str], temp_dir: Path, ports: Mapping[str, int]
) -> dict[str, str]:
    """The environment of Ray: this process's own without Ray's variables, and the demo's."""
    env = {name: value for name, value in base.items() if not name.startswith(("RAY_", "VLLM_"))}
    env |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(temp_dir / "token"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "TMPDIR": str(temp_dir / "t"),
        # Proxies are for other machines; Ray talks to this one.
        "no_proxy": "127.0.0.1,localhost",
        "NO_PROXY": "127.0.0.1,localhost",
    }
    env |= haproxy_files(str(temp_dir / "h"))
    env |= {variable: str(ports[name]) for name, variable in SERVE_PORTS.items()}
    package_root = str(Path(rayserve.__file__).resolve().parents[1])
    if "site-packages" not in package_root:
        # Run from a checkout, which may not be installed: the replica must find it too.
        parts = [package_root, *filter(None, base.get("PYTHONPATH", "").split(os.pathsep))]
        env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(parts))
    return env
