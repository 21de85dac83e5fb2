"""What should stand there instead of a value in the place of a whole section, or of none at all?"""

from __future__ import annotations

import re
import typing
from typing import Any

from pydantic.fields import FieldInfo

from rayserve.spec.advice import named_on_hub, no_model
from rayserve.spec.base import HF_ID
from rayserve.spec.words import section_of

EXAMPLES = {
    "model": "`model: {path: /srv/models/name, served_name: name, config: config.json}`",
    "node_pools": "`node_pools: [{name: gpu, hosts: 1, gpu: A100-80GB-SXM, gpus_per_host: 8}]`",
}
"""What the sections look like that every spec has."""
MOST_CHARACTERS = 80
"""Of a text that is repeated as a value."""
LONGEST_PAGE = 200
"""Characters of the address of a page, of which the id alone is repeated."""


def example(key: str) -> str:
    """What a section that is missing looks like; empty: it is none that a spec must have."""
    return EXAMPLES.get(key, "")


def section_advice(field: FieldInfo | None, key: str, value: Any) -> str:
    """What to write where a section should stand; empty: no section should, or none is known.

    Args:
        field: what the key takes.
        key: dotted, as `node_pools`.
        value: what stands there.
    """
    section = section_of(field) if field is not None else None
    if section is None or field is None or value is None:
        return ""
    name = key.rpartition(".")[2]
    if typing.get_origin(field.annotation) is list:
        return _items(name, value, section.model_fields)
    if key == "model" and isinstance(value, str) and (told := _model(value.strip())):
        return told
    if key == "replicas" and isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return f"write `replicas: {{min: {value}, max: {value}}}`"
    return f"write a mapping under `{name}:`, with keys of: {', '.join(section.model_fields)}"


def _items(name: str, value: Any, known: typing.Iterable[str]) -> str:
    """Of a list of sections."""
    if name.endswith("]"):
        return f"write a mapping, with keys of: {', '.join(known)}"
    told = f", such as {example(name)}" if example(name) else ""
    named = isinstance(value, dict) and all(isinstance(inner, dict) for inner in value.values())
    if isinstance(value, dict) and not named and value.keys() <= set(known):
        return f"write a list: `- ` before the first key under `{name}:`, the others below that key"
    if isinstance(value, dict):
        return f"write a list: each item after `- `, what names it as its key `name`{told}"
    return f"write a list of mappings, with keys of: {', '.join(known)}{told}"


def _model(text: str) -> str:
    """Of a model that is named alone: an id of a hub or its page, or a folder; empty: it is none."""
    if not 0 < len(text) <= LONGEST_PAGE:
        return ""
    if other := no_model(text):
        return f"write the id of a model: this is a {other}"
    named = (text, "") if re.fullmatch(HF_ID, text) else named_on_hub(text)
    if named is not None and len("".join(named)) <= MOST_CHARACTERS:
        hf_id, revision = named
        at = f", revision: {revision}" if revision else ""
        told = f"write `model: {{hf_id: {hf_id}{at}, served_name: {hf_id.rpartition('/')[2]}}}`"
        return told if revision else f"{told}, in production with its commit as `revision`"
    if "://" in text or len(text) > MOST_CHARACTERS:
        return ""
    folder = text if text.startswith("/") else f"/…/{text.strip('./~')}"
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.rstrip("/").rpartition("/")[2]).strip("-.")
    return (
        f"write `model: {{path: {folder}, served_name: {name or 'chat'}, config: config.json}}`, "
        "or hf_id in place of path and config"
    )
