"""What does the running product hold: processes, files, memory, KV cache?"""

from __future__ import annotations

import http.client
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil
from prometheus_client.parser import text_string_to_metric_families

from rayserve.bench import Census
from tests.ray_cluster import wait_until
from tests.served import Served

REPLICA = "ray::ServeReplica"
SERVING = (REPLICA, "VLLM::", "ray::ServeController", "ray::ProxyActor", "ray::HAProxy", "haproxy")
"""Beginnings of the titles of the processes that carry or steer requests."""


@dataclass(frozen=True, slots=True)
class Count:
    """The stack at one moment."""

    serving: Census
    """The processes that carry or steer requests: replica, engine, HAProxy, Serve's controller."""
    everything: Census
    """These and Ray's own daemons, whose idle workers come and go."""
    by_process: dict[str, int]
    """Resident bytes by process title."""
    replica_pid: int


def gauges(served: Served) -> dict[str, float]:
    """The engine's gauges and counters by name, summed over labels."""
    url = urlsplit(served.url)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=30)
    try:
        connection.request("GET", f"{url.path}/metrics", headers=served.headers)
        reply = connection.getresponse()
        text = reply.read().decode()
    finally:
        connection.close()
    if reply.status != 200:
        raise RuntimeError(f"/metrics answered {reply.status}: {text[:200]}")
    out: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            out[sample.name] = out.get(sample.name, 0.0) + sample.value
    return out


def wait_idle(served: Served, timeout_s: float = 60) -> None:
    """Wait until the engine has no request.

    Raises:
        ClusterError: it still has one after `timeout_s`.
    """

    def idle() -> bool:
        values = gauges(served)
        return values["vllm:num_requests_running"] + values["vllm:num_requests_waiting"] == 0

    wait_until(idle, timeout_s, "an idle engine")


def take(served: Served) -> Count:
    """Count now."""
    members = [(process, _title(process)) for process in served.ray.members()]
    serving = [process for process, title in members if title.startswith(SERVING)]
    replicas = [process for process, title in members if title.startswith(REPLICA)]
    values = gauges(served)
    return Count(
        serving=_census(serving, values),
        everything=_census((process for process, _ in members), values),
        by_process={f"{title[:40]} {process.pid}": _rss(process) for process, title in members},
        replica_pid=replicas[0].pid if len(replicas) == 1 else -len(replicas),
    )


def _title(process: psutil.Process) -> str:
    try:
        words = process.cmdline()
        return words[0] if words and words[0].startswith(SERVING) else process.name()
    except psutil.Error:
        return ""


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def _open_files(process: psutil.Process) -> int:
    try:
        return int(process.num_fds())
    except psutil.Error:
        return 0


def _census(processes: Iterable[psutil.Process], values: dict[str, float]) -> Census:
    found = list(processes)
    return Census(
        processes=len(found),
        open_files=sum(map(_open_files, found)),
        rss_bytes=sum(map(_rss, found)),
        kv_usage=values["vllm:kv_cache_usage_perc"],
        running=int(values["vllm:num_requests_running"]),
        waiting=int(values["vllm:num_requests_waiting"]),
    )
