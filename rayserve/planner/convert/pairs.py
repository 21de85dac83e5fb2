"""Which flags of one command line contradict, need or undo one another?"""

from __future__ import annotations

from collections.abc import Mapping

from rayserve.engine import VLLM_VERSION
from rayserve.engine.flags import arity
from rayserve.planner.convert.draft import HUMAN_INTS, Draft, Setting, shown
from rayserve.planner.support.schemes import contradicted

LONG_CONTEXT = 32_768
"""Above it releases before 0.8 turned chunked prefill on by themselves."""
V1_RELEASE = "0.8.0"
READABLE = {"max_model_len": "0.8.4", "max_num_batched_tokens": "0.9.1"}
"""Release whose parser first takes 32k for the flag (its vllm/engine/arg_utils.py)."""
GRAPH_FLAGS = (
    "compilation_config",
    "cudagraph_capture_sizes",
    "max_cudagraph_capture_size",
    "optimization_level",
)
ONCE_VALUED = {"enable_chunked_prefill": "0.8.5", "multi_step_stream_outputs": "0.8.5"}
"""Switches that took `true` or `false`, and the release that first does not (StoreBoolean there)."""
ARG_UTILS = "vllm/engine/arg_utils.py"


def judge_pairs(draft: Draft) -> None:
    """Tell what contradicts, and what values do not mean what they look like."""
    _steps(draft)
    _graphs(draft)
    _parsers(draft)
    _fixed_cache(draft)
    _method(draft)
    for name in sorted(HUMAN_INTS & draft.given.keys()):
        _suffix(draft, draft.given[name])
    for setting in draft.given.values():
        if setting.values and arity(setting.name) == "switch":
            _valued(draft, setting)


def _method(draft: Draft) -> None:
    """A method of quantization beside what config.json says of the checkpoint."""
    given, config = draft.given.get("quantization"), draft.context.config
    if given is None or not config:
        return
    asked = str(draft.get("precision.quantization", ""))
    stated = config.get("quantization_config") or config.get("compression_config")
    own = str(stated.get("quant_method", "")) if isinstance(stated, Mapping) else ""
    if contradicted(own, asked):
        draft.drop("precision.quantization")
        draft.find(
            "error",
            "contradiction",
            given,
            f"{given.written} {asked}, and a checkpoint of {own}: vLLM {VLLM_VERSION} does not start",
            why="the method of the argument must be that of config.json",
            do="it is auto here",
            certainty="read",
            source="vllm/config/model.py, _verify_quantization",
        )
    elif asked == "fp8" and not own:
        draft.find(
            "warning",
            "deprecated",
            given,
            f"{given.written} fp8 is deprecated for a checkpoint of 16 bits",
            why=f"vLLM {VLLM_VERSION} says so, and reads it as fp8_per_tensor",
            do="write fp8_per_tensor, or take a checkpoint in FP8",
            certainty="read",
            source="vllm/model_executor/model_loader/weight_utils.py",
        )


def _steps(draft: Draft) -> None:
    """A step that is shorter than the longest prompt, in a release that reads prompts whole."""
    given = draft.given.get("max_num_batched_tokens")
    step, length = draft.get("limits.max_num_batched_tokens"), draft.get("limits.max_model_len")
    if given is None or not draft.before(V1_RELEASE):
        return
    if "enable_chunked_prefill" in draft.given:
        chunked = draft.get("scheduling.chunked_prefill") is not False
    else:
        chunked = isinstance(length, int) and length > LONG_CONTEXT
    if chunked or not isinstance(step, int) or not isinstance(length, int) or step >= length:
        return
    draft.find(
        "error",
        "contradiction",
        given,
        f"{given.written} {step} is smaller than --max-model-len {length}: vLLM {draft.context.version} "
        "does not start",
        why="without --enable-chunked-prefill it reads a prompt in one step; it turned that on by itself only "
        f"above {LONG_CONTEXT} tokens",
        do="nothing here: chunked prefill is on",
        certainty="read",
        source="vllm/config.py of 0.6.0 to 0.7.3",
    )


def _graphs(draft: Draft) -> None:
    eager = draft.given.get("enforce_eager")
    if eager is None or draft.get("scheduling.cuda_graphs") is not False:
        return
    for name in GRAPH_FLAGS:
        other = draft.given.get(name)
        if other is not None:
            draft.find(
                "warning",
                "contradiction",
                other,
                f"{eager.written} undoes {other.written}",
                why="it turns compilation and CUDA graphs off, whatever else is written of them",
                do=f"remove {eager.written} to keep them, or {other.written}",
                certainty="read",
                source="vllm/config/vllm.py of 0.32.0",
            )


def _parsers(draft: Draft) -> None:
    parser = draft.given.get("tool_call_parser")
    if parser is not None and "enable_auto_tool_choice" not in draft.given:
        draft.find(
            "note",
            "not_the_same",
            parser,
            f"{parser.written} alone does not let the model choose tools; here it does",
            why="vLLM needs --enable-auto-tool-choice with it, and chat.tool_parser turns both on",
            do="remove chat.tool_parser if tools are not wanted",
        )
    reasoning = draft.given.get("enable_reasoning")
    if reasoning is not None and "reasoning_parser" not in draft.given:
        draft.find(
            "error",
            "missing",
            reasoning,
            f"{reasoning.written} without --reasoning-parser",
            why="releases that have the flag refuse to start so",
            do="write chat.reasoning_parser",
            certainty="read",
            source="vllm/entrypoints/openai/cli_args.py of 0.8.5",
        )


def _fixed_cache(draft: Draft) -> None:
    fixed = draft.given.get("kv_cache_memory_bytes")
    share = draft.given.get("gpu_memory_utilization")
    if fixed is not None and share is not None:
        draft.find(
            "warning",
            "contradiction",
            share,
            f"{fixed.written} undoes {share.written}",
            why="the size of the KV cache is then no longer computed from the share of the memory",
            do=f"remove one of the two; {fixed.written} asks you to know what else needs memory",
            certainty="read",
            source="vllm/config/cache.py of 0.32.0",
        )


def _valued(draft: Draft, setting: Setting) -> None:
    """A value behind a switch, which argparse takes for a word of its own."""
    took = setting.name in ONCE_VALUED and draft.before(ONCE_VALUED[setting.name])
    name = setting.name.replace("_", "-")
    draft.find(
        "warning" if took else "error",
        "value_of_switch",
        setting,
        f"{setting.written} is a switch: vLLM {VLLM_VERSION} does not start with {shown(setting)} behind it",
        why=f"releases before {ONCE_VALUED[setting.name]} took a value"
        if took
        else "the value counts as a word of its own, which belongs to no flag",
        do=f"on a command line write --{name} or --no-{name}; here it is read as it is meant",
        certainty="read",
        source=ARG_UTILS,
    )


def _suffix(draft: Draft, setting: Setting) -> None:
    """32k is 32,000, and 32K is 32,768; earlier releases take digits alone."""
    text = setting.text.strip()
    if not text or text[-1] not in "kKmMgGtT" or not text[0].isdigit():
        return
    since = READABLE.get(setting.name)
    if since is not None and draft.before(since):
        draft.find(
            "error",
            "newer",
            setting,
            f"vLLM {draft.context.version} takes digits alone: {setting.written} {shown(setting)}",
            why=f"suffixes came with {since}",
            do="nothing here: it is written out",
            certainty="read",
            source=f"{ARG_UTILS} of {since}",
        )
    if text[-1].islower():
        draft.find(
            "note",
            "unit",
            setting,
            f"{setting.written} {shown(setting)} counts in thousands",
            why="k, m, g and t are decimal, K, M, G and T powers of 1,024",
            do=f"write {text[:-1]}{text[-1].upper()} if powers of two were meant",
            certainty="read",
            source="vllm/utils/argparse_utils.py of 0.32.0",
        )
