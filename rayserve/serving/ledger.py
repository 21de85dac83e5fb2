"""What a start cost: phases in seconds and memory in bytes, one JSON line a start.

The engine's weights and profile phases happen in child processes. vLLM reads a logging
configuration from `VLLM_LOGGING_CONFIG_PATH` in each of them; ours adds `PhaseHandler`, which writes
the few messages that carry a duration to the file named by `RAYSERVE_PHASE_FILE`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

PHASE_FILE = "RAYSERVE_PHASE_FILE"

ENGINE_MESSAGES = {
    "Model loading took": ("weights", 1),
    "Loading weights took": ("read", 0),
    "init engine (profile": ("profile", 0),
    "Graph capturing finished": ("graphs", 0),
}
"""vLLM's message prefix → the phase it ends, and which argument of the message is its seconds.

"weights" is all of loading the model, "read" the part that reads the checkpoint: the CPU engine tells
only that."""

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
                # A full disk or a message worded anew must not stop the engine that logs it.
                with suppress(OSError, ValueError):
                    seconds = float(str(record.args[index]))
                    line = json.dumps({"phase": phase, "seconds": seconds})
                    with Path(path).open("a", encoding="utf-8") as file:
                        file.write(line + "\n")


class MemoryReport:
    """Mixed into vLLM's workers (`worker_extension_cls`): the worker's own memory ledger."""

    def rayserve_memory(self) -> dict[str, int | str]:
        """Bytes of this rank, and its GPU; what the platform's worker does not measure is left out."""
        runner = getattr(self, "model_runner", None)
        total = getattr(getattr(self, "init_snapshot", None), "total_memory", None)
        terms = {
            "rank": getattr(self, "rank", None),
            "total_bytes": total,
            "weights_bytes": getattr(runner, "model_memory_usage", None),
            "requested_bytes": getattr(self, "requested_memory", None)
            or getattr(self, "requested_cpu_memory", None),
            "consumed_bytes": getattr(self, "total_consumed", None),
            "activation_bytes": getattr(self, "peak_activation_memory", None),
            "cudagraph_bytes": getattr(self, "cudagraph_memory_estimate", None),
            "kv_bytes": getattr(self, "available_kv_cache_memory_bytes", None),
        }
        found: dict[str, int | str] = {
            name: int(value) for name, value in terms.items() if value is not None
        }
        name = "" if total is None else device_name(getattr(self, "local_rank", 0))
        return found | {"device_name": name} if name else found


def device_name(index: int) -> str:
    """The platform's name of a GPU; empty where it has none: a start does not fail for its record."""
    try:
        from vllm.platforms import current_platform
        from vllm.third_party.pynvml import NVMLError
    except ImportError:
        return ""
    # The driver's refusal, torch's, and that of a platform that names nothing or not this index.
    with suppress(NVMLError, RuntimeError, LookupError, ValueError):
        return str(current_platform.get_device_name(index))
    return ""


@dataclass
class StartLedger:
    """Collects the phases of one start, in seconds of a clock that does not jump."""

    revision: str
    started_at: float = field(default_factory=time.time)
    """Unix time."""
    phases: dict[str, float] = field(default_factory=dict)
    _begin_s: float = field(default_factory=time.monotonic)

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
        try:
            lines = phase_file.read_text(encoding="utf-8").splitlines()
        except OSError:
            return
        for line in lines:
            # A line may be cut short where the disk is full.
            with suppress(ValueError, KeyError):
                entry = json.loads(line)
                name, seconds = entry["phase"], entry["seconds"]
                self.phases[name] = max(seconds, self.phases.get(name, 0.0))
        if "read" in self.phases:
            self.phases.setdefault("weights", self.phases["read"])
        for name in ("read", "weights", "profile", "graphs"):
            if name in self.phases:
                logger.info(
                    "start %s: phase=%s seconds=%.2f", self.revision, name, self.phases[name]
                )

    def line(
        self,
        identity: dict[str, Any],
        memory: list[dict[str, int | str]],
        engine: dict[str, Any],
    ) -> dict[str, Any]:
        """The whole record of a start that reached ready; `rayserve.starts` says of what it is, and
        reads it.
        """
        return {
            **identity,
            "revision": self.revision,
            "started_at": round(self.started_at, 3),
            "phases_s": {name: round(seconds, 3) for name, seconds in self.phases.items()},
            "total_s": round(time.monotonic() - self._begin_s, 3),
            "memory": memory,
            "engine": engine,
        }


def write_logging_config(folder: Path) -> Path:
    """vLLM's logging configuration with our handler, at the level that the environment asks for."""
    text = (resources.files("rayserve") / "data/vllm-logging.json").read_text(encoding="utf-8")
    config = json.loads(text)
    level = os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper()
    config["loggers"]["vllm"]["level"] = level
    config["handlers"]["vllm"]["level"] = level
    path = folder / "logging.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def show_vllm_messages() -> None:
    """Send this process's own vLLM messages to its standard output, as vLLM would."""
    level = os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper()
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(name)s: %(message)s"))
    vllm = logging.getLogger("vllm")
    vllm.setLevel(level)
    vllm.propagate = False
    vllm.handlers = [handler]


def append(path: Path, record: dict[str, Any]) -> None:
    """Add one line to the ledger; a full or read-only disk costs the record, not the replica."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, sort_keys=True) + "\n")
    except OSError as error:
        logger.warning("the start ledger %s was not written: %s", path, error)
