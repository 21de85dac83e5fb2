"""Which container of a manifest starts vLLM, and with what words?

A Compose file, a pod or Deployment of Kubernetes, or a piece of one: what stands below `command` and
`args` is a command line that no shell has read. Nothing but the text is looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from rayserve.engine.shell import MAX_WORDS, Word, refuse

MOST_NODES = 20_000
"""Of a manifest; an alias counts each time, so that nested aliases end soon."""
MOST_DEPTH = 40
_BEGINS = re.compile(
    r"(?:[ \t]*+(?:#[^\n]*+|---|\.\.\.)?+[ \t]*+\n)*+[ \t]*+(?:\[|-[ \t]+[\"']?--|(?:-[ \t]+)?[\"']?[A-Za-z][\w.-]*[\"']?:(?:\s|$))"
)
_WORDS = ("entrypoint", "command", "args", "commands")
_VARIABLE = re.compile(r"\$(?:\$|\((\w+)\)|\{(\w+)(?::?[-?=]([^{}$]*))?\}|(\w+))")
_GLUED = re.compile(r"(--?[A-Za-z][\w.-]*)[ \t]+(.+)", re.DOTALL)
_PROGRAM = re.compile(r"(?:\S*/)?(?:python[\d.]*|vllm)\s+\S")
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Container:
    """One container as a manifest writes it."""

    words: tuple[Word, ...]
    """Of entry point, command and arguments, a list item each."""
    script: str = ""
    """A command that is one text, for a shell to read."""
    image: str = ""
    env: tuple[tuple[str, str], ...] = ()
    gpus: int = 0
    glued: tuple[str, ...] = ()
    """Flags that share a list item with their value: one word for vLLM, which refuses it."""


def containers(text: str) -> list[Container]:
    """The containers of a manifest that say what they run; none where the text is no manifest.

    Raises:
        InputError: it is a manifest, larger or deeper than any that a person wrote.
    """
    if not _BEGINS.match(text):
        return []
    try:
        documents = list(yaml.load_all(text, Loader=_Loader))
    except (yaml.YAMLError, ValueError, RecursionError):
        return []
    budget = [MOST_NODES]
    return [
        container
        for document in documents
        for node in _nodes(_bare(document), budget, 0)
        if (container := _container(node)) is not None
    ]


def _bare(document: Any) -> Any:
    """A list of arguments alone, as the container that it is a piece of."""
    if isinstance(document, list) and all(isinstance(item, str | int | float) for item in document):
        return {"args": document}
    return document


def _nodes(node: Any, budget: list[int], depth: int) -> Iterator[dict[Any, Any]]:
    """Every mapping, outermost first; a container is not searched for others."""
    budget[0] -= 1
    if budget[0] < 0 or depth > MOST_DEPTH:
        raise refuse("the manifest of one server", "a larger one", "paste its container alone")
    if isinstance(node, dict):
        yield node
        if not _runs(node):
            for item in node.values():
                yield from _nodes(item, budget, depth + 1)
    elif isinstance(node, list):
        for item in node:
            yield from _nodes(item, budget, depth + 1)


def _runs(node: dict[Any, Any]) -> bool:
    return any(isinstance(node.get(key), str | list) for key in _WORDS)


def _container(node: dict[Any, Any]) -> Container | None:
    if not _runs(node):
        return None
    env = tuple(_environment(node.get("environment", node.get("env"))))
    values = dict(env)
    scripts: list[str] = []
    words: list[Word] = []
    glued: list[str] = []
    for key in _WORDS:
        part = node.get(key)
        if key == "commands" and isinstance(part, list):
            scripts.append("\n".join(str(item) for item in part))
        elif isinstance(part, str):
            scripts.append(part)
        elif isinstance(part, list):
            for item in part[:MAX_WORDS]:
                script = bool(words) and re.fullmatch(r"-[a-z]*c", words[-1].text) is not None
                words.extend(_word(item, values, glued, script=script))
    image = node.get("image")
    return Container(
        words=tuple(words),
        script="\n".join(scripts),
        image=image if isinstance(image, str) else "",
        env=env,
        gpus=_gpus(node),
        glued=tuple(glued),
    )


def _word(item: Any, values: dict[str, str], glued: list[str], *, script: bool) -> Iterator[Word]:
    """A list item as a word, or as those that it was meant to be; a `script` is left to its shell."""
    text = str(item).lower() if isinstance(item, bool) else str(item)
    if script:
        yield Word(re.sub(r"\$\((\w+)\)", r"${\1}", text), 0)
        return
    text = _VARIABLE.sub(lambda match: _value(match, values), text)
    if _PROGRAM.match(text):
        glued.append(text.split()[0])
        yield from (Word(part, 0, part.startswith("-")) for part in text.split())
        return
    match = _GLUED.fullmatch(text)
    if match is None:
        yield Word(text, 0, text.startswith("-"))
        return
    glued.append(match[1])
    yield Word(match[1], 0, dashed=True)
    for part in [match[2]] if match[2].startswith(("{", "[")) else match[2].split():
        yield Word(part.strip("'\""), 0, part.startswith("--"))


def _value(match: re.Match[str], values: dict[str, str]) -> str:
    name = match[1] or match[2] or match[4]
    if name is None:
        return "$"
    return values.get(name) or match[3] or f"${{{name}}}"


def _environment(env: Any) -> Iterator[tuple[str, str]]:
    """Variables: a mapping, `NAME=value`, or name and value, each where the value stands there."""
    if isinstance(env, dict):
        yield from ((str(name), str(value)) for name, value in env.items() if value is not None)
    for item in env if isinstance(env, list) else []:
        if isinstance(item, str) and "=" in item:
            name, _, value = item.partition("=")
            yield name.strip(), value
        elif isinstance(item, dict) and item.get("value") is not None:
            yield str(item.get("name")), str(item["value"])


def _gpus(node: dict[Any, Any]) -> int:
    """GPUs that the container asks for, of Kubernetes or of Compose; 0 where it does not say."""
    resources = _below(node, "resources")
    for part in ("limits", "requests"):
        for name, count in _below(resources, part).items():
            if str(name).endswith("/gpu") and re.fullmatch(r"\d{1,4}", str(count)):
                return int(str(count))
    reserved = _below(_below(_below(node, "deploy"), "resources"), "reservations").get("devices")
    for device in reserved if isinstance(reserved, list) else []:
        row = device if isinstance(device, dict) else {}
        if isinstance(row.get("device_ids"), list):
            return len(row["device_ids"])
        if re.fullmatch(r"\d{1,4}", str(row.get("count"))):
            return int(str(row["count"]))
    return 0


def _below(node: dict[Any, Any], key: str) -> dict[Any, Any]:
    inner = node.get(key)
    return inner if isinstance(inner, dict) else {}
