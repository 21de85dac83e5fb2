"""What a start cost: phases in seconds and memory in bytes, one JSON line a start.

The engine's weights and profile phases happen in child processes. vLLM reads a logging
configuration from `VLLM_LOGGING_CONFIG_PATH` in each of them; ours adds `PhaseHandler`, which writes
the few messages that carry a duration to the file named by `RAYSERVE_PHASE_FILE`.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PHASE_FILE = "RAYSERVE_PHASE_FILE"
LEDGER = "starts.jsonl"

ENGINE_MESSAGES = {
    "Model loading took": ("weights", 1),
    "Loading weights took": ("weights", 0),
    "init engine (profile": ("profile", 0),
    "Graph capturing finished": ("graphs", 0),
}
"""vLLM's message prefix → the phase it ends, and which argument of the message is its seconds."""

logger = logging.getLogger("ray.serve")


class PhaseHandler(logging.Handler):
    """Appends `{"phase", "seconds"}` lines for the engine messages that carry a duration."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, if this message ends a phase."""
        path = os.environ.get(PHASE_FILE)
        if not path or not isinstance(record.args, tuple):
            return
        for prefix, (phase, index) in ENGINE_MESSAGES.items():
            if str(record.msg).startswith(prefix) and len(record.args) > index:
                line = json.dumps({"phase": phase, "seconds": float(str(record.args[index]))})
                with Path(path).open("a", encoding="utf-8") as file:
                    file.write(line + "\n")


class MemoryReport:
    """Mixed into vLLM's workers (`worker_extension_cls`): the worker's own memory ledger."""

    def rayserve_memory(self) -> dict[str, int]:
        """Bytes of this rank; a term that the platform's worker does not measure is left out."""
        runner = getattr(self, "model_runner", None)
        terms = {
            "rank": getattr(self, "rank", None),
            "weights_bytes": getattr(runner, "model_memory_usage", None),
            "requested_bytes": getattr(self, "requested_memory", None)
            or getattr(self, "requested_cpu_memory", None),
            "consumed_bytes": getattr(self, "total_consumed", None),
            "activation_bytes": getattr(self, "peak_activation_memory", None),
            "cudagraph_bytes": getattr(self, "cudagraph_memory_estimate", None),
            "kv_bytes": getattr(self, "available_kv_cache_memory_bytes", None),
        }
        return {name: int(value) for name, value in terms.items() if value is not None}


@dataclass
class StartLedger:
    """Collects the phases of one start; `clock` counts seconds and never jumps."""

    revision: str
    started_at: float = field(default_factory=time.time)
    phases: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time one phase, and log its beginning and its end."""
        logger.info("start %s: phase=%s begins", self.revision, name)
        begin = time.monotonic()
        try:
            yield
        finally:
            self.phases[name] = time.monotonic() - begin
            logger.info("start %s: phase=%s seconds=%.2f", self.revision, name, self.phases[name])

    def read_engine_phases(self, phase_file: Path) -> None:
        """Add what the engine's processes reported; the slowest rank counts."""
        if not phase_file.is_file():
            return
        for line in phase_file.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            name, seconds = entry["phase"], entry["seconds"]
            self.phases[name] = max(seconds, self.phases.get(name, 0.0))
        for name in ("weights", "profile", "graphs"):
            if name in self.phases:
                logger.info(
                    "start %s: phase=%s seconds=%.2f", self.revision, name, self.phases[name]
                )

    def line(self, memory: list[dict[str, int]], engine: dict[str, Any]) -> dict[str, Any]:
        """The whole record of a start that reached ready."""
        return {
            "revision": self.revision,
            "started_at": round(self.started_at, 3),
            "phases_s": {name: round(seconds, 3) for name, seconds in self.phases.items()},
            "total_s": round(time.time() - self.started_at, 3),
            "memory": memory,
            "engine": engine,
        }


def append(state_dir: Path, record: dict[str, Any]) -> None:
    """Add one line to the ledger; a full or read-only disk costs the record, not the replica."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        with (state_dir / LEDGER).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, sort_keys=True) + "\n")
    except OSError as error:
        logger.warning("the start ledger in %s was not written: %s", state_dir, error)
