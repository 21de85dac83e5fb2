"""How does every `rayserve` command end? With an exit code and one message, and never a traceback."""

from __future__ import annotations

import gc
import json
import sys
from typing import Any, Final, NoReturn

import click

from rayserve.errors import RayserveError, UsageError

FORMAT: Final = 1
"""Version of the JSON of `plan` and of errors (docs/json.md); it grows when a key goes or changes."""
YOUNG_OBJECTS: Final = 100_000
"""Made between two searches for garbage: what a command makes lives about as long as the command."""


class Commands(click.Group):
    """A group that ends a command with the error's own exit code, and with JSON under `--json`."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Parse the group's own options; a wrong one is JSON too under `--json`."""
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
        except RayserveError as error:
            _fail(error, as_json=_wants_json())
        except click.ClickException as error:
            _fail_usage(error)
        except (click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # click ends the process as it should
        except Exception as error:  # noqa: BLE001 - entry of a process: no traceback for a person
            _fail(_unexpected(error), as_json=_wants_json())
        finally:
            gc.set_threshold(*usual)


def _wants_json() -> bool:
    return "--json" in sys.argv


def _fail_usage(error: click.ClickException) -> NoReturn:
    if not _wants_json():
        raise error
    _fail(UsageError(error.format_message(), do="see --help"), as_json=True)


def _unexpected(error: Exception) -> RayserveError:
    """What no command has foreseen, with the line that a report of it must name."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = "" if trace is None else f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
    return RayserveError(
        "a command that ends as foreseen",
        found=f"{type(error).__name__}: {str(error)[:300]}{place}",
        do="check the input; if it is sound, this is an error of rayserve: report it",
    )


def _fail(error: RayserveError, *, as_json: bool) -> NoReturn:
    if as_json:
        click.echo(json.dumps({"format": FORMAT, **error.as_dict()}, ensure_ascii=False))
    else:
        click.echo(f"error: {error.message()}", err=True)
    raise SystemExit(error.exit_code)
