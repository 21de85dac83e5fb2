"""What does the running product hold: processes, files, memory, KV cache?"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from benchmarks import open_files
from rayserve.bench import Census
from tests.ray_cluster import wait_until
from tests.served import Served, metrics

REPLICA = "ray::ServeReplica"
SERVING = (REPLICA, "VLLM::", "ray::ServeController", "ray::ProxyActor", "ray::HAProxy", "haproxy")
"""Beginnings of the titles of the processes that carry or steer requests."""

QUIET_S = 20.0
"""Files are at rest when their number has seen no new low for so long. After a load HAProxy keeps a
pool of idle connections to the replica (`http-reuse always`), of which it closes up to half in each
`pool-purge-delay`, 5 s; each holds a file at both ends."""
SETTLE_MAX_S = 180.0
"""Twice the 90 s after which the replica closes an idle connection; what moves then is counted."""

LARGE_BYTES = 100_000_000
"""Of a smaller process, HAProxy with its 14 MB, a few buffers more are several percent."""


@dataclass(frozen=True, slots=True)
class Count:
    """The stack at one moment."""

    serving: Census
    """The processes that carry or steer requests: replica, engine, HAProxy, Serve's controller."""
    everything: Census
    """These and Ray's own daemons, whose idle workers come and go."""
    rss_bytes: dict[str, int]
    """Resident bytes by title and id of the process."""
    files: open_files.Tally
    """Of the serving processes."""
    replica_pid: int


def wait_idle(served: Served, timeout_s: float = 60) -> None:
    """Wait until the engine has no request.

    Raises:
        ClusterError: it still has one after `timeout_s`.
    """

    def idle() -> bool:
        values = metrics(served)
        return values["vllm:num_requests_running"] + values["vllm:num_requests_waiting"] == 0

    wait_until(idle, timeout_s, "an idle engine")


def wait_settled(served: Served) -> float:
    """Wait until the open files of an idle stack are at rest; the seconds that this took.

    It is SETTLE_MAX_S where they never are: then they count as they stand.
    """
    processes = [process for process, _ in _serving(_members(served))]
    began = time.monotonic()
    samples: list[tuple[float, int]] = []
    while True:
        now_s = time.monotonic() - began
        samples.append((now_s, sum(map(_open_files, processes))))
        if at_rest(samples) or now_s >= SETTLE_MAX_S:
            return now_s
        time.sleep(1)


def at_rest(samples: Sequence[tuple[float, int]], quiet_s: float = QUIET_S) -> bool:
    """Whether the lowest of (seconds, number) samples has not been undercut for `quiet_s`."""
    lowest = min(number for _, number in samples)
    since_s = next(at_s for at_s, number in samples if number == lowest)
    return samples[-1][0] - since_s >= quiet_s


def take(served: Served) -> Count:
    """Count now."""
    members = _members(served)
    serving = _serving(members)
    replicas = [process.pid for process, title in serving if title.startswith(REPLICA)]
    values = metrics(served)
    return Count(
        serving=_census((process for process, _ in serving), values),
        everything=_census((process for process, _ in members), values),
        rss_bytes={f"{title} {process.pid}": _rss(process) for process, title in members},
        files=open_files.count(serving),
        replica_pid=replicas[0] if len(replicas) == 1 else -len(replicas),
    )


def largest_growth(before: Count, after: Count) -> float:
    """Resident memory that a large serving process has added, as a share of its own; of those that
    are in both counts the one that grew most. The sum over processes hides it where another shrank.

    Raises:
        ValueError: no large process is in both counts.
    """
    shares = [
        after.rss_bytes[process] / held - 1
        for process, held in before.rss_bytes.items()
        if process.startswith(SERVING) and held >= LARGE_BYTES and process in after.rss_bytes
    ]
    if not shares:
        raise ValueError("no process of the stack was counted both before and after")
    return max(shares)


def report(counts: Sequence[Count]) -> dict[str, Any]:
    """Plain data: the totals of each count, then what each process and each kind of file was in all."""
    processes = sorted({process for one in counts for process, _ in one.files})
    members = sorted({member for one in counts for member in one.rss_bytes})
    return {
        "counts": [
            {"serving": asdict(one.serving), "everything": asdict(one.everything)} for one in counts
        ],
        "open_files_by_process": {
            process: [
                sum(n for (who, _), n in one.files.items() if who == process) for one in counts
            ]
            for process in processes
        },
        "open_files_changed": open_files.changes([one.files for one in counts]),
        "rss_bytes_by_process": {
            member: [one.rss_bytes.get(member, 0) for one in counts] for member in members
        },
    }


def _members(served: Served) -> list[tuple[psutil.Process, str]]:
    return [(process, _title(process)) for process in served.ray.members()]


def _serving(members: Iterable[tuple[psutil.Process, str]]) -> list[tuple[psutil.Process, str]]:
    return [(process, title) for process, title in members if title.startswith(SERVING)]


def _title(process: psutil.Process) -> str:
    """Title without the method that a Ray actor runs at the moment (`ray::ServeController.listen…`)."""
    try:
        words = process.cmdline()
        known = bool(words) and words[0].startswith(SERVING)
        return words[0].partition(".")[0] if known else process.name()
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
