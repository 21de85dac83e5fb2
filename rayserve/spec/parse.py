"""What is wrong with this cluster.yml, on which line, and what should stand there instead?

Turns the first mistake of a file into one `SpecError`; a file without one becomes a `ClusterSpec`.
"""

from __future__ import annotations

import typing
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from rayserve.documents import Document, Loc, dotted, load_document
from rayserve.errors import SpecError, Where
from rayserve.owned import argument_owner
from rayserve.spec.advice import advice
from rayserve.spec.base import Section
from rayserve.spec.model import SPEC_KEY, ClusterSpec, Endpoint
from rayserve.spec.placeholders import find_placeholder, names, texts
from rayserve.spec.rules import KEY_FILE, first_problem
from rayserve.spec.sections import example, section_advice
from rayserve.spec.words import describe, meaning, meant_key, section_of
from rayserve.veil import holds_secret, may_be_key

KEYS_IN_FILE = (
    "put API keys in a file on every host, one a line, and its path in endpoint.api_key_file: "
    f"`api_key_file: {KEY_FILE}`"
)


def parse_spec(text: str, path: str, *, draft: bool = False) -> ClusterSpec:
    """The spec in the text of a cluster.yml; `path` is for messages.

    `draft`: values may still be the placeholders of `rayserve convert`.

    Raises:
        SpecError: one mistake, the first in the file, with its line and what to write instead.
    """
    document = load_document(text, path)
    _check_top_level(document)
    _check_secrets(document)
    try:
        spec = ClusterSpec.from_document(document)
    except ValidationError as error:
        raise _first_error(error, document) from None
    problem = first_problem(spec)
    if problem is not None:
        where = spec.where(*problem.loc)
        raise SpecError(problem.needed, found=problem.found, do=problem.do, where=where)
    held = None if draft else find_placeholder(spec)
    if held is not None:
        raise _unfilled(*held, spec)
    return spec


def _unfilled(loc: Loc, text: str, spec: ClusterSpec) -> SpecError:
    return SpecError(
        "a value in place of what is left to fill in",
        found=_show(text),
        do=f"write it: {meaning(ClusterSpec, loc)}",
        where=spec.where(*loc),
    )


def _check_top_level(document: Document) -> None:
    keys = list(document.data)
    if keys == [SPEC_KEY] and isinstance(document.data[SPEC_KEY], dict):
        return
    wrong = next((key for key in keys if key != SPEC_KEY), SPEC_KEY)
    owner = argument_owner(wrong)
    found = f"`{wrong}`" if wrong != SPEC_KEY else f"{_show(document.data.get(SPEC_KEY))} under it"
    raise SpecError(
        f"one top-level key, `{SPEC_KEY}`, with the whole spec under it",
        found=found,
        do=f"{owner}, under `{SPEC_KEY}:`"
        if owner
        else f"write everything under `{SPEC_KEY}:`; Ansible's other variables go in other files",
        where=document.where((wrong,)),
    )


def _check_secrets(document: Document) -> None:
    """Refuse a key where it would be read by many, before anything repeats its value."""
    for loc, text in (*names(document.data), *texts(document.data)):
        is_file = loc[-2:] == ("endpoint", "api_key_file")
        if may_be_key(text) if is_file else holds_secret(text):
            raise SpecError(
                f"the path of a file with keys, such as {KEY_FILE}"
                if is_file
                else "no key or password: cluster.yml and plan.yml are read by many",
                found="what has the form of a key, and is not repeated here",
                do=f"{KEYS_IN_FILE}; a token of a hub goes in HF_TOKEN of the shell that plans"
                if is_file or loc[:2] == (SPEC_KEY, "endpoint")
                else "remove it: API keys go in the file that endpoint.api_key_file names, a hub's "
                "token in HF_TOKEN of the shell that plans; weights are staged on the hosts",
                where=document.where(loc),
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
        return _unknown_key(loc, item["input"], section, where)
    if kind == "missing":
        needed = f"`{dotted(loc)}`, {_phrase(field, loc)}"
        do = f"add {example(dotted(loc)) or f'it: {meaning(ClusterSpec, loc)}'}"
        return SpecError(needed, found="nothing", do=do, where=where)
    value = item["input"]
    needed = f"`{dotted(loc)}` to be {_phrase(field, loc)}"
    told = meaning(ClusterSpec, loc)
    do = section_advice(field, dotted(loc), value) or advice(
        field, str(loc[-1]), value, item=_is_item(field, loc), told=told
    )
    return SpecError(needed, found=_show(value), do=do, where=where)


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


def _unknown_key(loc: Loc, value: object, section: type[Section], where: Where) -> SpecError:
    name = str(loc[-1])
    parent = dotted(loc[:-1]) or SPEC_KEY
    close = meant_key(name, value, section)
    elsewhere = _sections_with(name)
    owner = argument_owner(name)
    held = "key" if section is Endpoint else "api_key"
    of_keys = close in ("", "api_key_file")
    # What vLLM calls so may be the key of something else, such as that of a certificate.
    other = owner and "api_key_file" not in owner
    if held in name.lower() and of_keys and not elsewhere and not other:
        # Renamed alone, the key itself would stand where its file should.
        do = KEYS_IN_FILE
    elif owner and (section is ClusterSpec or of_keys):
        do = owner
    elif close:
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
    return describe(field, str(loc[-1]), item=_is_item(field, loc))


def _is_item(field: FieldInfo | None, loc: Loc) -> bool:
    """Whether a location is that of an item in the field's list or mapping."""
    free_key = field is not None and typing.get_origin(field.annotation) is dict and len(loc) > 1
    return free_key or isinstance(loc[-1], int)


def _show(value: Any) -> str:
    text = repr(value) if not isinstance(value, dict | list) else f"a {type(value).__name__}"
    if value is None or isinstance(value, bool):
        text = {None: "nothing", True: "true", False: "false"}[value]
    return text if len(text) <= 80 else text[:77] + "..."
