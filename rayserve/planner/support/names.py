"""Can the modules that a quantization names be matched in no time?

A config.json may name thousands, and after `re:` or `*` any expression. Each is compared with every
module of every layer, so the product is bounded, and so is what one comparison may take.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rayserve.documents import brief
from rayserve.engine.models import UNCHANGED
from rayserve.errors import SpecError, Where

NAME_LISTS = (
    "ignored_layers", "modules_to_not_convert", "ignore", "exclude_modules", "exclude", "targets",
)  # fmt: skip
WHOLE_NAMES = ("fp8", "fbgemm_fp8", "compressed-tensors")
"""Methods that compare plain names whole, which costs nothing."""
MOST_NAMES = 200_000
"""A checkpoint may list every matrix of every expert."""
MOST_GROUPS = 200
MOST_COMPARISONS = 250_000
"""Names that are searched, times layers: 2000 names of 125 layers, or 1000 of 250."""
LONGEST_EXPRESSION = 500
_TOKEN = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|[*+]|\{[\d,]*\}|[\w./-]|.", re.DOTALL)
_SOLID = 2
"""Characters that must stand between two repeats, so that few places of a name fit them."""


def check_names(raw: Mapping[str, Any], prefix: str, where: Where, *, layers: int) -> None:
    """The lists of a quantization_config and of its groups.

    Raises:
        SpecError: to match them would take too long.
    """
    groups = raw.get("config_groups")
    groups = groups if isinstance(groups, Mapping) else {}
    if len(groups) > MOST_GROUPS:
        key = f"{prefix}config_groups"
        raise _error(f"`{key}` of at most {MOST_GROUPS} groups", f"{len(groups)}", where, key)
    whole = raw.get("quant_method") in WHOLE_NAMES or bool(groups)
    searched = 0
    for key, names in _lists(raw, groups, prefix):
        if len(names) > MOST_NAMES:
            raise _error(f"`{key}` of at most {MOST_NAMES} names", f"{len(names)}", where, key)
        searched += len(names) if not whole else sum(_is_pattern(name) for name in names)
        if searched * max(1, layers) > MOST_COMPARISONS:
            most = MOST_COMPARISONS // max(1, layers)
            needed = f"at most {most} names to search for in each of {layers} layers"
            raise _error(needed, f"{searched} in `{key}`", where, key)
        slow = next((name for name in names if name.startswith("re:") and is_slow(name[3:])), "")
        if slow:
            needed = f"regular expressions in `{key}` that are quick to match"
            do = "write it without repeated groups, and with text between repeats"
            raise _error(needed, brief(slow), where, key, do=do)


def is_slow(expression: str) -> bool:
    """Whether a regular expression may take for ever, or is too long to judge.

    A repeated group is slow, and so are two repeats with next to nothing solid between them.
    """
    if len(expression) > LONGEST_EXPRESSION:
        return True
    solid, last = _SOLID, ""
    for token in _TOKEN.findall(expression):
        if token[0] in "*+{" and last:
            solid -= _is_solid(last)
            if last == ")" or solid < _SOLID:
                return True
            solid = 0
        else:
            solid += _is_solid(token)
        last = token
    return False


def _is_solid(token: str) -> bool:
    """Whether a token stands for one character alone."""
    if len(token) == 2:
        return token[0] == "\\" and not token[1].isalnum()
    return len(token) == 1 and (token.isalnum() or token in "_-/")


def _is_pattern(name: str) -> bool:
    return name.startswith("re:") or bool(set(name) & set("*?["))


def _lists(
    raw: Mapping[str, Any], groups: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, list[str]]]:
    """Each list of names with its key; what is no text in it is judged elsewhere."""
    parts = [(prefix, raw)]
    parts += [
        (f"{prefix}config_groups.{label[:40] if label.isprintable() else '?'}.", group)
        for label, group in groups.items()
        if isinstance(group, Mapping)
    ]
    for start, part in parts:
        for name in NAME_LISTS:
            value = part.get(name)
            if isinstance(value, list):
                yield f"{start}{name}", [item for item in value if isinstance(item, str)]


def _error(
    needed: str,
    found: str,
    where: Where,
    key: str,
    *,
    do: str = UNCHANGED,
) -> SpecError:
    return SpecError(needed, found=found[:200], do=do, where=Where(where.path, where.line, key))
