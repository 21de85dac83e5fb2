"""What does the pinned vLLM accept?"""

from __future__ import annotations

from rayserve.engine.arguments import (
    VLLM_VERSION,
    Argument,
    Snapshot,
    check_value,
    load_snapshot,
    validate,
    validate_env,
)

__all__ = [
    "VLLM_VERSION",
    "Argument",
    "Snapshot",
    "check_value",
    "load_snapshot",
    "validate",
    "validate_env",
]
