"""A stand-in for a kernel that some prompts crash: vLLM loads it into the worker as a logits processor.

No prompt is known that crashes vLLM's CPU engine. So the worker's own process kills itself, at the step
in which a prompt of nothing but the marker's token is taken in; all around it is the real engine.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

from benchmarks.marker import MARKER


class CrashOnMarker(LogitsProcessor):
    """Kills the process that takes the marker in."""

    def __init__(self, *_: Any) -> None:
        """Needs nothing of the engine."""

    def is_argmax_invariant(self) -> bool:
        """It changes no token."""
        return True

    def apply(self, logits: Any) -> Any:
        """The logits as they are; float32 [rows, vocabulary]."""
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """See which requests join the batch."""
        for _, _, prompt, _ in batch_update.added if batch_update is not None else ():
            if prompt is not None and list(prompt) == MARKER:
                os.kill(os.getpid(), signal.SIGKILL)
