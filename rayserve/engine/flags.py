"""When did a flag of `vllm serve` exist, and what stands in its place today?

Answered from data/vllm-flags.yml, which says where each date comes from, and from the snapshot of the
pinned release. Between the last release known to have a flag and the first known to lack it nothing
is claimed: the answer is `UNKNOWN`.
"""

from __future__ import annotations

import enum
import functools
import importlib.resources
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from rayserve.engine.arguments import VLLM_VERSION, load_snapshot

COMMAND_LINE_ONLY = {
    "api_server_count": "one",
    "config": "one",
    "grpc": "switch",
    "headless": "switch",
}
"""Flags of the pinned `vllm serve` that are no argument of engine or server, and what they take."""
SHORT = {
    "ac": "attention_config",
    "asc": "api_server_count",
    "cc": "compilation_config",
    "dc": "diffusion_config",
    "dcp": "decode_context_parallel_size",
    "dp": "data_parallel_size",
    "dpa": "data_parallel_address",
    "dpb": "data_parallel_backend",
    "dpe": "data_parallel_external_lb",
    "dph": "data_parallel_hybrid_lb",
    "dpl": "data_parallel_size_local",
    "dpm": "data_parallel_multi_port_external_lb",
    "dpn": "data_parallel_rank",
    "dpp": "data_parallel_rpc_port",
    "dpr": "data_parallel_start_rank",
    "ep": "enable_expert_parallel",
    "n": "nnodes",
    "pcp": "prefill_context_parallel_size",
    "pp": "pipeline_parallel_size",
    "q": "quantization",
    "r": "node_rank",
    "sc": "speculative_config",
    "tp": "tensor_parallel_size",
}
"""The short forms with one dash (vllm/engine/arg_utils.py of 0.32.0)."""
ALIASES = {"model_tag": "model"}
_SWITCH = re.compile(
    r"(enable|disable|use|trust|load_in|return|skip)_|.*_(use_ray|log_balancedness)$|.*_disable_"
    r"|(multi_step_stream_outputs|calculate_kv_scales|flash_attn|enforce_eager)$"
)
_MANY = {"cuda_graph_sizes", "prompt_adapters"}
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_VERSION = re.compile(
    r"v?([0-9]{1,6}(?:\.[0-9]{1,6}){1,3})(?:(a|b|rc)([0-9]{1,6}))?"
    r"(?:\.?post([0-9]{1,6}))?(?:\.?dev([0-9]{1,6}))?(?:\+[\w.-]+)?"
)
_END = 1 << 30


class Presence(enum.StrEnum):
    """Whether a release takes a flag."""

    PRESENT = "present"
    NOT_YET = "not yet"
    GONE = "gone"
    UNKNOWN = "unknown"
    NEVER = "never"


@dataclass(frozen=True, order=True)
class Version:
    """A release of vLLM, ordered as PEP 440 orders releases: 0.7.3 < 0.7.4.dev388 < 0.7.4rc1 < 0.7.4."""

    key: tuple[int, ...]
    text: str = field(default="", compare=False)
    """As it was written: 0.6 and 0.6.0 are one release."""

    @classmethod
    def parse(cls, text: str) -> Version | None:
        """The release in `text`, such as `v0.7.4.dev388+g1234`; None where it is none."""
        match = _VERSION.fullmatch(text.strip())
        if match is None:
            return None
        numbers = [int(part) for part in match[1].split(".")]
        release = (*numbers, *[0] * (4 - len(numbers)))
        dev = int(match[5]) if match[5] else _END
        post = int(match[4]) if match[4] else -1
        if match[2]:
            stage, serial = ["a", "b", "rc"].index(match[2]), int(match[3])
        else:
            stage, serial = (-1 if match[5] and not match[4] else 3), 0
        return cls((*release, stage, serial, post, dev), match[0].lstrip("v"))

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class FlagHistory:
    """What is known of a flag; a date that is not known is empty."""

    name: str
    lacks: str = ""
    """Last release known to lack it before it came."""
    first: str = ""
    """First release known to have it."""
    last: str = ""
    """Last release known to have it."""
    gone: str = ""
    """First release known to lack it after it went."""
    deprecated: str = ""
    """Release that began to warn of it, or the one that will drop it."""
    do: str = ""
    source: str = ""
    certainty: str = "read"
    """`read` in vLLM's own lists or packages, or `reported` in a thread."""
    of: str = ""
    """Another program whose flag it is."""
    never: bool = False
    """In none of the releases whose lists were read."""

    def presence(self, version: str) -> Presence:
        """Whether a release takes the flag; `version` as `Version.parse` reads it."""
        at = Version.parse(version)
        if self.never:
            return Presence.NEVER
        if at is None:
            return Presence.UNKNOWN
        if self.first and at < _version(self.first):
            lacking = bool(self.lacks) and at <= _version(self.lacks)
            return Presence.NOT_YET if lacking else Presence.UNKNOWN
        if self.gone and at >= _version(self.gone):
            return Presence.GONE
        if self.last and at > _version(self.last):
            return Presence.UNKNOWN
        return Presence.PRESENT if self.first else Presence.UNKNOWN


@dataclass(frozen=True)
class Changes:
    """What else changed between releases: rows of data/vllm-flags.yml as they stand there."""

    values: dict[str, dict[str, dict[str, str]]]
    env: dict[str, dict[str, str]]
    defaults: dict[str, dict[str, Any]]
    entry: dict[str, dict[str, str]]
    deprecated: dict[str, dict[str, str]]


@functools.lru_cache(maxsize=1)
def _rows() -> dict[str, Any]:
    text = (
        importlib.resources.files("rayserve").joinpath("data", "vllm-flags.yml").read_text("utf-8")
    )
    rows: dict[str, Any] = yaml.load(text, Loader=_Loader)  # noqa: S506  (a safe loader)
    return rows


@functools.lru_cache(maxsize=64)
def _version(text: str) -> Version:
    found = Version.parse(text)
    assert found is not None, text
    return found


@functools.lru_cache(maxsize=1)
def histories() -> dict[str, FlagHistory]:
    """Every flag that is known of, by vLLM's name with underscores."""
    rows, found = _rows(), {}
    read = releases_read()
    since = {name: release for release, names in rows["since"].items() for name in names}
    dates = {**_arrivals(rows["arrived"]), **rows["dates"]}
    for name in {**load_snapshot().engine, **load_snapshot().frontend, **COMMAND_LINE_ONLY}:
        row = {**dates.get(name, {}), **rows["deprecated"].get(name, {})}
        first = since.get(name, VLLM_VERSION)
        found[name] = FlagHistory(
            name=name,
            lacks=row.get("lacks", _neighbour(read, first, -1)),
            first=row.get("first", first),
            last=VLLM_VERSION,
            gone=row.get("until", ""),
            deprecated=row.get("until", ""),
            do=row.get("do", ""),
            source=row.get("source", "lists of arguments"),
            certainty=row.get("certainty", "read"),
        )
    for name, row in rows["gone"].items():
        first, last = row.get("seen", ("", ""))
        found[name] = FlagHistory(
            name=name,
            lacks=_neighbour(read, first, -1),
            first=first,
            last=row.get("last", last),
            gone=row.get("gone") or _neighbour(read, last, 1),
            deprecated=row.get("deprecated", ""),
            do=row["do"],
            source=row.get("source") or "lists of arguments",
            certainty=row.get("certainty", "read"),
        )
    for name, row in rows["never"].items():
        found[name] = FlagHistory(name=name, never=True, do=row["do"], of=row.get("of", ""))
    return found


def _arrivals(groups: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """What the days of merges say of single flags."""
    source = {"source": "the day that it was merged", "certainty": "reported"}
    return {
        name: {key: group[key] for key in ("lacks", "first") if key in group} | source
        for group in groups
        for name in group["flags"]
    }


def _neighbour(read: list[str], release: str, step: int) -> str:
    """The release before or after one of those whose lists were read."""
    if release not in read:
        return ""
    index = read.index(release) + step
    return read[index] if 0 <= index < len(read) else ""


def releases_read() -> list[str]:
    """The releases whose whole list of flags was read, oldest first; the last one is pinned."""
    return [release for group in _rows()["releases"] for release in group["of"]] + [VLLM_VERSION]


@functools.lru_cache(maxsize=1)
def changes() -> Changes:
    """Values, variables, defaults and ways to start that came or went."""
    rows = _rows()
    return Changes(
        values=rows["values"],
        env=rows["env"],
        defaults=rows["defaults"],
        entry=rows["entry"],
        deprecated=rows["deprecated"],
    )


def arity(name: str) -> str:
    """What follows a flag: `switch` nothing, `one` value, or `many`. A guess for an unknown flag."""
    argument = load_snapshot().find(name)
    if argument is not None:
        if argument.kinds == ("bool",):
            return "switch"
        return "many" if "list" in argument.kinds else "one"
    if name in COMMAND_LINE_ONLY:
        return COMMAND_LINE_ONLY[name]
    if name in _MANY:
        return "many"
    return "switch" if _SWITCH.match(name) else "one"


def resolve(name: str) -> tuple[str, tuple[str, ...]]:
    """The flag that a name means, and the candidates of an abbreviation.

    argparse takes the beginning of a flag for the whole where one flag alone begins so; of the flags
    of the pinned release first, then of those that earlier ones had.
    """
    known = histories()
    name = ALIASES.get(name, name)
    if name in known:
        return name, ()
    begun = [other for other, row in known.items() if other.startswith(name) and not row.never]
    today = [name for name in begun if known[name].presence(VLLM_VERSION) == Presence.PRESENT]
    candidates = tuple(sorted(today or begun))
    return (candidates[0] if len(candidates) == 1 else name), candidates
