"""What became of a flag of an earlier release whose meaning lives on under another name?"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from typing import Any

from rayserve.engine import VLLM_VERSION
from rayserve.owned import REMOVED_KEYS
from rayserve.planner.convert.draft import (
    BadValueError,
    Draft,
    Setting,
    mapping,
    shown,
    switch,
    whole,
)
from rayserve.planner.convert.keys import Handler, engine_argument, unsaid


def _structured(key: str) -> Handler:
    """Collect what became `structured_outputs_config`."""

    def handle(draft: Draft, setting: Setting) -> None:
        value: Any = setting.text.partition(":")[0] if key == "backend" else switch(setting)
        draft.carry(setting, f"engine_args.structured_outputs_config.{key}", value)

    return handle


def _balancing(key: str) -> Handler:
    """Collect what became `eplb_config`."""

    def handle(draft: Draft, setting: Setting) -> None:
        value: Any = (
            switch(setting) if key == "log_balancedness" else whole(setting.text, human=False)
        )
        draft.carry(setting, f"engine_args.eplb_config.{key}", value)

    return handle


def _graph_sizes(draft: Draft, setting: Setting) -> None:
    sizes = [whole(value, human=False) for value in setting.values]
    if not sizes:
        raise BadValueError("at least one number")
    if len(sizes) == 1:
        draft.carry(setting, "engine_args.max_cudagraph_capture_size", sizes[0])
    else:
        draft.carry(setting, "engine_args.cudagraph_capture_sizes", sizes)


LITERAL_GONE = "0.9.0"
"""Release that first takes JSON alone for `--compilation-config`; earlier ones took Python's quotes."""
LEVEL_GONE = "0.9.2"
"""The same of a bare level from 0 to 3."""
MOST_LITERAL = 4096
_COMPILATION = "compilation_config."
OLD_COMPILATION = {
    name.removeprefix(_COMPILATION): do
    for name, do in REMOVED_KEYS.items()
    if name.startswith(_COMPILATION)
}
"""Keys of `--compilation-config` that the pinned vLLM has no longer (vllm/config/compilation.py)."""


def _as_once_written(draft: Draft, setting: Setting) -> dict[str, Any]:
    """The JSON object, or what earlier releases took for it: a level, or a Python dict."""
    if re.fullmatch(r"[0-3]", setting.text):
        found, since = {"level": int(setting.text)}, LEVEL_GONE
    elif setting.text.startswith("{'") and len(setting.text) < MOST_LITERAL:
        found, since = _literal(setting), LITERAL_GONE
    else:
        return mapping(setting)
    old = draft.before(since)
    draft.find(
        "warning" if old else "error",
        "wrong_value",
        setting,
        f"{setting.written} takes JSON: {shown(setting)} is none",
        why=f"releases before {since} took it" if old else "vLLM refuses to start with it",
        do="nothing here: it is carried as JSON",
        certainty="read",
        source="vllm/config.py of 0.8.5 to 0.9.2",
    )
    return found


def _literal(setting: Setting) -> dict[str, Any]:
    try:
        found = ast.literal_eval(setting.text)
        json.dumps(found, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        raise BadValueError("a JSON object", "JSON takes double quotes: '{\"key\": 1}'") from None
    if not isinstance(found, dict):
        raise BadValueError("a JSON object")
    return {str(key): value for key, value in found.items()}


def _compilation(draft: Draft, setting: Setting) -> None:
    config = _as_once_written(draft, setting)
    level = config.get("level")
    for name in OLD_COMPILATION.keys() & config.keys():
        del config[name]
        draft.find(
            "warning",
            "removed",
            setting,
            f"`{name}` of {setting.written} is gone, and left out",
            why=f"vLLM {VLLM_VERSION} has no such key",
            do=OLD_COMPILATION[name],
            certainty="read",
            source=f"vllm/config/compilation.py of {VLLM_VERSION}",
        )
    if isinstance(level, int):
        config.setdefault("mode", level)
    if config:
        engine_argument(draft, replace(setting, values=(), tree=config))
    else:
        draft.leave(setting)


def _optimization(draft: Draft, setting: Setting) -> None:
    level = whole(setting.text, human=False)
    if draft.before("0.12.0"):
        draft.leave(setting)
        unsaid(
            draft,
            setting,
            f"{setting.written}{level} is left out",
            "before 0.12 it set the level of compilation, of which 3 was the V1 engine's own; today it is "
            "an optimization level on another scale",
            "leave it to vLLM",
        )
        return
    engine_argument(draft, setting)


def _task(draft: Draft, setting: Setting) -> None:
    draft.leave(setting)
    if setting.text not in {"auto", "generate"}:
        draft.find(
            "error",
            "out_of_scope",
            setting,
            f"{setting.written} {shown(setting)} is not served here",
            why="the toolkit serves a model that generates text",
            do="serve it with vLLM alone",
        )


def _runner(draft: Draft, setting: Setting) -> None:
    if setting.text in {"auto", "generate", "none"}:
        draft.leave(setting)
    else:
        _task(draft, setting)


def _device(draft: Draft, setting: Setting) -> None:
    draft.leave(setting)


def _constant(key: str, value: Any) -> Handler:
    def handle(draft: Draft, setting: Setting) -> None:
        if switch(setting):
            draft.carry(setting, key, value)
        else:
            draft.leave(setting)

    return handle


def _pooler(draft: Draft, setting: Setting) -> None:
    draft.carry(setting, "engine_args.pooler_config", mapping(setting))


HANDLERS: dict[str, Handler] = {
    "compilation_config": _compilation,
    "cuda_graph_sizes": _graph_sizes,
    "device": _device,
    "disable_mm_preprocessor_cache": _constant("engine_args.mm_processor_cache_gb", 0),
    "enable_multimodal_encoder_data_parallel": _constant("engine_args.mm_encoder_tp_mode", "data"),
    "eplb_log_balancedness": _balancing("log_balancedness"),
    "eplb_step_interval": _balancing("step_interval"),
    "eplb_window_size": _balancing("window_size"),
    "guided_decoding_backend": _structured("backend"),
    "guided_decoding_disable_additional_properties": _structured("disable_additional_properties"),
    "guided_decoding_disable_any_whitespace": _structured("disable_any_whitespace"),
    "num_redundant_experts": _balancing("num_redundant_experts"),
    "optimization_level": _optimization,
    "override_pooler_config": _pooler,
    "convert": _runner,
    "runner": _runner,
    "task": _task,
}
"""The flags of earlier releases, and -O, whose levels changed."""
