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
from rayserve.engine.models import check_served

__all__ = [
    "VLLM_VERSION",
    "Argument",
    "Snapshot",
    "check_served",
    "check_value",
    "load_snapshot",
    "validate",
    "validate_env",
]
