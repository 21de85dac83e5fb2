"""Whether Serve is stopping this replica: the one place that looks into Serve's internals for it.

Serve tells user code nothing when a replica begins to drain; the replica actor only sets a flag, and
goes on handing it requests for the length of the drain floor. The flag is private, so a contract
test holds it against the pinned Ray, and without it the door simply does not refuse by itself.
"""

from __future__ import annotations

from collections.abc import Callable

import ray


def drain_probe() -> Callable[[], bool]:
    """A function that says whether Serve has begun to stop the replica that this process runs."""
    worker = ray._private.worker.global_worker  # noqa: SLF001 - see above
    actor = worker.actors.get(worker.actor_id)
    replica = getattr(actor, "_replica_impl", None)
    if replica is None or not hasattr(replica, "_shutting_down"):
        return lambda: False
    return lambda: bool(replica._shutting_down)  # noqa: SLF001 - see above
