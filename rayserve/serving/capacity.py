"""Which resources of the cluster are free, answered at once and without asking Ray?

Serve calls autoscaling policies inside its controller's only control loop, twice a second, so
nothing there may wait. One daemon thread of the controller's process asks Ray and keeps the newest
answer; policies read that. Where Ray does not answer, the answer grows old and policies stop
growing. This module is imported by reference, so that all policies of a controller share it, while
Serve pickles the policy's own module by value.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray._private import state as ray_state
from ray._private.worker import global_worker

from rayserve.gangs import CLAIM_SETTLE_S, SNAPSHOT_MAX_AGE_S, Claim, Group, Snapshot

logger = logging.getLogger("ray.serve")

PERIOD_S = 1.0
_UNREAD_LIMIT_S = 60.0
_RPC_TIMEOUT_S = 3.0
_GONE = "REMOVED"
_PLACED = "CREATED"


class ClusterWatcher:
    """Keeps a view of the cluster fresh, in a thread of its own; reading it never waits."""

    def __init__(self) -> None:
        self._snapshot: Snapshot | None = None
        self._claims: tuple[Claim, ...] = ()
        self._read_at_s = time.monotonic()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rayserve-capacity", daemon=True)
        self._thread.start()

    def read(self, now_s: float) -> tuple[Snapshot | None, tuple[Claim, ...]]:
        """The newest view, and the growth that was decided lately."""
        self._read_at_s = now_s
        horizon_s = now_s - SNAPSHOT_MAX_AGE_S - CLAIM_SETTLE_S
        self._claims = tuple(claim for claim in self._claims if claim.made_at_s > horizon_s)
        return self._snapshot, self._claims

    def claim(self, claim: Claim) -> None:
        """Say that a decision took gangs, so that the next one does not count them free."""
        self._claims = (*self._claims, claim)

    def stop(self) -> None:
        """End the thread, in a process that leaves the cluster."""
        self._end.set()

    def _run(self) -> None:
        failing = False
        while not self._end.wait(PERIOD_S):
            if time.monotonic() - self._read_at_s < _UNREAD_LIMIT_S:
                try:
                    self._snapshot = take_snapshot() or self._snapshot
                    failing = False
                except Exception as error:  # noqa: BLE001
                    # Entry of the thread: if it ended, no deployment would ever grow again, and
                    # no view is better than a wrong one, since policies refuse an old view.
                    if not failing:
                        logger.warning("autoscaling: Ray does not say what is free: %r", error)
                    failing = True


def take_snapshot() -> Snapshot | None:
    """Ask Ray; None where placement groups changed meanwhile, so that a gang might count twice.

    Waits for Ray's head for as long as that takes (about 2 ms when it is well).
    """
    taken_at_s = time.monotonic()
    before = _groups(ray_state.state.placement_group_table())
    draining = global_worker.gcs_client.get_draining_nodes(timeout=_RPC_TIMEOUT_S)
    available = ray_state.available_resources_per_node()
    if _groups(ray_state.state.placement_group_table()) != before:
        return None
    nodes = tuple(free for node, free in available.items() if node not in draining)
    return Snapshot(taken_at_s, nodes, before)


def _groups(table: Mapping[str, Mapping[str, Any]]) -> tuple[Group, ...]:
    return tuple(
        Group(
            name=entry["name"],
            placed=entry["state"] == _PLACED,
            bundles=tuple(entry["bundles"].values()),
            strategy=entry["strategy"],
        )
        for _, entry in sorted(table.items())
        if entry["state"] != _GONE
    )


@functools.cache
def watcher() -> ClusterWatcher:
    """The watcher of this process, started at the first call.

    Raises:
        RuntimeError: this process belongs to no cluster.
    """
    if not ray.is_initialized():
        raise RuntimeError("only a process of a cluster can watch it")
    return ClusterWatcher()
