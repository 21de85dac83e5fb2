"""Does the pinned vLLM accept this argument with this value? Answered from the committed snapshot."""

from __future__ import annotations

import functools
import importlib.resources
import json
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rayserve.errors import EngineArgumentError, Where
from rayserve.owned import (
    OWNED_ARGS,
    REMOVED_ARGS,
    REMOVED_ENV,
    REMOVED_KEYS,
    env_owner,
    key_owner,
)
from rayserve.spec import nearest

VLLM_VERSION = "0.32.0"
"""The pin. What is tested is what is deployed."""

KINDS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "list": (list,),
    "dict": (dict,),
}
WORDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "list": "a list",
    "dict": "a mapping",
}

BOUNDS: dict[str, tuple[Callable[[float, float], bool], str]] = {
    "ge": (operator.ge, "at least"),
    "gt": (operator.gt, "more than"),
    "le": (operator.le, "at most"),
    "lt": (operator.lt, "less than"),
}
"""Limits of a number by pydantic's names."""
ASSERTED: dict[str, dict[str, float]] = {"num_gpu_blocks_override": {"ge": 1}}
"""Limits that no field of vLLM's configuration states: BlockPool asserts a block (v1/core/block_pool.py)."""
MOST = 2**63
"""vLLM counts in 64 bits: no number from here on is one of its sizes, and of the largest none can be made."""


@dataclass(frozen=True)
class Argument:
    """One argument of the pinned vLLM."""

    name: str
    kinds: tuple[str, ...]
    choices: tuple[Any, ...]
    keys: frozenset[str] = frozenset()
    """Of a mapping with a closed set of keys: all of them, an inner one as `outer.inner`."""
    bounds: Mapping[str, float] = field(default_factory=dict)
    """Limits of a number: its `BOUNDS`."""

    def accepts(self, value: object) -> bool:
        """Whether type and choices allow the value; `outside` tells of its range."""
        if self.choices and value in self.choices and not isinstance(value, bool):
            return True
        if isinstance(value, bool):
            return "bool" in self.kinds
        fits = any(isinstance(value, KINDS[kind]) for kind in self.kinds if kind != "bool")
        return fits and not (self.choices and not isinstance(value, list | dict))

    def describe(self) -> str:
        """What the argument takes, in words."""
        if self.choices:
            return "one of " + ", ".join(str(choice) for choice in self.choices)
        return " or ".join(WORDS[kind] for kind in self.kinds)

    def outside(self, value: object) -> str:
        """The limit that a number breaks, such as `at least 0`; empty: none."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return ""
        if isinstance(value, float) and not math.isfinite(value):
            return "a finite number"
        for name, bound in self.bounds.items():
            holds, words = BOUNDS[name]
            if not holds(value, bound):
                return f"{words} {bound:g}"
        return "" if abs(value) < MOST else "a size that 64 bits hold"

    def keys_in(self, outer: tuple[str, ...]) -> list[str]:
        """The keys that the mapping under `outer` takes; empty: whatever is written."""
        head = "".join(f"{key}." for key in outer)
        inner = [key.removeprefix(head) for key in self.keys if key.startswith(head)]
        return sorted(key for key in inner if "." not in key)


@dataclass(frozen=True)
class Snapshot:
    """What one version of vLLM accepts."""

    version: str
    engine: dict[str, Argument]
    frontend: dict[str, Argument]
    env: frozenset[str]

    def find(self, name: str) -> Argument | None:
        """The argument of that name, of the engine or of the OpenAI server."""
        return self.engine.get(name) or self.frontend.get(name)

    def choices(self, name: str) -> tuple[Any, ...]:
        """The closed set of values of an argument; empty: not closed."""
        argument = self.find(name)
        return argument.choices if argument is not None else ()


@functools.lru_cache(maxsize=1)
def load_snapshot() -> Snapshot:
    """The snapshot of the pinned version, read once."""
    name = f"vllm-{VLLM_VERSION}-args.json"
    text = importlib.resources.files("rayserve").joinpath("data", name).read_text("utf-8")
    raw = json.loads(text)
    return Snapshot(
        version=raw["vllm_version"],
        engine=_arguments(raw["engine"]),
        frontend=_arguments(raw["frontend"]),
        env=frozenset(raw["env"]),
    )


def _arguments(raw: dict[str, dict[str, Any]]) -> dict[str, Argument]:
    return {
        name: Argument(
            name=name,
            kinds=tuple(entry["kinds"]),
            choices=tuple(entry.get("choices", ())),
            keys=frozenset(entry.get("keys", ())),
            bounds=entry.get("bounds", ASSERTED.get(name, {})),
        )
        for name, entry in raw.items()
    }


def validate(name: str, value: object, where: Where | None = None) -> None:
    """Accept an argument of `engine_args`, or say why not.

    Raises:
        EngineArgumentError: unknown, owned by the toolkit, of the wrong type or choice, or out of range; the
            same of a key inside a mapping, whose own values are checked on the target host.
    """
    plain = name.removeprefix("--").replace("-", "_")
    if plain in OWNED_ARGS:
        raise EngineArgumentError(
            "an argument that the toolkit does not own",
            found=f"`{name}`",
            do=OWNED_ARGS[plain],
            where=where,
        )
    argument = load_snapshot().find(name)
    if argument is None:
        raise EngineArgumentError(
            f"an argument of vLLM {VLLM_VERSION}",
            found=f"`{name}`",
            do=_instead(plain),
            where=where,
        )
    check_value(argument, value, where)
    _check_keys(argument, (), value, where)


def _check_keys(
    argument: Argument, outer: tuple[str, ...], value: object, where: Where | None
) -> None:
    for entry in value if isinstance(value, list) else ():
        _check_keys(argument, outer, entry, where)
    known = argument.keys_in(outer)
    for key, inner in value.items() if isinstance(value, dict) else ():
        path = (*outer, str(key))
        found = f"`{'.'.join((argument.name, *path))}`"
        if owner := key_owner(argument.name, path):
            raise EngineArgumentError(
                "a key that the toolkit does not own", found=found, do=owner, where=where
            )
        if known and key not in known:
            free = [one for one in known if not key_owner(argument.name, (*outer, one))]
            close = nearest(str(key), known)
            do = f"write `{close}`" if close else "one of: " + ", ".join(free)
            if close and (owner := key_owner(argument.name, (*outer, close))):
                do = _owned(close, owner)
            raise EngineArgumentError(
                f"a key that vLLM {VLLM_VERSION} knows",
                found=found,
                do=REMOVED_KEYS.get(found.strip("`"), do),
                where=where,
            )
        _check_keys(argument, path, inner, where)


def check_value(argument: Argument, value: object, where: Where | None = None) -> None:
    """Check type, choice and range alone; the planner's own arguments pass here too.

    Raises:
        EngineArgumentError: the wrong type or choice, or out of range.
    """
    if argument.accepts(value):
        if limit := argument.outside(value):
            raise EngineArgumentError(
                f"`{argument.name}` to be {limit}",
                found=repr(value)[:80],
                do="correct it, or leave it out: vLLM's default applies",
                where=where,
            )
        return
    do = "see `vllm serve --help=" + argument.name + "`"
    if value is None:
        do = "leave it out: vLLM's default applies"
    elif isinstance(value, str) and (close := nearest(value, map(str, argument.choices))):
        do = f"write {close}"
    elif isinstance(value, str) and value.lstrip("-").replace(".", "", 1).isdigit():
        do = f"write {value} without quotes"
    raise EngineArgumentError(
        f"`{argument.name}` to be {argument.describe()}",
        found=repr(value)[:80],
        do=do,
        where=where,
    )


def validate_env(name: str, value: object, where: Where | None = None) -> None:
    """Accept an environment variable of `env`, or say why not.

    Raises:
        EngineArgumentError: owned by the toolkit, a secret, or unknown to vLLM under its prefix.
    """
    owner = env_owner(name)
    if owner:
        raise EngineArgumentError(
            "an environment variable that the toolkit does not own",
            found=f"`{name}`",
            do=owner,
            where=where,
        )
    if not name.replace("_", "").isalnum() or name[:1].isdigit() or not name.isascii():
        raise EngineArgumentError(
            "the name of an environment variable",
            found=repr(name)[:80],
            do="use letters, digits and underscores",
            where=where,
        )
    if name.startswith("VLLM_") and name not in load_snapshot().env:
        close = nearest(name, load_snapshot().env)
        do = f"write `{close}`" if close else "leave it out; vLLM would ignore it"
        if close and (owner := env_owner(close)):
            do = _owned(close, owner)
        raise EngineArgumentError(
            f"a variable that vLLM {VLLM_VERSION} reads",
            found=f"`{name}`",
            do=REMOVED_ENV.get(name, do),
            where=where,
        )
    if "\n" in str(value) or "\0" in str(value):
        raise EngineArgumentError(
            "a value on one line", found=repr(value)[:80], do="remove the line break", where=where
        )


def _owned(name: str, instead: str) -> str:
    """What to do where the name that was meant is the toolkit's own."""
    return f"`{name}`, if that is meant, is the toolkit's own; {instead}"


def _instead(plain: str) -> str:
    known = load_snapshot()
    if known.find(plain) is not None:
        return f"write `{plain}`"
    if plain in REMOVED_ARGS:
        return REMOVED_ARGS[plain]
    close = nearest(plain, [*known.engine, *known.frontend])
    if close in OWNED_ARGS:
        return _owned(close, OWNED_ARGS[close])
    return f"write `{close}`" if close else "leave it out; see data/vllm-*-args.json for all names"
