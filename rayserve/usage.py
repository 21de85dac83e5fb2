"""What is wrong with a command line, and what was probably meant? Told as every other error is."""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from rayserve.errors import InputError, UsageError
from rayserve.veil import veiled

GROUP_VARS: Final = Path("group_vars", "all")
"""Where an inventory keeps spec and plan."""
MOST_NEIGHBOURS: Final = 2000
"""Names of a folder that are compared with one that is not there."""
MOST_CHARACTERS: Final = 200
"""Of a text that is repeated."""
MOST_COMMAND_CHARACTERS: Final = 2**20
"""Read of a pasted command line; the parser itself takes less, and says so."""
STDIN: Final = "-"


def told(error: click.ClickException, command: str = "rayserve") -> UsageError:
    """What click refuses: what the command takes, what it got, and what to write.

    `command`: the one that was called, where the error does not say so, as that of an option without
    its value.
    """
    context = error.ctx if isinstance(error, click.UsageError) else None
    command = context.command_path if context is not None else command
    found = shown(error.format_message()).rstrip(".")
    needed, do = f"a command line that `{command}` takes", f"see `{command} --help`"
    match error:
        case click.exceptions.NoSuchCommand():
            needed, found = f"a command of `{command}`", f"`{shown(error.command_name)}`"
            close = (error.possibilities or [""])[0]
            do = f"write {close}, or {do}" if close else do
        case click.exceptions.NoArgsIsHelpError():
            needed, found = f"a command of `{command}`", "nothing"
        case click.NoSuchOption():
            bare = error.option_name.lstrip("-")  # a key begins a word, and none begins with a dash
            written = error.option_name.removesuffix(bare) + shown(bare)
            needed, found = f"an option of `{command}`", f"`{written}`"
            close = (error.possibilities or [""])[0]
            do = f"write {close}, or {do}" if close else do
        case click.MissingParameter() if error.param is not None:
            needed, found = f"{_name(error.param)} after `{command}`", "nothing"
        case click.BadParameter() if error.param is not None:
            value, apart, _ = error.message.partition(" is not ")
            needed = _wanted(error.param)
            found = shown(value).strip("'\"") if apart else found
    return UsageError(needed, found=found, do=do)


def _name(param: click.Parameter) -> str:
    if isinstance(param, click.Option):
        return max(param.opts, key=len)
    return (param.metavar or (param.name or "").upper()).strip("[].")


def _wanted(param: click.Parameter) -> str:
    """What a parameter takes."""
    kind, name = param.type, _name(param)
    if isinstance(kind, click.Choice):
        return f"one of {', '.join(map(str, kind.choices))} for {name}"
    if isinstance(kind, click.IntRange):
        least = f", at least {kind.min}" if kind.min is not None else ""
        most = f", at most {kind.max}" if kind.max is not None else ""
        return f"a whole number{least}{most} for {name}"
    return f"another value for {name}"


def shown(text: str) -> str:
    """On one line, without what a terminal would obey. What may be a key is taken out before the cut,
    which could leave a part of it.
    """
    text = "".join(sign if sign.isprintable() else "?" for sign in " ".join(text.split()))
    return veiled(text)[:MOST_CHARACTERS]


# ── files ───────────────────────────────────────────────────────────────────────────────────────
class ExistingFile(click.ParamType[str]):
    """The name of a file that is there, and no folder; what to write instead is looked up."""

    name = "file"

    def __init__(self, what: str, *inside: str, stdin: bool = False) -> None:
        """Take a file.

        Args:
            what: the file, for people: "a plan.yml".
            inside: names that it has in an inventory, in the order in which they are meant.
            stdin: whether `-` is standard input.
        """
        self._what, self._inside, self._stdin = what, inside, stdin

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name as it was written.

        Raises:
            UsageError: nothing is there, or a folder.
        """
        del ctx
        name = str(value)
        if (self._stdin and name == STDIN) or (os.path.exists(name) and not os.path.isdir(name)):  # noqa: PTH110, PTH112 - never raise
            return name
        label = f"{self._what} for {_name(param)}" if param is not None else self._what
        if name and os.path.isdir(name):  # noqa: PTH112 - as above
            raise UsageError(
                label, found=shown(f"a folder, {name}"), do=self._in_folder(Path(name))
            )
        close = nearby(Path(name), self._meant) if name else None
        if close is not None and Path(name).suffix and not close.suffix:
            close = None  # /etc/services is no plan.yml, however near its name
        raise UsageError(
            label,
            found=shown(f"no file at {name}") if name else "an empty name",
            do=f"name {close}" if close is not None else self._otherwise(),
        )

    def _meant(self, path: Path) -> Path | None:
        """The file that a name stands for: itself, or the one in a folder."""
        if path.is_file():
            return path
        places = (path / place / name for name in self._inside for place in (GROUP_VARS, ""))
        return next((place for place in places if place.is_file()), None)

    def _in_folder(self, folder: Path) -> str:
        file = _harmless(self._meant, folder)
        if file is not None:
            return f"name the file in it: {file}"
        unplanned = ExistingFile("", "cluster.yml")
        if self._inside and _harmless(unplanned._meant, folder) is not None:
            return f"write it first: rayserve plan {folder}"
        return self._otherwise()

    def _otherwise(self) -> str:
        if self._stdin:
            return "name a file, or - for standard input"
        return f"name {self._what}, as `rayserve plan` writes it into the folder of an inventory"


PLAN_FILE: Final = ExistingFile("a plan.yml", "plan.yml")
STARTED_FILE: Final = ExistingFile("a plan.yml or serve.yml", "plan.yml", "serve.yml")
COMMAND_FILE: Final = ExistingFile("a file with a command line", stdin=True)


def read_command(name: str) -> str:
    """The text of a pasted command line, in a file or on standard input.

    Raises:
        InputError: it cannot be read, or is not UTF-8.
    """
    try:
        with click.open_file(name, encoding="utf-8") as file:
            text: str = file.read(MOST_COMMAND_CHARACTERS)
    except UnicodeDecodeError as error:
        raise InputError(
            "a command line in UTF-8", found=error.reason, do="save it as plain UTF-8"
        ) from None
    except OSError as error:
        raise InputError(
            "a command line that can be read",
            found=error.strerror or str(error),
            do="name the right file, or paste the command on standard input",
        ) from None
    return text


def nearby(path: Path, meant: Callable[[Path], Path | None]) -> Path | None:
    """What `path`, which is not there, was probably to name; None: nothing is like it.

    Args:
        path: of a file or folder; the first part of it that is not there is taken as misspelt.
        meant: what an existing path stands for; None: nothing that is looked for.
    """
    return _harmless(lambda name: _nearby(name, meant), path)


def _nearby(path: Path, meant: Callable[[Path], Path | None]) -> Path | None:
    known = next(folder for folder in path.parents if folder.exists())
    wrong, *rest = path.relative_to(known).parts
    if file := meant(known / GROUP_VARS / path.name):
        return file
    with os.scandir(known) as entries:
        names = [entry.name for entry in itertools.islice(entries, MOST_NEIGHBOURS)]
    for name in difflib.get_close_matches(wrong, sorted(names)):
        if not _alike(Path(wrong).stem, Path(name).stem):
            continue  # nope.yml and site.yml share their ending alone
        if file := meant(Path(known, name, *rest)) or meant(known / name):
            return file
    return None


def _alike(one: str, other: str) -> bool:
    return bool(difflib.get_close_matches(one, [other]))


def _harmless(look: Callable[[Path], Path | None], path: Path) -> Path | None:
    """A hint must not fail where the system refuses to look."""
    try:
        return look(path)
    except (OSError, ValueError, StopIteration):
        return None
