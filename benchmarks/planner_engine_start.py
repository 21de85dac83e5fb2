"""One start of the installed vLLM's CPU engine, for `planner_engine`: prints what vLLM logs, then ends.

    python -m benchmarks.planner_engine_start MODEL_FOLDER ENGINE_ARGUMENTS_AS_JSON

The engine runs in this process alone, which dies with the one that started it: nothing is left behind.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Start, and end without tidying up: there is nothing to save."""
    model, engine = arguments
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core is no process of its own
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    importlib.import_module("rayserve.serving.die_with_parent")
    from vllm import LLM

    LLM(model=model, skip_tokenizer_init=True, enforce_eager=True, **json.loads(engine))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
