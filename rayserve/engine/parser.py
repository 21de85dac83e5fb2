"""How does vLLM's own parser read the words after `vllm serve`?

argparse with extras: underscores count as hyphens, `--flag.key value` builds JSON, `-O3` is
`--optimization-level 3`, and the beginning of a flag stands for it where no other begins so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from rayserve.engine.flags import SHORT, arity, histories, resolve
from rayserve.engine.shell import Word, refuse

MAX_FLAGS = 250
HELP = {"--help", "-h", "--version", "-v"}
_BOOLEANS = {"true", "false"}
_GLUED_SECRET = re.compile(r"(--?[\w-]*?(?:api[-_]?key|token|secret|password))[\w.-]+")


@dataclass(frozen=True)
class Flag:
    """One flag as it was written; `name` is vLLM's own, with underscores and in full."""

    name: str
    """Empty for a word that belongs to no flag; it stands in `written`."""
    written: str
    values: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    """Keys below it, of `--compilation-config.mode 3`."""
    negated: bool = False
    """`--no-…`."""
    line: int = 1
    candidates: tuple[str, ...] = ()
    """What its abbreviation could mean."""


def read_arguments(words: list[Word]) -> tuple[str, list[Flag]]:
    """The positional model and the flags.

    Raises:
        InputError: more flags than a command line has.
    """
    flags: list[Flag] = []
    model, index = "", 0
    while index < len(words):
        word = words[index]
        index += 1
        if word.text == "--" and word.dashed:
            continue
        if not _is_flag(word):
            if not model:
                model = word.text
            else:
                flags.append(Flag("", word.text[:80], line=word.line))
            continue
        if word.text in HELP:
            raise refuse(
                "a command that starts a server",
                f"`{word.text}`, which only tells",
                "leave it out",
                word.line,
            )
        flag, inline = _flag(word)
        values = [inline] if inline is not None else _values(flag, words[index:])
        index += 0 if inline is not None else len(values)
        if flag.name == "optimization_level" and values and values[0].startswith("{"):
            flag = replace(flag, name="compilation_config")  # -O took JSON before it took a level
        flags.append(replace(flag, values=tuple(values)))
        if len(flags) > MAX_FLAGS:
            raise refuse(f"at most {MAX_FLAGS} flags", "more", "paste the command alone", word.line)
    return model, flags


def _values(flag: Flag, words: list[Word]) -> list[str]:
    """The words that follow a flag and belong to it."""
    kind = "one" if flag.path else arity(flag.name)
    limit = {"switch": 0, "one": 1, "many": len(words)}[kind]
    found: list[str] = []
    for word in words[:limit]:
        if _is_flag(word):
            break
        found.append(word.text)
    if kind == "switch" and words and words[0].text.lower() in _BOOLEANS:
        found.append(words[0].text)
    return found


def _is_flag(word: Word) -> bool:
    return word.dashed and re.fullmatch(r"-\d.*|-", word.text, re.DOTALL) is None


def _flag(word: Word) -> tuple[Flag, str | None]:
    """A flag and the value that is written into the same word."""
    head, equals, tail = word.text.partition("=")
    inline = tail if equals else None
    if word.text.startswith("-O{"):
        return Flag("optimization_level", "-O", line=word.line), word.text[2:]
    # What is shown is the name alone: a slip may have glued a secret to it.
    shown = re.match(r"--?[\w.-]*", head)
    assert shown is not None
    if not head.startswith("--"):
        return _short(head[1:], inline, word)
    written, *path = head[2:].split(".")
    if path and path[-1].endswith("+"):
        path[-1] = path[-1][:-1] + "[]"
    plain = written.replace("-", "_")
    negated = plain.startswith("no_") and plain not in histories()
    name, candidates = resolve(plain.removeprefix("no_") if negated else plain)
    secret = _GLUED_SECRET.fullmatch(shown[0])
    if secret is not None and name not in histories() and not candidates:
        return Flag(
            f"{secret[1].strip('-').replace('-', '_')}…", f"{secret[1]}…", line=word.line
        ), inline
    return Flag(name, shown[0], (), tuple(path), negated, word.line, candidates), inline


def _short(body: str, inline: str | None, word: Word) -> tuple[Flag, str | None]:
    body, *path = body.split(".")
    written = "-" + re.sub(r"[^\w-].*", "", body, flags=re.DOTALL)
    level = re.fullmatch(r"O(\d?|[a-z]+)", body)
    if level:
        return Flag("optimization_level", "-O", (), (), line=word.line), inline or level[1] or None
    attached = re.fullmatch(r"(tp|pp|dp|n|r)(\d{1,9})", body)
    if attached:
        return Flag(SHORT[attached[1]], f"-{attached[1]}", line=word.line), attached[2]
    if body in SHORT:
        return Flag(SHORT[body], written, (), tuple(path), line=word.line), inline
    # One dash for two is a slip that argparse refuses; the name is plain all the same.
    name, candidates = resolve(body.replace("-", "_"))
    return Flag(name, written, (), tuple(path), line=word.line, candidates=candidates), inline
