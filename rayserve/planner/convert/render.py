"""How is a draft written as a cluster.yml that people read, and a conversion as text?"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from rayserve.planner.convert.draft import Draft, Finding, Placeholder
from rayserve.spec import SPEC_KEY, ClusterSpec

WIDTH = 100
_PLAIN = re.compile(r"[A-Za-z/][\w./424-]*", re.ASCII)
_UNSAFE = re.compile(r"[\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff\ufffe\uffff]")


def cluster_yml(draft: Draft) -> str:
    """The draft as YAML, in the order of the reference, each placeholder marked where it stands."""
    lines = [f"{SPEC_KEY}:", "  name: converted", "  profile: production"]
    for name in ClusterSpec.model_fields:
        if name in draft.spec:
            lines.extend(_section(draft, name))
    return "\n".join(lines) + "\n"


def key_at(text: str, line: int) -> str:
    """The dotted key that stands on a line of `cluster_yml`; empty where none does."""
    found: list[str] = []
    for row in text.splitlines()[:line]:
        match = re.match(r"( *)(?:- )?([\w]+):", row)
        if match is not None:
            found = [*found[: len(match[1]) // 2], match[2]]
    return ".".join(found)


def _section(draft: Draft, name: str) -> Iterator[str]:
    value = draft.spec[name]
    comment = draft.comments.get(name, "")
    if name == "node_pools":
        yield from _pools(draft, value)
    elif isinstance(value, dict):
        yield _line(f"  {name}:", comment)
        for key, item in value.items():
            told = draft.comments.get(f"{name}.{key}", "")
            yield _line(f"    {key}: {_value(item)}", told)
    else:
        yield _line(f"  {name}: {_value(value)}", comment)


def _pools(draft: Draft, pools: list[dict[str, Any]]) -> Iterator[str]:
    held = {item.key: item for item in draft.placeholders}
    yield "  node_pools:"
    for pool in pools:
        mark = "- "
        for key, value in pool.items():
            item = held.get(f"node_pools.{key}")
            told = f"placeholder: {item.why} (give {item.option})" if item is not None else ""
            yield _line(f"    {mark}{key}: {_value(value)}", told)
            mark = "  "


def _line(text: str, comment: str) -> str:
    if not comment:
        return text
    if len(text) + len(comment) + 4 <= WIDTH:
        return f"{text}  # {comment}"
    indent = text[: len(text) - len(text.lstrip(" "))]
    return "\n".join([*_wrap(comment, first=f"{indent}# ", rest=f"{indent}# "), text])


def _value(value: Any) -> str:
    """One value on one line; JSON for what is not plain, since YAML reads JSON."""
    if isinstance(value, str):
        return value if _plain(value) else _quoted(value)
    if isinstance(value, dict):
        inner = (f"{_quoted(str(key))}: {_value(item)}" for key, item in value.items())
        return "{" + ", ".join(inner) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, float):
        return _float(value)
    return json.dumps(value)


def _float(value: float) -> str:
    """A float as YAML 1.1 reads it: JSON's 1e-05 would be text there."""
    return (
        str(int(value))
        if value.is_integer() and abs(value) < 1e15
        else yaml.safe_dump(value).split("\n")[0]
    )


def _plain(text: str) -> bool:
    """Whether YAML reads a bare word as this text."""
    return _PLAIN.fullmatch(text) is not None and isinstance(yaml.safe_load(text), str)


def _quoted(text: str) -> str:
    """Text in double quotes, without what YAML takes for a line's end."""
    plain = json.dumps(text, ensure_ascii=False)
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", plain)


def comments(
    heading: str, findings: Iterable[Finding], placeholders: Iterable[Placeholder]
) -> list[str]:
    """The findings as comments, so that they may stand above the cluster.yml in one file."""
    lines = [*_wrap(heading, first="# ", rest="# "), "#"]
    for finding in findings:
        lines.extend(_wrap(f"{finding.severity:8}{finding.what}", first="# ", rest="#         "))
        basis = "; ".join(part for part in (finding.certainty, finding.source) if part)
        why = finding.why + (f" [{basis}]" if basis else "")
        for label, text in (("why", why.strip()), ("do", finding.do)):
            if text:
                lines.extend(_wrap(f"{label:4}{text}", first="#         ", rest="#             "))
    for item in placeholders:
        option = f" ({item.option})" if item.option else ""
        told = f"{'fill in':8}{item.key}: {item.why}{option}"
        lines.extend(_wrap(told, first="# ", rest="#         "))
    return [*lines, ""]


def _wrap(text: str, *, first: str, rest: str) -> list[str]:
    """Lines of a comment; nothing in the text can end the comment."""
    flat = _UNSAFE.sub(" ", re.sub(r"\s", " ", text))
    return textwrap.wrap(
        flat, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )
