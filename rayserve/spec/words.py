"""How is a field of the spec told to a person: what it takes, what it means, which unit it has?"""

from __future__ import annotations

import difflib
import math
import re
import types
import typing
from collections.abc import Iterable
from typing import Any

import annotated_types
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from rayserve.described import descriptions
from rayserve.spec.base import PATTERNS, Section

SECONDS: dict[str, float] = {"ms": 0.001, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600}
BYTES: dict[str, float] = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "k": 2**10, "m": 2**20, "g": 2**30,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
RATES: dict[str, float] = {"mb/s": 10**6, "gb/s": 10**9, "mib/s": 2**20, "gib/s": 2**30}
UNITS: dict[str, tuple[str, dict[str, float], float]] = {
    "_gb_s": ("GB/s", RATES, 10**9),
    "_s": ("seconds", SECONDS, 1),
    "_ms": ("milliseconds", SECONDS, 0.001),
    "_mib": ("MiB", BYTES, 2**20),
    "_gib": ("GiB", BYTES, 2**30),
    "_bytes": ("bytes", BYTES, 1),
    "_len": ("tokens", {"k": 1024, "m": 2**20}, 1),
    "_tokens": ("tokens", {"k": 1024, "m": 2**20}, 1),
}
"""By the end of a key's name, the first that fits: its unit, how else that is written, and its size."""


WHOLE = 100
"""From here on, a size in MiB or GiB is told without decimals."""


def nearest(name: str, names: Iterable[str]) -> str:
    """The most alike of `names`, or an empty string."""
    known = list(names)
    beginnings = [item for item in known if name and item.startswith(name)]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.72)
    return close[0] if close else beginnings[0] if len(beginnings) == 1 else ""


def meant_key(name: str, value: object, section: type[Section]) -> str:
    """The key of a section that an unknown one was to be: alike, or the only one with that word in it.

    Of several the one whose type takes the value: `gpus: 8` is `gpus_per_host`, not the text `gpu`.
    """
    fields = section.model_fields
    near = nearest(name, fields)
    parts = set(name.lower().split("_"))
    holding = [key for key in fields if parts <= set(key.split("_")) and _takes(fields[key], value)]
    if near and (_takes(fields[near], value) or len(holding) != 1):
        return near
    return holding[0] if len(holding) == 1 else ""


def _takes(field: FieldInfo, value: object) -> bool:
    """Whether a field's type takes a value; its bounds are told when the key is right."""
    try:
        TypeAdapter[Any](field.annotation or Any).validate_python(value)
    except ValidationError:
        return False
    return True


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section that a field holds, alone or in a list; None for a plain value."""
    for member in members(field.annotation):
        leaf = typing.get_args(member)[0] if typing.get_origin(member) is list else member
        if isinstance(leaf, type) and issubclass(leaf, Section):
            return leaf
    return None


def members(hint: Any) -> list[Any]:
    """The branches of a union, without what is annotated to them."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return members(typing.get_args(hint)[0])
    if origin in (typing.Union, types.UnionType):
        return [inner for arg in typing.get_args(hint) for inner in members(arg)]
    return [hint]


def describe(field: FieldInfo | None, name: str, *, item: bool = False) -> str:
    """What a field takes: type, unit of its name, bounds. `item`: of an item in it."""
    if field is None:
        return "a mapping"
    hints, metadata = leaves(field, item=item)
    phrases = []
    for member in hints:
        if typing.get_origin(member) is typing.Literal:
            phrases += [str(value) for value in typing.get_args(member)]
        elif member is not type(None):
            phrases.append(_type_phrase(member, metadata, name))
    return " or ".join(dict.fromkeys(phrases))


def leaves(field: FieldInfo | None, *, item: bool = False) -> tuple[list[Any], list[Any]]:
    """The types that a field takes, and their bounds and patterns; `item`: of an item in it."""
    if field is None:
        return [], []
    metadata = list(field.metadata)
    hint = field.annotation
    if item and typing.get_origin(hint) in (list, dict):
        hint = typing.get_args(hint)[-1]
    return _flat(hint, metadata), metadata


def _flat(hint: Any, metadata: list[Any]) -> list[Any]:
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        inner, *extra = typing.get_args(hint)
        for item in extra:
            metadata.extend(item.metadata if isinstance(item, FieldInfo) else [item])
        return _flat(inner, metadata)
    if origin in (typing.Union, types.UnionType):
        return [leaf for arg in typing.get_args(hint) for leaf in _flat(arg, metadata)]
    return [hint]


def _type_phrase(member: Any, metadata: list[Any], name: str) -> str:
    origin = typing.get_origin(member) or member
    if origin is bool:
        return "true or false"
    if origin in (int, float):
        noun = "a whole number" if origin is int else "a number"
        unit = next((f" of {unit[0]}" for end, unit in UNITS.items() if name.endswith(end)), "")
        return noun + unit + _bounds(metadata)
    if origin is str:
        return "text" + _pattern(metadata)
    if origin is list:
        return "a list"
    return "a mapping"


def _bounds(metadata: list[Any]) -> str:
    words = {annotated_types.Ge: "ge", annotated_types.Gt: "gt", annotated_types.Le: "le",
             annotated_types.Lt: "lt"}  # fmt: skip
    texts = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    found = [(words[type(item)], item) for item in metadata if type(item) in words]
    parts = [f"{texts[word]} {getattr(item, word)}" for word, item in found]
    return f", {' and '.join(parts)}" if parts else ""


def _pattern(metadata: list[Any]) -> str:
    for item in metadata:
        pattern = getattr(item, "pattern", None)
        if pattern:
            return f" {PATTERNS[pattern]}"
        if getattr(item, "min_length", None):
            return " that is not empty"
    return ""


def meaning(section: type[Section], loc: Iterable[str | int]) -> str:
    """The first sentence on the field at a place below `section`; of the last field above it else."""
    text = ""
    for name in loc:
        if isinstance(name, int):
            continue
        if name not in section.model_fields:
            break
        text = descriptions(section).get(name, "")
        inner = section_of(section.model_fields[name])
        if inner is None:
            break
        section = inner
    return text.replace("\n", " ").partition(". ")[0].rstrip(".")


def convert(name: str, text: str) -> float | None:
    """A number with a unit ("30s", "80GB") in the unit that the key's name ends with."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+(?:/s)?)\s*", text)
    if match is None:
        return None
    for ending, (_, factors, base) in UNITS.items():
        if name.endswith(ending) and match[2].lower() in factors:
            number = float(match[1]) * factors[match[2].lower()] / base
            # A decimal unit in a binary one has digits that nobody means; down, since sizes are limits.
            return math.floor(number) if factors is BYTES and number >= WHOLE else round(number, 3)
    return None
