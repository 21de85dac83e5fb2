"""Does the pinned vLLM serve this architecture as a model that writes text?

Answered from the committed list, which is taken from the installed package's registry
(engine/snapshot.py).
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayserve.documents import brief
from rayserve.engine.arguments import VLLM_VERSION
from rayserve.errors import SpecError, Where
from rayserve.spec import nearest

WRITERS = ("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel")
"""Endings of names that vLLM takes for models that write (config/model.py, _SUFFIX_TO_DEFAULTS)."""
OTHER_KINDS = {
    "embed": "which turns text into vectors",
    "classify": "which classifies or scores",
    "speech": "which transcribes speech",
    "draft": "a draft model, which guesses for another one",
}
"""What the models of each list do in place of writing."""
COPY = "copy {file} from the checkpoint, unchanged"
UNCHANGED = COPY.format(file="config.json")


@dataclass(frozen=True)
class Models:
    """The architectures of one version of vLLM."""

    transformers_version: str
    text: frozenset[str]
    transformers: frozenset[str]
    """Those that vLLM runs with the code of Transformers."""
    others: Mapping[str, str]
    """Those that do not write, and what they do."""
    removed: Mapping[str, str]
    """The last release that served it."""
    plugins: Mapping[str, str]
    """Address of the package that brings it."""


@functools.lru_cache(maxsize=1)
def load_models() -> Models:
    """The list of the pinned version, read once."""
    name = f"vllm-{VLLM_VERSION}-models.json"
    raw = json.loads(
        importlib.resources.files("rayserve").joinpath("data", name).read_text("utf-8")
    )
    return Models(
        transformers_version=raw["transformers_version"],
        text=frozenset(raw["text"]),
        transformers=frozenset(raw["transformers"]),
        others={name: what for kind, what in OTHER_KINDS.items() for name in raw[kind]},
        removed=raw["removed"],
        plugins=raw["plugins"],
    )


def check_served(
    architectures: Sequence[str],
    where: Where,
    *,
    implementation: str = "auto",
    plugins: bool = False,
) -> str:
    """What should be known of how vLLM serves a model, for the plan's notes; empty: nothing.

    Args:
        architectures: of its config.json; vLLM takes the first that it has.
        where: for messages.
        implementation: the engine argument `model_impl`.
        plugins: the replica's environment names plugins of vLLM, which may bring any architecture.

    Raises:
        SpecError: it does not serve it, or not as a model that writes text.
    """
    models = load_models()
    if implementation == "terratorch":
        raise _refusal("`model_impl: terratorch`, which is for models that do not write", "", where)
    name = next((name for name in architectures if _known(name)), "")
    if name in models.others:
        raise _refusal(f"{brief(name)}, {models.others[name]}", "", where)
    if name in models.transformers or (name and implementation == "transformers"):
        return (
            f"vLLM {VLLM_VERSION} has no code of its own for {name}: it runs that of Transformers "
            f"{models.transformers_version} (model_impl: transformers), as far as that allows it. "
            "`rayserve check args` tries it."
        )
    if name:
        return ""
    if not architectures:
        found = "no `architectures`: vLLM would load the bare model, which does not write"
        raise _refusal(found, "", where)
    if plugins:
        return f"{brief(architectures[0])} is none of vLLM's own: a plugin of VLLM_PLUGINS must bring it."
    raise _unknown(architectures[0], where)


def _known(name: str) -> bool:
    models = load_models()
    return name in models.others or name in models.transformers or _written(name) in models.text


def _written(name: str) -> str:
    """The name of vLLM's own class: it takes another ending for its own (registry.py, _normalize_arch)."""
    text = load_models().text
    ending = next((ending for ending in WRITERS if name.endswith(ending)), "")
    stem = name.removesuffix(ending)
    return next((stem + own for own in (ending, *WRITERS) if stem + own in text), name)


def _unknown(name: str, where: Where) -> SpecError:
    models = load_models()
    if name in models.removed:
        found = f"{brief(name)}, which vLLM {models.removed[name]} was the last to serve"
        return _refusal(found, "take a model that is still served", where)
    if name in models.plugins:
        do = f"install {models.plugins[name]} on every host and name it in env: VLLM_PLUGINS"
        return _refusal(f"{brief(name)}, which a plugin brings", do, where)
    close = nearest(name[:100], sorted(models.text | models.transformers))
    do = f"{UNCHANGED}; of like name is {close}" if close else UNCHANGED
    return _refusal(
        brief(name), f"{do}; or name the plugin that brings it in env: VLLM_PLUGINS", where
    )


def _refusal(found: str, do: str, where: Where) -> SpecError:
    return SpecError(
        f"an architecture that vLLM {VLLM_VERSION} serves as a model that writes text",
        found=found,
        do=do or "name the config.json of a model that answers in text",
        where=where,
    )
