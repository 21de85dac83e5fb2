"""What should stand there instead of a value that its key does not take?

The nearest value that it does take where one can be told, else what kinds of values it takes.
"""

from __future__ import annotations

import re
import typing
from dataclasses import dataclass
from typing import Any

import annotated_types
from pydantic.fields import FieldInfo

from rayserve.spec.base import COMMIT, HF_ID, PATTERNS
from rayserve.spec.words import convert, describe, leaves, nearest

SYNONYMS = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
}
"""Words of other tools, PyTorch's and vLLM's among them, and ours."""
NUMBER = re.compile(r"[-+]?\d+(\.\d+)?([eE][-+]?\d+)?")
GROUPED = re.compile(r"\d{1,3}([,' ]\d{3})+")
MOST = 2.0**63
"""Beyond it no number is taken."""
PAGE = re.compile(
    r"(?:https?://)?(?:[\w-]+\.)+[a-z]{2,}(?::\d+)?/([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:/(?:tree|blob|commit|resolve)/([\w.-]+))?"
)
"""The page of a model on a hub, the id in its address, and the revision."""
PINNED = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)[@:]([\w.-]+)")
"""An id with its revision, as other tools take them together."""
NO_MODEL = re.compile(
    r"(?:(?:https?://)?(?:[\w-]+\.)+[a-z]{2,}(?::\d+)?/)?(dataset|space)s/[\w.-]+/[\w.-]+.*"
)
"""What a hub has besides models."""
PERCENT = re.compile(r"(\d+(?:\.\d+)?) ?%")


@dataclass(frozen=True)
class Takes:
    """What a key takes, and what it has where it is left out."""

    name: str
    kinds: tuple[Any, ...]
    words: tuple[str, ...]
    numbers: tuple[int, ...]
    """Where only some are taken."""
    metadata: tuple[Any, ...]
    default: Any

    @classmethod
    def of(cls, field: FieldInfo | None, name: str, *, item: bool) -> Takes:
        """Of a field of the spec; `item`: of an item in its list or mapping."""
        hints, metadata = leaves(field, item=item)
        choices = [hint for hint in hints if typing.get_origin(hint) is typing.Literal]
        literals = [value for hint in choices for value in typing.get_args(hint)]
        kinds = [typing.get_origin(hint) or hint for hint in hints if hint not in choices]
        kinds += [type(value) for value in literals]
        words = tuple(value for value in literals if isinstance(value, str))
        numbers = tuple(value for value in literals if isinstance(value, int))
        default = field.default if field is not None and not item else None
        return cls(name, tuple(kinds), words, numbers, tuple(metadata), default)

    @property
    def pattern(self) -> str | None:
        """What its text must match; None: it may be any."""
        return next((p for i in self.metadata if (p := getattr(i, "pattern", None))), None)

    @property
    def number(self) -> type[int | float] | None:
        """The kind of its numbers; None: it takes none."""
        return float if float in self.kinds else int if int in self.kinds else None

    def fits(self, value: float) -> bool:
        """Whether a number is taken: within the bounds, and whole or one of some where it must be."""
        if self.numbers:
            return value in self.numbers
        whole = self.number is float or float(value).is_integer()
        return whole and not any(self._broken(value))

    def _broken(self, value: float) -> typing.Iterator[tuple[str, float]]:
        """The bounds that a number breaks, in words."""
        for item in self.metadata:
            if isinstance(item, annotated_types.Ge) and value < item.ge:  # type: ignore[operator]
                yield "at least", item.ge  # type: ignore[misc]
            elif isinstance(item, annotated_types.Le) and value > item.le:  # type: ignore[operator]
                yield "at most", item.le  # type: ignore[misc]
            elif isinstance(item, annotated_types.Gt) and value <= item.gt:  # type: ignore[operator]
                yield "more than", item.gt  # type: ignore[misc]
            elif isinstance(item, annotated_types.Lt) and value >= item.lt:  # type: ignore[operator]
                yield "less than", item.lt  # type: ignore[misc]

    def beyond(self, value: float) -> str:
        """The bound that a number breaks, as something to write; empty: none."""
        told = next((f"{words} {_shown(bound)}" for words, bound in self._broken(value)), "")
        if not told:
            return ""
        usual = self.default
        if isinstance(usual, str) and usual in self.words:
            return f"{usual}, or {told}"
        sound = isinstance(usual, int | float) and not isinstance(usual, bool) and self.fits(usual)
        return f"{told}, such as {_shown(usual)}" if sound and usual else told


def advice(field: FieldInfo | None, name: str, value: Any, *, item: bool, told: str) -> str:
    """What to write in place of `value`.

    Args:
        field: what the key takes; None: nothing is known of it.
        name: of the key, whose ending tells a unit.
        value: what stands there.
        item: it stands in the field's list or mapping.
        told: what the key means.
    """
    takes = Takes.of(field, name, item=item)
    if value is None:
        return "write a value, or leave the key out"
    if isinstance(value, str):
        if takes.pattern == HF_ID and (other := no_model(value)):
            return f"write the id of a model: this is a {other}"
        found = _for_text(takes, value)
    elif isinstance(value, int | float):
        found = _for_number(takes, value)
    else:
        found = ""
    return f"write {found or _kinds(takes, describe(field, name, item=item), told)}"


def named_on_hub(text: str) -> tuple[str, str] | None:
    """(id, revision or empty) of a model's page, or of an id with its revision; None: it is neither."""
    plain = text.strip()
    named = PAGE.match(plain) or PINNED.fullmatch(plain)
    if named is None:
        return None
    revision = named[2] or ""
    return named[1], revision.lower() if COMMIT.fullmatch(revision.lower()) else revision


def no_model(text: str) -> str:
    """What a hub's page is of instead of a model, as `dataset`; empty: it may be of one."""
    other = NO_MODEL.fullmatch(text.strip())
    return other[1] if other else ""


def _for_text(takes: Takes, text: str) -> str:
    number = _number(takes, text)
    if number is not None:
        if not takes.fits(number):
            return takes.beyond(number)
        return _shown(number) + (" without quotes" if NUMBER.fullmatch(text.strip()) else "")
    low = text.strip().lower()
    if bool in takes.kinds and low in ("true", "yes", "on", "false", "no", "off"):
        return f"{'true' if low in ('true', 'yes', 'on') else 'false'} without quotes"
    synonym = SYNONYMS.get(low, "")
    known = {word.lower(): word for word in takes.words}
    close = known.get(synonym) or known.get(nearest(low, known), "")
    return close or _matching(takes, text)


def _number(takes: Takes, text: str) -> float | None:
    """The number that a text means where one is taken."""
    plain = text.strip()
    if takes.number is None:
        return None
    converted = convert(takes.name, plain)
    percent = PERCENT.fullmatch(plain)
    if percent is not None:
        converted = float(percent[1]) / 100
    elif GROUPED.fullmatch(plain):
        converted = float(re.sub(r"\D", "", plain))
    elif NUMBER.fullmatch(plain):
        converted = float(plain)
    return converted if converted is not None and abs(converted) < MOST else None


def _for_number(takes: Takes, value: float) -> str:
    if isinstance(value, bool):
        return ""
    if takes.number is None:
        return f'"{value}" in quotes' if str in takes.kinds else ""
    if takes.fits(value):
        return _shown(value)
    most = next((i.le for i in takes.metadata if isinstance(i, annotated_types.Le)), None)
    if most is not None and 0 < most <= 1 < value and takes.fits(value / 100):  # type: ignore[operator]
        return _shown(value / 100)  # a share, written in percent
    told = takes.beyond(value)
    if told or takes.numbers:
        return told
    whole = round(value)
    return f"a whole number, such as {whole}" if takes.fits(whole) else takes.beyond(whole)


def _matching(takes: Takes, text: str) -> str:
    """The text without what the key's pattern does not take; empty where that is no name either."""
    pattern = takes.pattern
    if pattern not in PATTERNS:
        return ""
    if pattern == HF_ID and (named := named_on_hub(text)):
        name, revision = named
        return f"{name}, with `revision: {revision}` beside it" if revision else name
    near = re.sub(r"[^A-Za-z0-9._/-]+", "-", text).strip("-._/")
    for kept in (near, near.lower()):
        # Letters are lowered before others than them are taken out, so that none is lost.
        for fitting in (kept, re.sub(r"[^a-z0-9]+", "-", kept.lower()).strip("-")):
            if re.fullmatch(pattern, fitting) and fitting:
                return fitting
    return ""


def _kinds(takes: Takes, told: str, meaning: str) -> str:
    if takes.kinds == (list,):
        return "a list: each item on a line of its own, after `- `"
    if set(takes.kinds) <= {str} and takes.words:
        told = ", ".join(takes.words[:-1]) + f" or {takes.words[-1]}"
    return f"{told}: {meaning}" if meaning else told


def _shown(value: float) -> str:
    """A number in plain decimal, as a spec takes it."""
    return str(int(value)) if float(value).is_integer() else f"{value:.6f}".rstrip("0")
