"""What is wrong with this cluster.yml, on which line, and what should stand there instead?

Turns the first mistake of a file into one `SpecError`; a file without one becomes a `ClusterSpec`.
"""

from __future__ import annotations

import re
import typing
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from rayserve.documents import Document, Loc, dotted, load_document
from rayserve.errors import SpecError, Where
from rayserve.spec.base import Section
from rayserve.spec.model import SPEC_KEY, ClusterSpec
from rayserve.spec.rules import first_problem
from rayserve.spec.words import convert, describe, meaning, members, nearest, section_of


def parse_spec(text: str, path: str) -> ClusterSpec:
    """The spec in the text of a cluster.yml; `path` is for messages.

    Raises:
        SpecError: one mistake, the first in the file, with its line and what to write instead.
    """
    document = load_document(text, path)
    _check_top_level(document)
    try:
        spec = ClusterSpec.from_document(document)
    except ValidationError as error:
        raise _first_error(error, document) from None
    problem = first_problem(spec)
    if problem is not None:
        where = spec.where(*problem.loc)
        raise SpecError(problem.needed, found=problem.found, do=problem.do, where=where)
    return spec


def _check_top_level(document: Document) -> None:
    keys = list(document.data)
    if keys == [SPEC_KEY] and isinstance(document.data[SPEC_KEY], dict):
        return
    wrong = next((key for key in keys if key != SPEC_KEY), SPEC_KEY)
    found = f"`{wrong}`" if wrong != SPEC_KEY else f"{_show(document.data.get(SPEC_KEY))} under it"
    raise SpecError(
        f"one top-level key, `{SPEC_KEY}`, with the whole spec under it",
        found=found,
        do=f"write everything under `{SPEC_KEY}:`; Ansible's other variables go in other files",
        where=document.where((wrong,)),
    )


def _first_error(error: ValidationError, document: Document) -> SpecError:
    def line(item: Any) -> int:
        return document.where((SPEC_KEY, *item["loc"])).line or 0

    # A missing key has no line of its own; it is told last, since a misspelt one may explain it.
    items = sorted(error.errors(), key=lambda item: (item["type"] == "missing", line(item)))
    item = items[0]
    loc, field, section = _locate(tuple(item["loc"]))
    where = document.where((SPEC_KEY, *loc))
    kind = item["type"]
    if kind == "extra_forbidden":
        return _unknown_key(loc, section, where)
    if kind == "missing":
        needed = f"`{dotted(loc)}`, {_phrase(field, loc)}"
        return SpecError(
            needed, found="nothing", do=f"add it: {meaning(ClusterSpec, loc)}", where=where
        )
    value = item["input"]
    needed = f"`{dotted(loc)}` to be {_phrase(field, loc)}"
    return SpecError(needed, found=_show(value), do=_advice(loc, value, field), where=where)


def _locate(loc: Loc) -> tuple[Loc, FieldInfo | None, type[Section]]:
    """The part of pydantic's location that stands in the file, its field and its section."""
    section: type[Section] = ClusterSpec
    field: FieldInfo | None = None
    for index, part in enumerate(loc):
        if isinstance(part, int):
            continue
        if part not in section.model_fields:
            # An unknown key; or pydantic's name of a branch of a union, below a known field.
            unknown = field is None or section_of(field) is not None
            return loc[: index + 1] if unknown else loc[:index], field, section
        field = section.model_fields[part]
        inner = section_of(field)
        if inner is None:
            # What follows is an index, a free key or a branch of a union.
            rest = loc[index + 1 :]
            items = typing.get_origin(field.annotation) in (list, dict)
            return loc[: index + 1] + (rest[:1] if items else ()), field, section
        section = inner
    return loc, field, section


def _unknown_key(loc: Loc, section: type[Section], where: Where) -> SpecError:
    name = str(loc[-1])
    parent = dotted(loc[:-1]) or SPEC_KEY
    close = nearest(name, section.model_fields)
    elsewhere = _sections_with(name)
    if close:
        do = f"write `{close}`"
    elif elsewhere:
        do = f"write it under `{elsewhere}`"
    else:
        do = f"one of: {', '.join(section.model_fields)}; vLLM's own arguments go in engine_args"
    return SpecError(f"a key that `{parent}` knows", found=f"`{name}`", do=do, where=where)


def _sections_with(name: str) -> str:
    for key, field in ClusterSpec.model_fields.items():
        inner = section_of(field)
        if inner is not None and name in inner.model_fields:
            return key
    return ""


def _phrase(field: FieldInfo | None, loc: Loc) -> str:
    free_key = field is not None and typing.get_origin(field.annotation) is dict and len(loc) > 1
    return describe(field, str(loc[-1]), item=free_key or isinstance(loc[-1], int))


def _advice(loc: Loc, value: Any, field: FieldInfo | None) -> str:
    name = str(loc[-1])
    if isinstance(value, str):
        converted = convert(name, value)
        if converted is not None:
            return f"write {converted:g}" if converted < 1e6 else f"write {converted:.0f}"
        wanted = members(field.annotation) if field is not None else []
        words = [v for m in wanted if typing.get_origin(m) is typing.Literal
                 for v in typing.get_args(m) if isinstance(v, str)]  # fmt: skip
        close = nearest(value, words)
        if close:
            return f"write {close}"
        if "auto" not in words and re.fullmatch(r"-?\d+(\.\d+)?|true|false", value):
            return f"write {value} without quotes"
    takes_text = field is not None and str in members(field.annotation)
    if takes_text and isinstance(value, int | float) and not isinstance(value, bool):
        return f'write "{value}" in quotes'
    if value is None:
        return "write a value, or leave the key out"
    told = meaning(ClusterSpec, loc)
    return f"{name}: {told}" if told else "see docs/reference.md"


def _show(value: Any) -> str:
    text = repr(value) if not isinstance(value, dict | list) else f"a {type(value).__name__}"
    if value is None or isinstance(value, bool):
        text = {None: "nothing", True: "true", False: "false"}[value]
    return text if len(text) <= 80 else text[:77] + "..."
