"""Which key of cluster.yml does a flag of vLLM become? Chat, speculation, adapters, positions, offload.

Also the flags of earlier releases whose meaning lives on under another name.
"""

from __future__ import annotations

import json
import re
from typing import Any

from rayserve.planner.convert.draft import (
    BadValueError,
    Draft,
    Setting,
    excerpt,
    mapping,
    number,
    shown,
    switch,
    whole,
)
from rayserve.planner.convert.keys import Handler, choice, owned, unsaid
from rayserve.spec.base import COMMIT, HF_ID, MODEL_NAME, PATTERNS
from rayserve.spec.placeholders import PLACEHOLDER
from rayserve.spec.rules import UNDESCRIBED

METHODS = {"ngram", "draft_model", "eagle", "eagle3", "mtp", "medusa", "suffix"}
DRAFTED = {"draft_model", "eagle", "eagle3", "medusa"}
MOST_GUESSED = 32
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
ROPE_TYPES = {"linear", "dynamic", "yarn"}
SAMPLING = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}


def _path(draft: Draft, key: str, path: str, why: str) -> str:
    """A path that all hosts can open; a placeholder for one that depends on a folder or a variable."""
    if path.startswith("/") and not re.search(r"[{}$<>\n]", path):
        return path
    leaf = re.sub(r"[^\w.-]", "-", path.rstrip("/").rpartition("/")[2])[:60] or "file"
    draft.hold(key, f"/{PLACEHOLDER}/{leaf}", why)
    return f"/{PLACEHOLDER}/{leaf}"


def _template(draft: Draft, setting: Setting) -> None:
    if not setting.text:
        raise BadValueError("a path")
    if "{" in setting.text and "${" not in setting.text:
        draft.leave(setting)
        unsaid(
            draft,
            setting,
            f"the template inside {setting.written} is left out",
            "a template is a program; Ansible would expand it inside cluster.yml",
            "write it to a file on every host, and its path to chat.template_file",
        )
        return
    path = _path(
        draft, "chat.template_file", setting.text, "the template's path on every host, in full"
    )
    draft.carry(setting, "chat.template_file", path, draft.comments.get("chat.template_file", ""))


def _tool_parser(draft: Draft, setting: Setting) -> None:
    choice(draft, setting, "chat.tool_parser")


def _auto_tools(draft: Draft, setting: Setting) -> None:
    draft.leave(setting)
    if switch(setting) and "tool_call_parser" not in draft.given:
        draft.find(
            "error",
            "missing",
            setting,
            f"{setting.written} without --tool-call-parser",
            why="vLLM refuses to start so",
            do="write chat.tool_parser; it turns tools on",
        )


def _reasoning_parser(draft: Draft, setting: Setting) -> None:
    choice(draft, setting, "chat.reasoning_parser")


def _speculative(draft: Draft, setting: Setting) -> None:
    config = mapping(setting)
    _guess(
        draft,
        setting,
        method=str(config.pop("method", "") or ""),
        model=str(config.pop("model", "") or ""),
        tokens=config.pop("num_speculative_tokens", None),
        revision=str(config.pop("revision", "") or ""),
    )
    for name in ("prompt_lookup_max", "prompt_lookup_min", "draft_tensor_parallel_size"):
        config.pop(name, None)
    if config:
        unsaid(
            draft,
            setting,
            f"{', '.join(sorted(map(str, config)))[:100]} of {setting.written} is left out",
            "`speculative` has method, model, revision and number of tokens",
            "measure without; where it matters, say so in an issue",
        )


def _old_speculative(draft: Draft, setting: Setting) -> None:
    tokens = draft.given.get("num_speculative_tokens") or draft.given.get("spec_tokens")
    model = setting.text
    method = draft.given["spec_method"].text if "spec_method" in draft.given else ""
    if model.strip("[]") == "ngram":
        method, model = "ngram", ""
    _guess(draft, setting, method=method, model=model, tokens=tokens.text if tokens else None)


def _spec_method(draft: Draft, setting: Setting) -> None:
    if "spec_model" in draft.given:
        draft.leave(setting)
        return
    tokens = draft.given.get("spec_tokens")
    _guess(draft, setting, method=setting.text, model="", tokens=tokens.text if tokens else None)


def _guess(
    draft: Draft, setting: Setting, *, method: str, model: str, tokens: Any, revision: str = ""
) -> None:
    """Set `speculative`."""
    family = "mtp" if method.endswith("mtp") else method.strip("[]")
    if not family:
        family = "draft_model" if model else "ngram"
        for guess in ("eagle3", "eagle", "medusa"):
            if guess in model.lower():
                family = guess
                break
    if family not in METHODS:
        draft.leave(setting)
        draft.find(
            "error",
            "out_of_scope",
            setting,
            f"speculation by `{excerpt(family)}` is left out",
            why="`speculative` takes " + ", ".join(sorted(METHODS)),
            do="write one of these, or none",
        )
        return
    count = whole(str(tokens), human=False) if tokens is not None else 0
    draft.carry(setting, "speculative.method", family)
    if family in DRAFTED:
        fitting = bool(re.fullmatch(HF_ID, model or "/"))
        path = (
            model
            if fitting
            else _path(
                draft,
                "speculative.model",
                model,
                "the draft model's folder on every host, or its HF id",
            )
        )
        draft.put("speculative.model", path, draft.comments.get("speculative.model", ""))
        if fitting and (COMMIT.fullmatch(revision) or (revision and method != UNDESCRIBED)):
            draft.put("speculative.revision", revision)
        elif fitting:
            draft.hold(
                "speculative.revision",
                PLACEHOLDER,
                "the draft model's commit, so that every host loads the same weights",
            )
    if not 1 <= count <= MOST_GUESSED:
        draft.hold(
            "speculative.num_tokens", 3, "tokens guessed at a time; the command does not say"
        )
    else:
        draft.put("speculative.num_tokens", count)


def _lora_modules(draft: Draft, setting: Setting) -> None:
    adapters = []
    for item in setting.values:
        name, path = _adapter(item)
        if not name or not path:
            raise BadValueError("name=path, or JSON with name and path")
        if not re.fullmatch(MODEL_NAME, name):
            unsaid(
                draft,
                setting,
                f"the adapter `{excerpt(name)}` is left out",
                f"clients ask for it by its name, which here is {PATTERNS[MODEL_NAME]}; vLLM takes any",
                "write it to lora.adapters under such a name, and change the name in the clients",
            )
            continue
        fitting = path.startswith("/") and not re.search(r"[{}$<>\n]", path)
        adapters.append({"name": name, "path": path if fitting else f"/{PLACEHOLDER}/{name}"})
        if not fitting:
            unsaid(
                draft,
                setting,
                f"the adapter `{name}` needs a folder on every host's disk",
                "found " + excerpt(path),
                "copy it there, and write the folder",
            )
    if not setting.values:
        raise BadValueError("name=path, or JSON with name and path")
    if adapters:
        draft.carry(setting, "lora.adapters", adapters)
    else:
        draft.leave(setting)


def _adapter(item: str) -> tuple[str, str]:
    if item.lstrip().startswith("{"):
        try:
            row = json.loads(item)
        except (ValueError, RecursionError):
            raise BadValueError("name=path, or JSON with name and path") from None
        return str(row.get("name", "")), str(row.get("path", ""))
    name, _, path = item.partition("=")
    return name, path


def _lora(draft: Draft, setting: Setting) -> None:
    draft.leave(setting)
    if switch(setting) and "lora_modules" not in draft.given:
        unsaid(
            draft,
            setting,
            f"{setting.written} without --lora-modules is left out",
            "adapters are loaded at start; loading at run time is off, since a request would name files",
            "write lora.adapters",
        )


def _lora_rank(draft: Draft, setting: Setting) -> None:
    rank = whole(setting.text, human=False)
    fitting = next((known for known in RANKS if known >= rank), None)
    if fitting is None or rank < 1:
        raise BadValueError("a rank of " + ", ".join(map(str, RANKS)))
    if "lora_modules" in draft.given:
        draft.carry(setting, "lora.max_rank", fitting)
    else:
        draft.leave(setting)


def _counted(draft: Draft, setting: Setting) -> None:
    draft.leave(setting)


def _rope(draft: Draft, setting: Setting) -> None:
    _scale(draft, setting, mapping(setting))


def _scale(draft: Draft, setting: Setting, rope: dict[str, Any]) -> None:
    """Set `rope_scaling`; vLLM's older releases call the method `type`."""
    method = rope.get("rope_type", rope.get("type"))
    factor, trained = rope.get("factor"), rope.get("original_max_position_embeddings")
    config = draft.context.config
    if trained is None and isinstance(config.get("max_position_embeddings"), int):
        trained = config["max_position_embeddings"]
    if method not in ROPE_TYPES or not isinstance(factor, int | float) or factor <= 1:
        draft.leave(setting)
        unsaid(
            draft,
            setting,
            f"{setting.written} {shown(setting)} is left out",
            "`rope_scaling` stretches by linear, dynamic or yarn, with a factor above 1; what a checkpoint "
            "was trained with stands in its config.json",
            "write it to the checkpoint's config.json",
        )
        return
    draft.carry(setting, "rope_scaling.rope_type", method)
    draft.put("rope_scaling.factor", factor)
    key = "rope_scaling.original_max_position_embeddings"
    if isinstance(trained, int) and trained > 0:
        draft.put(key, trained)
    else:
        draft.hold(key, 32768, "the length that the model was trained on; its config.json says it")


def _overrides(draft: Draft, setting: Setting) -> None:
    overrides = mapping(setting)
    rope = overrides.pop("rope_scaling", None) or overrides.pop("rope_parameters", None)
    if isinstance(rope, dict):
        _scale(draft, setting, rope)
    if overrides or not isinstance(rope, dict):
        owned(draft, setting)


def _sampling(draft: Draft, setting: Setting) -> None:
    values = mapping(setting)
    largest = values.pop("max_new_tokens", None)
    draft.leave(setting)
    for name in sorted(SAMPLING & values.keys()):
        value = values.pop(name)
        draft.carry(setting, f"sampling.{name}", value)
    if isinstance(largest, int):
        draft.carry(setting, "door.max_tokens", largest)
    if values:
        unsaid(
            draft,
            setting,
            f"{', '.join(sorted(map(str, values)))[:100]} of {setting.written} is left out",
            "`sampling` has no such key",
            "clients may send it",
        )


def _generation_config(draft: Draft, setting: Setting) -> None:
    draft.leave(setting)


def _offload(draft: Draft, setting: Setting) -> None:
    value = number(setting.text)
    if value < 0:
        raise BadValueError("a size of at least 0")
    draft.carry(setting, "kv_offload.cpu_gib", value)


def _domains(draft: Draft, setting: Setting) -> None:
    draft.carry(setting, "chat.allowed_media_domains", list(setting.values))


def _shutdown(draft: Draft, setting: Setting) -> None:
    value = number(setting.text)
    draft.carry(setting, "timeouts.drain_s", value) if value > 0 else draft.leave(setting)


HANDLERS: dict[str, Handler] = {
    "allowed_media_domains": _domains,
    "chat_template": _template,
    "enable_auto_tool_choice": _auto_tools,
    "enable_lora": _lora,
    "generation_config": _generation_config,
    "hf_overrides": _overrides,
    "kv_offloading_size": _offload,
    "lora_modules": _lora_modules,
    "max_lora_rank": _lora_rank,
    "max_loras": _counted,
    "num_speculative_tokens": _counted,
    "override_generation_config": _sampling,
    "reasoning_parser": _reasoning_parser,
    "rope_scaling": _rope,
    "shutdown_timeout": _shutdown,
    "spec_method": _spec_method,
    "spec_model": _old_speculative,
    "spec_tokens": _counted,
    "speculative_config": _speculative,
    "speculative_model": _old_speculative,
    "tool_call_parser": _tool_parser,
}
"""Flags of the pinned release that have a key, and those of earlier ones whose meaning lives on."""
