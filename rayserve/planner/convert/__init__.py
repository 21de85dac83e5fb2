"""What is this `vllm serve …` command line as a cluster.yml, and what is wrong with it?

    text ──(engine.commands)──> flags ──(keys, features, images, legacy, model, surroundings)──> draft
         ──(history, price, pairs, shape)──> findings ──(parse_spec)──> a cluster.yml that the toolkit accepts

Nothing is run, looked up or downloaded; a secret is never repeated. What the command line cannot say
is a placeholder, marked where it stands. docs/convert.md has the form of the JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rayserve.engine import VLLM_VERSION
from rayserve.engine.commands import parse_command
from rayserve.engine.flags import Version
from rayserve.errors import SpecError, UsageError
from rayserve.planner.catalogue import CPU, Gpu, gpus, meant
from rayserve.planner.convert import (
    features,
    history,
    images,
    keys,
    legacy,
    model,
    pairs,
    price,
    shape,
    surroundings,
)
from rayserve.planner.convert.draft import (
    BadValueError,
    Context,
    Draft,
    Fate,
    Finding,
    Placeholder,
    Setting,
    excerpt,
    settings,
)
from rayserve.planner.convert.render import cluster_yml, comments, key_at
from rayserve.spec import parse_spec
from rayserve.veil import veiled

FORMAT = 1
"""Version of the JSON form; it grows when a key changes its meaning or goes."""
AIMS = ("latency", "throughput")
ORDER = {"error": 0, "warning": 1, "note": 2}
HANDLERS = {**keys.HANDLERS, **features.HANDLERS, **images.HANDLERS, **legacy.HANDLERS}
MAX_REPAIRS = 40
KEPT = ("name", "node_pools", "model", "endpoint")
"""Sections without which there is no cluster.yml; only keys below them may be taken out."""

__all__ = ["Conversion", "Fate", "Finding", "Placeholder", "convert", "convert_command"]


@dataclass(frozen=True)
class Conversion:
    """A command line as a cluster.yml."""

    program: str
    """`vllm_serve`, `openai_api_server` or `api_server`."""
    started_as: str
    version: str
    """Release that the command line was written for; empty where it is not known."""
    aim: str
    gpu: str
    cluster_yml: str
    findings: tuple[Finding, ...]
    """The gravest first, then by line."""
    placeholders: tuple[Placeholder, ...]
    flags: tuple[Fate, ...]

    def counts(self) -> dict[str, int]:
        """How many findings of each severity."""
        return {word: sum(item.severity == word for item in self.findings) for word in ORDER}

    def as_dict(self) -> dict[str, Any]:
        """The documented JSON form."""
        return {
            "format": FORMAT,
            "program": self.program,
            "started_as": self.started_as,
            "version": self.version,
            "target_version": VLLM_VERSION,
            "aim": self.aim,
            "gpu": self.gpu,
            "counts": self.counts(),
            "findings": [finding.as_dict() for finding in self.findings],
            "placeholders": [asdict(placeholder) for placeholder in self.placeholders],
            "flags": [asdict(fate) for fate in self.flags],
            "cluster_yml": self.cluster_yml,
        }

    def as_text(self) -> str:
        """A cluster.yml with the findings as comments above it."""
        told = ", ".join(f"{n} {word}{'s' * (n != 1)}" for word, n in self.counts().items())
        release = f"vLLM {self.version}" if self.version else "an unknown release of vLLM"
        heading = f"From a command line of `{self.started_as}` for {release}. Findings: {told}."
        return "\n".join([*comments(heading, self.findings, self.placeholders), self.cluster_yml])


SECRET = re.compile(r"key|token|secret|password", re.IGNORECASE)
"""In a word that belongs to no flag: a flag that was quoted together with its value."""


def convert_command(
    text: str,
    *,
    version: str = "",
    aim: str = "",
    gpu: str = "",
    as_json: bool = False,
    hosts: int = 0,
    gpus_per_host: int = 0,
    config: Mapping[str, Any] | None = None,
) -> str:
    """What `rayserve convert` prints: text, or one line of JSON; the arguments are those of `convert`.

    Raises:
        InputError: the text is no command line that starts one vLLM server.
        UsageError: an option has a value that is not one of its own.
    """
    found = convert(
        text,
        version=version,
        aim=aim,
        gpu=gpu,
        hosts=hosts,
        gpus_per_host=gpus_per_host,
        config=config,
    )
    return json.dumps(found.as_dict(), ensure_ascii=False) if as_json else found.as_text()


def convert(
    text: str,
    *,
    version: str = "",
    aim: str = "",
    gpu: str = "",
    hosts: int = 0,
    gpus_per_host: int = 0,
    config: Mapping[str, Any] | None = None,
) -> Conversion:
    """A pasted command line as a cluster.yml, with findings.

    Args:
        text: the command line, as people paste it.
        version: release of vLLM that it was written for; empty: what the text itself says.
        aim: `latency`, `throughput` or empty.
        gpu: GPU model of the catalogue, or cpu; empty: a placeholder.
        hosts: number of hosts; 0: as few as hold the ranks.
        gpus_per_host: GPUs of each; 0: what the command shows, or else the ranks, at most 8.
        config: config.json of the model, for what depends on its shape.

    Raises:
        InputError: the text is no command line that starts one vLLM server.
        UsageError: an option has a value that is not one of its own.
    """
    if aim and aim not in AIMS:
        raise UsageError("an aim", found=repr(aim[:40]), do=f"write one of: {', '.join(AIMS)}")
    card = _gpu(gpu)
    release = _release(version)
    command = parse_command(text)
    context = Context(
        release or _release(command.version), aim, card, hosts, gpus_per_host, config or {}
    )
    draft = Draft(command, context)
    _carry_all(draft)
    model.place_model(draft)
    surroundings.environment(draft)
    surroundings.hosts(draft, gpu)
    surroundings.endpoint(draft)
    surroundings.sampling(draft)
    if aim:
        draft.put("aim", aim)
    history.judge_text(draft)
    price.judge_hardware(draft)
    price.judge_split(draft)
    pairs.judge_pairs(draft)
    images.judge_images(draft)
    architecture = shape.architecture_of(draft)
    price.judge_aim(draft, architecture)
    yml = _accepted(draft)
    shape.judge_shape(draft, parse_spec(yml, "cluster.yml", draft=True), architecture)
    return Conversion(
        program=command.program,
        started_as=command.written(),
        version=str(context.version or ""),
        aim=aim,
        gpu=gpu,
        cluster_yml=yml,
        findings=tuple(sorted(draft.findings, key=lambda item: (ORDER[item.severity], item.line))),
        placeholders=tuple(item for item in draft.placeholders if _stands(draft, item.key)),
        flags=tuple(draft.fates),
    )


def _release(text: str) -> Version | None:
    if not text:
        return None
    release = Version.parse(text)
    if release is None:
        raise UsageError(
            "a release of vLLM", found=repr(text[:40]), do="write it as 0.7.3 or 0.7.4.dev388"
        )
    return release


def _gpu(name: str) -> Gpu | None:
    if not name or name == CPU:
        return None
    known = gpus()
    if name in known:
        return known[name]
    raise UsageError(
        "a GPU model of the catalogue, or cpu", found=repr(name[:40]), do=f"write {meant(name)}"
    )


def _carry_all(draft: Draft) -> None:
    """Judge every flag, and carry it where it belongs."""
    joined, repeated = settings(draft.command.flags)
    draft.given = {setting.name: setting for setting in joined if setting.name}
    candidates = {flag.name: flag.candidates for flag in draft.command.flags}
    for setting in joined:
        if not setting.name:
            continue
        if _readable(draft, setting, candidates[setting.name]):
            history.judge_history(draft, setting)
            _carry(draft, setting)
    hidden = any(setting.secret for setting in joined)
    hidden |= any(SECRET.search(flag.written) for flag in draft.command.flags if not flag.name)
    for flag in draft.command.flags:
        if not flag.name:
            word = "a word" if hidden else f"`{veiled(flag.written)}`"
            draft.find(
                "error",
                "stray_word",
                "",
                word + (f" on line {flag.line}" if flag.line else "") + " belongs to no flag",
                why="vLLM takes one model, and nothing else beside flags",
                do="remove it, or quote what it belongs to",
            )
    for written in sorted(set(repeated)):
        draft.find(
            "warning",
            "repeated",
            written,
            f"{written} stands there more than once",
            why="vLLM takes the last one, and what dots spell out before JSON",
            do="remove the others",
        )


def _readable(draft: Draft, setting: Setting, candidates: tuple[str, ...]) -> bool:
    """Whether the flag's name means one flag; tells of abbreviations and of a missing dash."""
    if len(candidates) > 1:
        draft.find(
            "error",
            "ambiguous",
            setting,
            f"{setting.written} is short for several flags",
            why=f"for {', '.join(candidates[:6])}",
            do="write the whole name",
        )
        draft.leave(setting)
        return False
    if candidates:
        draft.find(
            "note",
            "abbreviated",
            setting,
            f"{setting.written} is short for --{candidates[0].replace('_', '-')}",
            why="a later release may have two flags that begin so",
            do="write the whole name",
        )
    if not setting.written.startswith("--") and len(setting.written) > len("-dcp"):
        draft.find(
            "error",
            "one_dash",
            setting,
            f"{setting.written} has one dash",
            why="vLLM refuses it",
            do=f"write -{setting.written}",
        )
    return True


def _carry(draft: Draft, setting: Setting) -> None:
    handler = HANDLERS.get(setting.name)
    if setting.name in model.FLAGS:
        return
    try:
        if handler is not None:
            handler(draft, setting)
        elif keys.known_today(setting.name):
            keys.engine_argument(draft, setting)
        else:
            draft.leave(setting)
    except BadValueError as error:
        keys.wrong(draft, setting, error)


def _accepted(draft: Draft) -> str:
    """The draft as text that `parse_spec` takes; what it refuses is taken out and told."""
    for _ in range(MAX_REPAIRS):
        text = cluster_yml(draft)
        try:
            parse_spec(text, "cluster.yml", draft=True)
        except SpecError as error:
            _retract(draft, error, text)
        else:
            return text
    raise UsageError(
        "a command line that makes a cluster.yml",
        found=f"more than {MAX_REPAIRS} wrong values",
        do="correct them first",
    )


def _retract(draft: Draft, error: SpecError, text: str) -> None:
    """Take out the key that an error names, or the nearest section above it."""
    where = error.where
    told = (where.key or key_at(text, where.line or 0)) if where is not None else ""
    parts = told.removeprefix("rayserve_cluster.").partition("[")[0].split(".")
    for end in range(len(parts), 0, -1):
        key = ".".join(parts[:end])
        if key in KEPT or draft.get(key) is None:
            continue
        value = draft.drop(key)
        draft.fates = [
            Fate(fate.flag, fate.name, "") if f"{fate.key}.".startswith(f"{key}.") else fate
            for fate in draft.fates
        ]
        draft.find(
            "error",
            "refused",
            "",
            f"`{key}` is left out: {excerpt(str(value))}",
            why=f"cluster.yml needs {error.needed}; found {veiled(error.found)}",
            do=error.do,
        )
        return
    raise error


def _stands(draft: Draft, key: str) -> bool:
    return key.startswith("node_pools.") or draft.get(key) is not None
