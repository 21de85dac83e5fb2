"""What is gathered while a command line becomes a cluster.yml? The draft, and values read from words."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rayserve.engine import Snapshot, load_snapshot
from rayserve.engine.commands import Command
from rayserve.engine.flags import Version
from rayserve.engine.parser import Flag
from rayserve.planner.catalogue import Gpu
from rayserve.veil import HIDDEN, veiled

Severity = Literal["error", "warning", "note"]
SECRET = re.compile(
    r"api_?key|secret|passw|hf_token|auth_token|access_token|credential|access_key|bearer",
    re.IGNORECASE,
)
MOST_SHOWN = 60
"""Characters of a text of the command that a message repeats."""
HUMAN_INTS = {
    "max_model_len", "max_num_batched_tokens", "max_num_scheduled_tokens", "kv_cache_memory_bytes",
    "safetensors_prefetch_block_size", "max_num_queued_tokens",
}  # fmt: skip
"""Whole numbers that vLLM lets people write as 32k (1,000) or 32K (1,024)."""
_SUFFIX = {
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}


@dataclass(frozen=True)
class Finding:
    """Something that a person should know about the command line."""

    severity: Severity
    """error: the command does not start, or not as meant; warning: it starts, at a price; note."""
    kind: str
    flag: str
    """As it was written; empty where no single flag is meant."""
    what: str
    why: str = ""
    do: str = ""
    line: int = 0
    """Line of the text, 1-based; 0 where none is meant."""
    certainty: str = ""
    """read, reported, measured, computed, or empty for a rule of the toolkit's own."""
    source: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Placeholder:
    """A value that the command line cannot say."""

    key: str
    value: Any
    why: str
    option: str
    """The option of `rayserve convert` that gives it; empty where there is none."""


@dataclass(frozen=True)
class Fate:
    """What became of a flag: the key of cluster.yml that carries it now; empty: left out."""

    flag: str
    name: str
    key: str


@dataclass(frozen=True)
class Context:
    """What is known beside the command line."""

    version: Version | None
    aim: str
    gpu: Gpu | None
    hosts: int
    gpus_per_host: int
    config: Mapping[str, Any]
    """config.json of the model; empty where it is not given."""


@dataclass(frozen=True)
class Setting:
    """A flag with all that the command line says of it: repeated and dotted ones are joined."""

    name: str
    written: str
    values: tuple[str, ...]
    line: int
    negated: bool = False
    tree: Mapping[str, Any] | None = None
    """What dotted flags spell out."""

    @property
    def text(self) -> str:
        """Its value where it has one."""
        return self.values[-1] if self.values else ""

    @property
    def secret(self) -> bool:
        """Whether its value must not be shown."""
        return SECRET.search(self.name) is not None


class BadValueError(Exception):
    """A value that vLLM would not take: what it should be."""

    def __init__(self, needed: str, do: str = "") -> None:
        super().__init__(needed)
        self.needed = needed
        self.do = do


@dataclass
class Draft:
    """The cluster.yml that comes into being."""

    command: Command
    context: Context
    spec: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    placeholders: list[Placeholder] = field(default_factory=list)
    fates: list[Fate] = field(default_factory=list)
    given: dict[str, Setting] = field(default_factory=dict)

    def put(self, key: str, value: Any, comment: str = "") -> None:
        """Set a dotted key, such as `limits.max_model_len`."""
        *parents, last = key.split(".")
        node = self.spec
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
        if comment:
            self.comments[key] = comment

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a dotted key."""
        node: Any = self.spec
        for part in key.split("."):
            if not isinstance(node, dict) or part not in node:
                return default
            node = node[part]
        return node

    def drop(self, key: str) -> Any:
        """Remove a dotted key and the sections that it leaves empty."""
        *parents, last = key.split(".")
        nodes = [self.spec]
        for parent in parents:
            if not isinstance(nodes[-1].get(parent), dict):
                return None
            nodes.append(nodes[-1][parent])
        value = nodes[-1].pop(last, None)
        for parent, node in zip(reversed(parents), reversed(nodes[:-1]), strict=True):
            if not node[parent]:
                del node[parent]
        return value

    def carry(self, setting: Setting, key: str, value: Any, comment: str = "") -> None:
        """Set a key from a flag, and remember that it is carried there."""
        self.put(key, value, comment)
        self.fates.append(Fate(setting.written, setting.name, key))

    def leave(self, setting: Setting) -> None:
        """Remember that a flag is carried nowhere."""
        self.fates.append(Fate(setting.written, setting.name, ""))

    def hold(self, key: str, value: Any, why: str, option: str = "") -> None:
        """Set a placeholder, marked where it stands."""
        self.put(key, value, f"placeholder: {why}" + (f" (give {option})" if option else ""))
        self.placeholders.append(Placeholder(key, value, why, option))

    def find(
        self, severity: Severity, kind: str, of: Setting | str, what: str, **more: str
    ) -> None:
        """Add a finding about a flag, or about the text where `of` is a word."""
        flag, line = (of, 0) if isinstance(of, str) else (of.written, of.line)
        self.findings.append(Finding(severity, kind, flag, what, line=line, **more))

    def before(self, release: str) -> bool:
        """Whether the command line is known to be written for an older release."""
        limit = Version.parse(release)
        return (
            limit is not None and self.context.version is not None and self.context.version < limit
        )


def settings(flags: tuple[Flag, ...]) -> tuple[list[Setting], list[str]]:
    """The flags joined by name, in order, and those that take the place of an earlier one."""
    joined: dict[str, Setting] = {}
    repeated: list[str] = []
    for flag in flags:
        old = joined.get(flag.name)
        listed = flag.name in {"lora_modules", "middleware"}
        spelled = dict(old.tree or {}) if old is not None else {}
        twice = old is not None and not listed and flag.name != ""
        if flag.path:
            replaced = _graft(spelled, flag.path, flag.values[-1] if flag.values else "true")
            twice = twice and (replaced or (old is not None and old.tree is None))
            joined[flag.name] = Setting(flag.name, flag.written, (), flag.line, tree=spelled)
        elif not spelled:  # vLLM reads what dots spell out last, so JSON beside it is undone
            values = (*old.values, *flag.values) if old is not None and listed else flag.values
            joined[flag.name] = Setting(flag.name, flag.written, values, flag.line, flag.negated)
        if twice:
            repeated.append(flag.written)
    return list(joined.values()), repeated


def _graft(tree: dict[str, Any], path: tuple[str, ...], text: str) -> bool:
    """Add what a dotted flag spells out; whether it takes the place of what stood there."""
    *parents, last = path
    value: Any
    if last.endswith("[]"):
        last, value = last[:-2], [_loose(item) for item in text.split(",")]
    else:
        value = _loose(text)
    for key in reversed([*parents, last]):
        value = {key: value}
    return _merge(tree, value)


def _merge(tree: dict[str, Any], more: Mapping[str, Any]) -> bool:
    """Join as vLLM's recursive_dict_update does: mappings by key, lists end to end, else the later."""
    replaced = False
    for key, value in more.items():
        old = tree.get(key)
        if isinstance(old, dict) and isinstance(value, Mapping):
            tree[key] = dict(old)
            replaced |= _merge(tree[key], value)
        elif isinstance(old, list) and isinstance(value, list):
            tree[key] = [*old, *value]
        else:
            replaced |= key in tree
            tree[key] = value
    return replaced


def _loose(text: str) -> Any:
    """JSON where it is, else a number with a suffix, else text: as vLLM reads a dotted flag."""
    try:
        return json.loads(text)
    except ValueError:
        return whole(text, human=True) if re.fullmatch(r"\d+(\.\d+)?[kKmMgGtT]", text) else text


def whole(text: str, *, human: bool) -> int:
    """A whole number, also with a suffix where `human`.

    Raises:
        BadValueError: it is none.
    """
    plain = text.strip().replace("_", "")
    if re.fullmatch(r"[-+]?\d{1,18}", plain):
        return int(plain)
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?)([kKmMgGtT])", plain)
    if match is None:
        grouped = re.fullmatch(r"\d{1,3}(?:[,.' ]\d{3}){1,4}", plain)
        hint = f"write {re.sub('[^0-9]', '', plain)}" if grouped else ""
        raise BadValueError("a whole number", hint)
    if not human:
        number = f"{float(match[1]) * _SUFFIX[match[2]]:.0f}"
        raise BadValueError("a whole number without a suffix", f"write {number}")
    if match[2].isupper() and "." in match[1]:
        raise BadValueError(
            "a whole number before a capital suffix", f"write {match[1]}{match[2].lower()}"
        )
    return int(float(match[1]) * _SUFFIX[match[2]])


def number(text: str) -> float:
    """A finite number.

    Raises:
        BadValueError: it is none.
    """
    try:
        value = float(text)
    except ValueError:
        percent = re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?)\s*%", text.strip())
        comma = re.fullmatch(r"(\d{1,9}),(\d{1,9})", text.strip())
        hint = f"write {float(percent[1]) / 100:g}" if percent else ""
        hint = f"write {comma[1]}.{comma[2]}" if comma else hint
        raise BadValueError("a number", hint) from None
    if value != value or value in (float("inf"), float("-inf")):  # noqa: PLR0124  (NaN)
        raise BadValueError("a finite number")
    return value


def switch(setting: Setting) -> bool:
    """What a switch is set to.

    Raises:
        BadValueError: it was given a value that is neither true nor false.
    """
    word = setting.text.lower()
    if word not in {"", "true", "false", "1", "0"}:
        raise BadValueError("no value, or `--no-…` to turn it off")
    return (word not in {"false", "0"}) != setting.negated


def mapping(setting: Setting) -> dict[str, Any]:
    """The JSON object of a flag, or what dotted flags spell out.

    Raises:
        BadValueError: it is no JSON object.
    """
    if setting.tree is not None:
        return dict(setting.tree)
    try:
        found = json.loads(setting.text)
    except (ValueError, RecursionError):
        hint = "JSON takes double quotes: '{\"key\": 1}'" if "'" in setting.text else ""
        raise BadValueError("a JSON object", hint) from None
    if not isinstance(found, dict):
        raise BadValueError("a JSON object")
    return found


def typed(setting: Setting) -> Any:
    """The value of a flag that the pinned vLLM has, in the type that it takes.

    Raises:
        BadValueError: the words do not make such a value.
    """
    argument = _snapshot().find(setting.name)
    kinds = argument.kinds if argument is not None else ("str",)
    if kinds == ("bool",):
        return switch(setting)
    if "list" in kinds and not (len(setting.values) == 1 and "str" in kinds):
        return _items(setting)
    if not setting.values and setting.tree is None:
        raise BadValueError("a value")
    if "dict" in kinds and (setting.tree is not None or "str" not in kinds):
        return mapping(setting)
    if "int" in kinds:
        return whole(setting.text, human=setting.name in HUMAN_INTS)
    if "float" in kinds:
        return number(setting.text)
    return setting.text


def _items(setting: Setting) -> list[Any]:
    if len(setting.values) == 1 and setting.text.startswith("["):
        try:
            found = json.loads(setting.text)
        except (ValueError, RecursionError):
            raise BadValueError("a list") from None
        if isinstance(found, list):
            return found
    if not setting.values:
        raise BadValueError("at least one value")
    if all(re.fullmatch(r"\d{1,15}", item) for item in setting.values):
        return [int(item) for item in setting.values]
    return list(setting.values)


def _snapshot() -> Snapshot:
    return load_snapshot()


def shown(setting: Setting) -> str:
    """A value as a message may show it: short, and never a secret."""
    if setting.secret:
        return HIDDEN
    text = " ".join(setting.values) if setting.tree is None else json.dumps(dict(setting.tree))
    return excerpt(text)


def excerpt(text: str) -> str:
    """A text as a message may show it: masked before it is cut, since a cut key has no longer its form.

    What no screen shows, such as a mark that turns the direction of a text, is written as its escape.
    """
    plain = "".join(
        char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in veiled(text)
    )
    return plain if len(plain) <= MOST_SHOWN else plain[: MOST_SHOWN - 1] + "…"
