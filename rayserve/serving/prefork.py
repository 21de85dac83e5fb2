"""Starting vLLM's processes from a server that has already imported it.

An engine start is mostly imports: the replica imports vLLM, then its engine core does, then each
worker does, one after the other, because vLLM insists on `spawn` inside a Ray actor: a fork of the
actor itself, with its threads, would be unsafe. Python's fork server is a clean process that never
ran Ray. It imports vLLM while the replica does; the engine core is forked from it, and the workers
from the core, which is vLLM's own default outside of Ray.

    replica (actor) ── import ───────────────┐
        └─ fork server ── import ── fork ── engine core ── fork ── workers

When the replica dies, so do they all: see `die_with_parent`.

The server's children have its environment, not the replica's: everything in `os.environ` that they
need must be set before `start`.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from typing import Literal

METHOD_VARIABLE = "VLLM_WORKER_MULTIPROC_METHOD"

_COMMON = (
    "rayserve.serving.die_with_parent",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.model_loader",
)
_WORKER = {"cpu": "vllm.v1.worker.cpu_worker", "cuda": "vllm.v1.worker.gpu_worker"}


def start_server(device: Literal["cuda", "cpu"]) -> None:
    """Start the fork server, which imports vLLM while the replica does the same. Returns at once."""
    os.environ[METHOD_VARIABLE] = "fork"  # for the workers, which the engine core forks
    multiprocessing.set_forkserver_preload([*_COMMON, _WORKER[device]])
    forkserver.ensure_running()


@contextmanager
def engine_core_forked() -> Iterator[None]:
    """While the engine starts, its core comes from the fork server although this is a Ray actor.

    `vllm.v1.engine.utils` asks `get_mp_context` for the way to start the core; a contract test
    holds that against the pinned vLLM.
    """
    from vllm.v1.engine import utils

    chosen = utils.get_mp_context
    utils.get_mp_context = lambda: multiprocessing.get_context("forkserver")
    try:
        yield
    finally:
        utils.get_mp_context = chosen
