"""`rayserve doctor`: parse, read, print. What the logs mean is decided in `diagnosis`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rayserve.doctor.verdicts import Verdict


@click.command()
@click.argument("paths", metavar="[PATH]...", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object (docs/json.md).")
def doctor(paths: tuple[str, ...], *, as_json: bool) -> None:
    """Name the first cause in logs of Ray, Serve, vLLM, systemd and the kernel.

    PATH is a log, a folder or an archive of logs, also compressed; none or - reads standard input.
    Exit code 0 whatever the logs tell, also where only part of them could be read, which the answer
    says; 2 where there is nothing to read.
    """
    from rayserve.doctor.collect import STDIN, read_all
    from rayserve.doctor.diagnosis import Diagnosis
    from rayserve.doctor.report import as_dict, render
    from rayserve.errors import InputError, UsageError

    if (not paths or STDIN in paths) and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError(
            "logs to read",
            found="nothing on standard input but a terminal",
            do="name files or folders, or pipe a log into it: journalctl -b | rayserve doctor",
        )
    diagnosis = Diagnosis()
    reading = read_all(paths or (STDIN,), diagnosis.read, lambda text: click.echo(text, err=True))
    if not reading.logs:
        raise InputError(
            "logs to read",
            found="no text in what was named" if paths else "nothing on standard input",
            do="name other files, or look whether the command that was to write the log failed",
        )
    verdict: Verdict = diagnosis.verdict()
    if as_json:
        click.echo(json.dumps(as_dict(verdict, reading.gaps), ensure_ascii=False))
    else:
        click.echo(render(verdict, reading.logs, reading.gaps))
