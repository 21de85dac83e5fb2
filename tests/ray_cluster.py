"""How do tests get a real Ray cluster of their own, and how is exactly that cluster stopped?

    with RayCluster(num_gpus=16) as cluster:
        cluster.deploy({"applications": [...]})      # PUT of a Serve config
        cluster.serve_status()                       # GET of the same
        cluster.placement_groups()                   # what holds, or waits for, which resources
        subprocess.run([...], env=cluster.environ)   # a child that finds this cluster

The head is a child (`ray start --head --block`) in a process group of its own, on free ports and
with a temporary folder of its own, so that any number of clusters, and a production Ray, may run
beside it. `ray stop` is host-wide and is never used. Workers rewrite their command line, and an
engine starts further children, so no single sign finds them all. A process belongs to the cluster
when its environment carries the cluster's mark, or its command line names the cluster's temporary
folder, or its parent belongs. Leaving the `with` block stops those, waits until none is left, and
fails loudly when one is.

Addresses: the dashboard listens on 127.0.0.1. Ray itself replaces 127.0.0.1 by the host's own
address and binds its other sockets to all of them; there is no setting against that, so a cluster
carries no secret, and tests send their own traffic over loopback.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import psutil

from tests.ports import free_port

MARK = "RAYSERVE_TEST_CLUSTER"
"""Environment variable that every process of a cluster carries; its value names the cluster."""

_START_LIMIT_S = 120.0
"""Ray starts in about 10 s on two idle cores, and in several times that on busy ones."""
_TERM_GRACE_S = 5.0
_KILL_GRACE_S = 10.0
_OBJECT_STORE_BYTES = 100_000_000
_TAKEN = "address already in use"

Value = TypeVar("Value")


class ClusterError(AssertionError):
    """The cluster did not start, did not answer, or left a process behind."""


def wait_until(
    probe: Callable[[], Value | None], timeout_s: float, what: str, period_s: float = 0.2
) -> Value:
    """The first value of `probe` that is neither None nor False.

    Raises:
        ClusterError: there was none within `timeout_s`; the message names `what`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        value = probe()
        if value is not None and value is not False:
            return value
        if time.monotonic() > deadline:
            raise ClusterError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(period_s)


class RayCluster:
    """A Ray head, and further nodes, as children of this process; a context manager.

    Args:
        num_gpus: logical GPUs of the head; no hardware is needed.
        num_cpus: logical CPUs of the head. Serve's replicas without a GPU need one each.
        env: further environment of every Ray process, such as Serve's RAY_SERVE_* variables.
        pythonpath: folders that Ray's processes import from; default: this repository.
        resources: further logical resources of the head.
        keep_logs: keep the temporary folder after the end, for a person to read.
        temp_root: where the temporary folder is made; a short path.
    """

    def __init__(
        self,
        *,
        num_gpus: int = 0,
        num_cpus: int = 4,
        env: Mapping[str, str] | None = None,
        pythonpath: list[str] | None = None,
        resources: Mapping[str, float] | None = None,
        keep_logs: bool = False,
        temp_root: Path = Path("/tmp"),
    ) -> None:
        self.name = uuid.uuid4().hex[:12]
        # Short, because Ray makes Unix sockets under it and their paths end at 107 characters.
        self.temp_dir = Path(tempfile.mkdtemp(prefix="rsv-", dir=temp_root))
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._seen: dict[int, psutil.Process] = {}
        self._head_options = (num_gpus, num_cpus, dict(resources or {}))
        self._keep_logs = keep_logs
        folders = pythonpath or [str(Path(__file__).resolve().parents[1])]
        self._env = _clean_environment() | {
            MARK: self.name,
            "PYTHONPATH": os.pathsep.join(folders),
            "RAY_USAGE_STATS_ENABLED": "0",
            # A token in somebody's home would switch authentication on for this cluster too.
            "RAY_AUTH_MODE": "disabled",
            **(env or {}),
        }
        self.gcs_port = 0
        self.dashboard_port = 0

    @property
    def address(self) -> str:
        """`host:port` for `ray.init(address=…)` and RAY_ADDRESS."""
        return f"127.0.0.1:{self.gcs_port}"

    @property
    def dashboard(self) -> str:
        """Base URL of the dashboard, which also serves Serve's REST API."""
        return f"http://127.0.0.1:{self.dashboard_port}"

    @property
    def environ(self) -> dict[str, str]:
        """Environment for a child that is to find this cluster, and to be stopped with it."""
        return self._env | {
            "RAY_ADDRESS": self.address,
            "RAY_API_SERVER_ADDRESS": self.dashboard,
            "RAY_DASHBOARD_ADDRESS": self.dashboard,
        }

    def __enter__(self) -> Self:
        try:
            self._start_head()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            print(self.log_tail(), file=sys.stderr)
        self.stop()

    def _start_head(self) -> None:
        # A port that was free may be taken before Ray binds it; then the whole choice is made anew.
        for attempt in range(3):
            self.gcs_port, self.dashboard_port = free_port(), free_port()
            num_gpus, num_cpus, resources = self._head_options
            node = self._spawn(
                f"head{attempt}",
                "--head",
                f"--port={self.gcs_port}",
                "--include-dashboard=true",
                "--dashboard-host=127.0.0.1",
                f"--dashboard-port={self.dashboard_port}",
                f"--ray-client-server-port={free_port()}",
                f"--temp-dir={self.temp_dir}",
                *_node_options(num_gpus, num_cpus, resources),
            )
            try:
                self._wait_ready(node, expected_nodes=1)
            except ClusterError:
                if attempt == 2 or _TAKEN not in self.log_tail().lower():
                    raise
                self._stop_processes()
            else:
                return

    def add_node(
        self, *, num_gpus: int = 0, num_cpus: int = 4, resources: Mapping[str, float] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start one more Ray node on this machine; returns its `ray start --block` process."""
        number = len(self._nodes)
        node = self._spawn(
            f"node{number}",
            f"--address={self.address}",
            *_node_options(num_gpus, num_cpus, dict(resources or {})),
        )
        self._wait_ready(node, expected_nodes=number + 1)
        return node

    def _spawn(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        executable = Path(sys.executable).with_name("ray")
        with (self.temp_dir / f"{name}.log").open("wb") as log:
            node = subprocess.Popen(
                [str(executable), "start", "--block", "--node-ip-address=127.0.0.1", *options],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # not a session: see benchmarks/stacks.py
            )
        self._nodes.append(node)
        return node

    def _wait_ready(self, node: subprocess.Popen[bytes], expected_nodes: int) -> None:
        last: list[str] = ["no answer yet"]

        def ready() -> bool:
            if node.poll() is not None:
                raise ClusterError(f"`ray start` ended with {node.returncode}\n{self.log_tail()}")
            try:
                nodes = self.get("/api/v0/nodes?detail=1")["data"]["result"]["result"]
            except (OSError, KeyError, TypeError, ValueError) as error:
                last.append(repr(error))
                return False
            return sum(entry["state"] == "ALIVE" for entry in nodes) >= expected_nodes

        try:
            wait_until(ready, _START_LIMIT_S, f"Ray with {expected_nodes} node(s)")
        except ClusterError as error:
            raise ClusterError(f"{error}; last: {last[-1]}\n{self.log_tail()}") from None

    # -- Ray's and Serve's REST API

    def get(self, path: str) -> Any:
        """GET of a path on the dashboard, parsed as JSON."""
        with urllib.request.urlopen(self.dashboard + path, timeout=10) as reply:
            return json.load(reply)

    def deploy(self, config: Mapping[str, Any]) -> None:
        """PUT a Serve config; what it does not list is deleted.

        The first PUT starts Serve, whose proxies a very busy machine may not bring up in time: that
        is tried again.

        Raises:
            ClusterError: Serve refused it; the message is Serve's.
        """
        request = urllib.request.Request(
            f"{self.dashboard}/api/serve/applications/",
            data=json.dumps(config).encode(),
            headers={"Content-Type": "application/json"},
            method="PUT",
        )
        for attempts_left in (2, 1, 0):
            refusal = _send(request)
            if not refusal:
                return
            if "ActorDiedError" not in refusal or not attempts_left:
                raise ClusterError(f"Serve refused the config: {refusal}")
            time.sleep(2)

    def serve_status(self) -> dict[str, Any]:
        """Serve's own account of its applications, deployments and replicas."""
        return dict(self.get("/api/serve/applications/"))

    def replicas(self, application: str, deployment: str) -> list[dict[str, Any]]:
        """Replicas of a deployment as Serve reports them; empty before it exists."""
        found = self.serve_status()["applications"].get(application)
        if found is None or deployment not in found["deployments"]:
            return []
        return list(found["deployments"][deployment]["replicas"])

    def placement_groups(self) -> list[dict[str, Any]]:
        """Placement groups that are not removed, with `name`, `state` and `stats`."""
        reply = self.get("/api/v0/placement_groups?detail=1&limit=1000")
        groups = reply["data"]["result"]["result"]
        return [group for group in groups if group["state"] != "REMOVED"]

    # -- Processes

    def members(self) -> list[psutil.Process]:
        """Living processes of this cluster, whoever their parent is by now."""
        found = {process.pid: process for process in self._seen.values() if _alive(process)}
        table = list(psutil.process_iter())
        for process in table:
            if process.pid != os.getpid() and self._owns(process):
                found[process.pid] = process
        grown = True
        while grown:
            grown = False
            for process in table:
                with contextlib.suppress(psutil.Error):
                    if process.pid not in found and process.ppid() in found:
                        found[process.pid] = process
                        grown = True
        self._seen = {pid: process for pid, process in found.items() if _alive(process)}
        return list(self._seen.values())

    def _owns(self, process: psutil.Process) -> bool:
        try:
            if process.environ().get(MARK) == self.name:
                return True
            return any(str(self.temp_dir) in word for word in process.cmdline())
        except (psutil.Error, OSError):
            return False

    def stop(self) -> None:
        """Stop every process of this cluster and remove its folder; safe to call twice.

        Raises:
            ClusterError: a process is still alive after SIGKILL.
        """
        try:
            self._stop_processes()
        except KeyboardInterrupt:  # nothing is left running for one in this very moment
            self._stop_processes()
            raise
        finally:
            if not self._keep_logs:
                shutil.rmtree(self.temp_dir, ignore_errors=True)

    def _stop_processes(self) -> None:
        # Found before anything dies: a parent that ends takes the trace to its children with it.
        self.members()
        for node in reversed(self._nodes):
            if node.poll() is None:
                node.send_signal(signal.SIGTERM)  # `ray start --block` then ends its daemons
        deadline = time.monotonic() + _TERM_GRACE_S
        while self.members() and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.2)
        deadline = time.monotonic() + _KILL_GRACE_S
        while (left := self.members()) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            self._reap()
            time.sleep(0.1)
        self._reap()
        self._nodes.clear()
        if left:
            names = [f"{process.pid} {process.name()}" for process in left]
            raise ClusterError(f"processes of the test cluster are still alive: {names}")

    def _reap(self) -> None:
        for node in self._nodes:
            node.poll()

    def log_tail(self, lines: int = 40) -> str:
        """Ends of the logs that explain most failures: `ray start` and Serve's controller."""
        patterns = ["*.log", "session_latest/logs/serve/controller_*.log"]
        out = []
        for pattern in patterns:
            for path in sorted(self.temp_dir.glob(pattern)):
                tail = path.read_text(errors="replace").splitlines()[-lines:]
                out.append("\n".join([f"--- {path.name}", *tail]))
        return "\n".join(out)


def _send(request: urllib.request.Request) -> str:
    """Send it; the text of a refusal, or nothing."""
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            reply.read()
    except urllib.error.HTTPError as error:
        return error.read().decode() or str(error)
    return ""


def _alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _clean_environment() -> dict[str, str]:
    """This environment without what would tie a new cluster to another one."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in {"RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_DASHBOARD_ADDRESS", MARK}
        and not name.startswith("RAY_SERVE_")
    }


def _node_options(num_gpus: int, num_cpus: int, resources: Mapping[str, float]) -> list[str]:
    return [
        f"--num-gpus={num_gpus}",
        f"--num-cpus={num_cpus}",
        f"--resources={json.dumps(dict(resources))}",
        f"--object-store-memory={_OBJECT_STORE_BYTES}",
        # Chosen by the kernel: a fixed range would collide with another Ray on this machine.
        "--min-worker-port=0",
        "--max-worker-port=0",
        f"--dashboard-agent-listen-port={free_port()}",
        f"--dashboard-agent-grpc-port={free_port()}",
        f"--runtime-env-agent-port={free_port()}",
        f"--metrics-export-port={free_port()}",
    ]
