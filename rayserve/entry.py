"""How does every `rayserve` command end? With an exit code and one message, and never a traceback.

A command that fails raises an error of `rayserve.errors`, which decides the code. What is printed may
fail too: the reader of a pipe goes away (`rayserve plan | head -1`), or a disk is full. Python would
find that late, and tell it with a traceback or, as it ends, with code 120. On stdout that ends the
command, on stderr it changes nothing.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TextIO

import click

from rayserve.errors import OutputError, RayserveError, UsageError
from rayserve.usage import told

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

FORMAT: Final = 1
"""Version of the JSON of `plan` and of errors (docs/json.md); it grows when a key changes its meaning
or goes.
"""
YOUNG_OBJECTS: Final = 100_000
"""Made between two searches for garbage: what a command makes lives about as long as the command."""
BROKEN_PIPE: Final = 141
"""What a shell shows for a command that SIGPIPE ended: its reader has seen enough, it has not failed."""


class Commands(click.Group):
    """A group that ends a command with the error's own exit code, and with JSON under `--json`."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run as a process: what a command prints goes through a checked stdout, and what it says
        beside that may be lost, but changes nothing.
        """
        if sys.stdin is None:  # closed by whoever started us: it reads as an empty file
            sys.stdin = Path(os.devnull).open(encoding="utf-8")  # noqa: SIM115 - for good
        with _harmless_stderr(), _checked_stdout():
            return super().main(*args, **extra)

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Parse the group's own options; a wrong one is told as every other error."""
        try:
            return super().make_context(*args, **extra)
        except click.ClickException as error:
            _fail_usage(error)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; every failure becomes one message and an exit code."""
        usual = gc.get_threshold()
        gc.set_threshold(YOUNG_OBJECTS)
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.Abort, OutputError):
            raise  # click, or `main`, ends the process as it should
        except RayserveError as error:
            _fail(error, as_json=_wants_json())
        except click.ClickException as error:
            _fail_usage(error, " ".join(filter(None, ("rayserve", ctx.invoked_subcommand))))
        except Exception as error:  # noqa: BLE001 - entry of a process: no traceback for a person
            _fail(_unexpected(error), as_json=_wants_json())
        finally:
            gc.set_threshold(*usual)


def _wants_json() -> bool:
    return "--json" in sys.argv


def _fail_usage(error: click.ClickException, command: str = "rayserve") -> NoReturn:
    if isinstance(error, click.exceptions.NoArgsIsHelpError) and not _wants_json():
        raise error  # no mistake: a group without a command shows its help
    _fail(told(error, command), as_json=_wants_json())


def _unexpected(error: Exception) -> RayserveError:
    """What no command has foreseen, with the line that a report of it must name."""
    if isinstance(error, FileNotFoundError) and not _has_working_folder():
        return UsageError(
            "a working folder that is there, from which relative names are read",
            found="one that was removed",
            do="cd into a folder that is there, or name every file in full",
        )
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = "" if trace is None else f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
    return RayserveError(
        "a command that ends as foreseen",
        found=f"{type(error).__name__}: {str(error)[:300]}{place}",
        do="check the input; if it is sound, this is an error of rayserve: report it",
    )


def _has_working_folder() -> bool:
    try:
        Path.cwd()
    except OSError:
        return False
    return True


def _fail(error: RayserveError, *, as_json: bool) -> NoReturn:
    if as_json:
        click.echo(json.dumps({"format": FORMAT, **error.as_dict()}, ensure_ascii=False))
    else:
        click.echo(f"error: {error.message()}", err=True)
    raise SystemExit(error.exit_code)


# ── stdout and stderr ─────────────────────────────────────────────────────────────────────────────
@contextlib.contextmanager
def _checked_stdout() -> Iterator[None]:
    """Meanwhile, `sys.stdout` ends the process at the first write that fails."""
    try:
        with _over(sys.stdout, _Stdout) as checked, contextlib.redirect_stdout(checked):
            try:
                yield
            finally:
                checked.flush()
    except OutputError as error:
        _fail(error, as_json=False)


@contextlib.contextmanager
def _harmless_stderr() -> Iterator[None]:
    """Meanwhile, a write to `sys.stderr` that fails is lost: the exit code still tells."""
    with _over(sys.stderr, _Stderr) as harmless, contextlib.redirect_stderr(harmless):
        try:
            yield
        finally:
            harmless.flush()


@contextlib.contextmanager
def _over(stream: TextIO | None, kind: type[io.FileIO]) -> Iterator[TextIO]:
    """A text stream to the same file, written by `kind`."""
    if stream is None:  # closed by whoever started us: nobody wants to read
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
            yield nowhere
        return
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # a stand-in without a file behind it, in memory
        yield stream
        return
    yield io.TextIOWrapper(
        io.BufferedWriter(kind(descriptor, "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=bool(getattr(stream, "line_buffering", True)),
    )


class _Stdout(io.FileIO):
    """The file behind `sys.stdout`, which tells apart why it cannot be written."""

    def write(self, data: ReadableBuffer, /) -> int:
        """Write some of `data`, and say how many bytes.

        Raises:
            SystemExit: the reader went away.
            OutputError: the system refused it.
        """
        try:
            return super().write(data)
        except BrokenPipeError:
            _discard_the_rest(self)
            raise SystemExit(BROKEN_PIPE) from None
        except OSError as error:
            _discard_the_rest(self)
            raise OutputError(
                "standard output that can be written",
                found=error.strerror or str(error),
                do="make room, or send the output elsewhere; files that were written are complete",
            ) from None


class _Stderr(io.FileIO):
    """The file behind `sys.stderr`, which takes whatever the system refuses."""

    def write(self, data: ReadableBuffer, /) -> int:
        """Write `data`, or forget it, and say that it is written."""
        try:
            written: int | None = super().write(data)
        except OSError:
            _discard_the_rest(self)
            written = None
        # None also where the file would have to be waited for.
        return len(memoryview(data).cast("B")) if written is None else written


def _discard_the_rest(file: io.FileIO) -> None:
    """What is buffered is flushed as Python ends: into nothing, so that it does not fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, file.fileno())
    os.close(nowhere)
