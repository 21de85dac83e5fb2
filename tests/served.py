"""How do engine tests and benchmarks get the whole product running on this machine?

plan = make_plan(folder)             the demo's model, a key and a plan, made the product's way
with Served(plan, folder) as served: a Ray of its own, HAProxy, the generated Serve config
    served.url, served.key
    served.change_door(admit=False)  a live change, as `rayserve apply` would make it
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import socket
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

from rayserve.demo.model import make_model
from rayserve.haproxy import haproxy_files
from rayserve.ingress import node_environment
from rayserve.inventory import locate
from rayserve.plan import Plan
from rayserve.planning import make_plan as plan_files
from rayserve.serve_config import DEPLOYMENT, serve_config
from tests.ports import free_port
from tests.ray_cluster import ClusterError, RayCluster, wait_until

START_LIMIT_S = 240.0
PROBE_PROMPT = "a prompt that is long enough to be a real prefill " * 6
HAPROXY_PORTS = (
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
)


def make_plan(folder: Path, **sections: Mapping[str, Any] | list[Any]) -> Plan:
    """Model, key file, cluster.yml and plan in `folder`; `sections` are merged into the spec.

    A mapping is merged into the section of that name, a list takes its place.
    """
    # Requests go to loopback, whatever proxy this machine uses for other hosts.
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"
    make_model(folder / "model")
    keys = folder / "keys"
    keys.touch(mode=0o600)
    keys.write_text(secrets.token_urlsafe(24) + "\n")
    spec: dict[str, Any] = {
        "name": "bench",
        "profile": "local",
        "state_dir": str(folder / "state"),
        "node_pools": [{"name": "local", "hosts": 1, "gpu": "cpu", "gpus_per_host": 1}],
        "model": {
            "path": str(folder / "model"),
            "served_name": "demo",
            "config": str(folder / "model" / "config.json"),
        },
        "limits": {"max_model_len": 2048, "max_num_seqs": 64, "kv_cache_gib": 1},
        "endpoint": {"port": endpoint_port(), "ingress": "haproxy", "api_key_file": str(keys)},
        "timeouts": {"start_s": START_LIMIT_S, "drain_s": 30},
    }
    for name, section in sections.items():
        spec[name] = {**spec.get(name, {}), **section} if isinstance(section, Mapping) else section
    path = folder / "cluster.yml"
    path.write_text(yaml.safe_dump({"rayserve_cluster": spec}, sort_keys=False))
    return plan_files(locate(str(path), None)).plan


def endpoint_port() -> int:
    """A free port that a spec may name: outside of the ranges that Ray takes for itself."""
    for number in range(10_000):
        port = 20_000 + (os.getpid() + number) % 10_000
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise ClusterError("no free port in 20000-29999")


def start_ray(
    plan: Plan,
    folder: Path,
    *,
    haproxy: bool = True,
    gangs: int = 1,
    temp_root: Path = Path("/tmp"),
    **env: str,
) -> RayCluster:
    """A Ray with what `rayserve env` prints for the plan, or without HAProxy; room for `gangs`."""
    # Whoever has a ~/.ray/auth_token would otherwise get a Ray that these tests cannot ask.
    env.setdefault("RAY_AUTH_MODE", "disabled")
    if haproxy:
        env |= node_environment(plan)
        # Several Rays may share this machine; HAProxy's own ports and files are fixed by default.
        env |= {name: str(free_port()) for name in HAPROXY_PORTS}
        env |= haproxy_files(str(folder / "h"))
    # Ray starts a worker for each CPU when its first driver comes, and two cores feel that; the
    # replicas of ray.serve.llm ask for three.
    num_cpus = 2 if haproxy else 4
    gpus = gangs * plan.replica.placement.gpus
    cluster = RayCluster(num_gpus=gpus, num_cpus=num_cpus, env=env, temp_root=temp_root)
    return cluster.__enter__()


def first_token(base_url: str, headers: Mapping[str, str], model: str) -> bool:
    """Whether a server streams a token now."""
    url = urlsplit(base_url)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=30)
    body = {"model": model, "prompt": PROBE_PROMPT, "max_tokens": 1, "temperature": 0}
    try:
        connection.request(
            "POST",
            f"{url.path}/v1/completions",
            json.dumps(body | {"ignore_eos": True, "stream": True}),
            {"Content-Type": "application/json", **headers},
        )
        reply = connection.getresponse()
        return reply.status == 200 and reply.readline().startswith(b"data: {")
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def embedding(url: str, headers: Mapping[str, str], model: str) -> bool:
    """Whether a server embeds a text now."""
    body = json.dumps({"model": model, "input": "a text"}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return bool(json.load(reply)["data"])
    except OSError:
        return False


class Served:
    """The product, deployed as its generated Serve config says; a context manager."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        *,
        gangs: int = 1,
        probe: str = "",
        temp_root: Path = Path("/tmp"),
    ) -> None:
        """`probe` is asked for an embedding in place of a first token, for models that embed."""
        self.plan = plan
        self.probe = probe
        self.gangs = gangs
        self.temp_root = temp_root
        self.folder = folder
        self.config = serve_config(plan)
        self.application: dict[str, Any] = self.config["applications"][0]
        self.url = f"http://127.0.0.1:{plan.endpoint.port}{self.application['route_prefix']}"
        self.key = Path(plan.door.api_key_file).read_text().split()[0]
        self.headers = {"Authorization": f"Bearer {self.key}"}
        self.model = plan.replica.served_model_name
        self.cluster: RayCluster | None = None

    def __enter__(self) -> Self:
        self.cluster = start_ray(self.plan, self.folder, gangs=self.gangs, temp_root=self.temp_root)
        try:
            self._deploy()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.cluster is not None:
            self.cluster.stop()

    def _deploy(self) -> None:
        cluster = self.ray
        cluster.deploy(self.config)

        def ready() -> bool:
            found = cluster.serve_status()["applications"].get(self.application["name"], {})
            if found.get("status") == "DEPLOY_FAILED":
                raise ClusterError(f"{found['message']}\n{found['deployments']}")
            if self.probe:
                return embedding(f"{self.url}{self.probe}", self.headers, self.model)
            return first_token(self.url, self.headers, self.model)

        wait_until(ready, START_LIMIT_S, "a first token from the deployed application")

    @property
    def ray(self) -> RayCluster:
        """The Ray below.

        Raises:
            ClusterError: outside of the `with` block.
        """
        if self.cluster is None:
            raise ClusterError("the product is not running")
        return self.cluster

    def change_door(self, **limits: object) -> None:
        """Deploy the plan's door with some limits changed, and wait until the replica has them."""
        self._change(door=self.plan.door.model_copy(update=limits))

    def change_stall(self, stall_s: float) -> None:
        """Deploy the plan with another `stall_s`, and wait until the replica has it."""
        self._change(timeouts=self.plan.timeouts.model_copy(update={"stall_s": stall_s}))

    def _change(self, **parts: object) -> None:
        self.config = serve_config(self.plan.model_copy(update=parts))
        (override,) = self.config["applications"][0]["deployments"]
        self.ray.deploy(self.config)

        def settled() -> bool:
            app = self.ray.serve_status()["applications"][self.application["name"]]
            deployment = app["deployments"][DEPLOYMENT]
            return bool(
                app["status"] == "RUNNING"
                and deployment["status"] == "HEALTHY"
                and deployment["deployment_config"]["user_config"] == override["user_config"]
            )

        wait_until(settled, 60, "the new limits")


def own_port(pid: int) -> int:
    """The HTTP port of a replica's process, to which HAProxy sends."""
    from ray.serve._private import constants

    first = constants.RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT
    last = constants.RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT
    listening = psutil.Process(pid).net_connections(kind="tcp")
    (port,) = {c.laddr.port for c in listening if c.status == "LISTEN"} & set(range(first, last))
    return int(port)


def metrics(served: Served, port: int | None = None, **labels: str) -> dict[str, float]:
    """The engine's gauges and counters by name, summed over the samples that carry `labels`.

    Args:
        served: the running product.
        port: of one replica, which then is asked past the ingress.
        labels: what a sample must carry to count.

    Raises:
        RuntimeError: /metrics was not answered with 200.
    """
    path = f"{served.application['route_prefix'].rstrip('/')}/metrics"
    http_port = port or served.plan.endpoint.port
    connection = http.client.HTTPConnection("127.0.0.1", http_port, timeout=60)
    try:
        connection.request("GET", path, headers=served.headers)
        reply = connection.getresponse()
        text = reply.read().decode()
    finally:
        connection.close()
    if reply.status != 200:
        raise RuntimeError(f"/metrics answered {reply.status}: {text[:200]}")
    figures: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if labels.items() <= sample.labels.items():
                figures[sample.name] = figures.get(sample.name, 0.0) + sample.value
    return figures
