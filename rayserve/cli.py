"""The `rayserve` command: parse, call, print. Decisions live in the modules it calls.

Imports of other rayserve modules are inside the commands, so that `rayserve --help` stays fast.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

import click

from rayserve import __version__
from rayserve.deploy_command import deploy
from rayserve.doctor.command import doctor
from rayserve.entry import FORMAT, Commands
from rayserve.errors import RayserveError, UsageError
from rayserve.usage import COMMAND_FILE, PLAN_FILE, STARTED_FILE, read_command

if TYPE_CHECKING:
    from pathlib import Path

    from rayserve.health.checks.wanted import Wanted
    from rayserve.inventory import Files
    from rayserve.planner.views.terminal import Style
    from rayserve.planning import Planned


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rayserve")
def main() -> None:
    """Serve one very large language model on your own GPU hosts.

    Exit codes: 0 done, 1 failed, 2 input is wrong, 3 does not fit, 4 this machine is not ready,
    5 did not start, 141 the reader of a pipe went away.
    """


main.add_command(deploy)
main.add_command(doctor)


@main.command()
@click.argument("spec", default=".")
@click.option("--out", metavar="DIR", help="Write plan.yml and serve.yml into this folder.")
@click.option("--check", "only_check", is_flag=True, help="Exit 2 with a diff if they are stale.")
@click.option("--dry-run", is_flag=True, help="Show the plan and what would change; write nothing.")
@click.option(
    "--starts",
    metavar="FILE",
    multiple=True,
    help="A host's starts.jsonl: keep its comparable starts beside SPEC and calibrate by them.",
)
@click.option("--candidates", is_flag=True, help="Rank model.candidates; write nothing.")
@click.option("--html", metavar="FILE", help="Also write the plan as a page for a browser.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(
    spec: str,
    out: str | None,
    *,
    only_check: bool,
    dry_run: bool,
    starts: tuple[str, ...],
    candidates: bool,
    html: str | None,
    as_json: bool,
) -> None:
    """Prove that SPEC fits, and write plan.yml and serve.yml, also with --json.

    SPEC is a cluster.yml or the folder of an inventory, such as inventories/demo.
    """
    from rayserve import inventory, planning
    from rayserve.errors import PlanError
    from rayserve.planner.render import changes
    from rayserve.planner.views.terminal import table

    files = inventory.locate(spec, out)
    if candidates:
        others = {"--check": only_check, "--html": html, "--starts": starts, "--out": out}
        _rank_candidates(files, [name for name, given in others.items() if given], as_json=as_json)
        return
    planned = planning.make_plan(files, starts, say=_say)
    page = _page(files, planned, html) if html is not None else {}
    diffs = [
        changes(inventory.current(path), text, str(path)) for path, text in planned.texts.items()
    ]
    stale = [str(path) for path, diff in zip(planned.texts, diffs, strict=True) if diff]
    known = [
        diff
        for path, diff in zip(planned.texts, diffs, strict=True)
        if path.is_file() and path != files.starts  # lines for programs: `told` says it
    ]
    texts = (planned.texts if stale else {}) | page
    # Written first, printed after: a reader that goes away does not cost the files.
    if texts and not dry_run and not only_check:
        inventory.write_all(texts)
    if not as_json:
        said = [table(planned.plan, _style()), *planned.told, *filter(None, known)]
        click.echo("\n".join(said))
    if only_check and stale:
        raise PlanError(
            "plan and Serve config as the spec gives them",
            found=f"{', '.join(stale)} {'differ' if len(stale) > 1 else 'differs'}",
            do=f"run `rayserve plan {spec}`, look at the diff and commit it",
        )
    changed = [*stale, *map(str, page)]
    if as_json:
        report = {
            "format": FORMAT,
            "plan": planned.plan.as_dict(),
            "changed": changed,
            "starts": planned.told,
        }
        click.echo(json.dumps(report, ensure_ascii=False))
    elif not only_check:
        verb = "would write" if dry_run else "wrote"
        click.echo(f"{verb} {', '.join(changed)}" if changed else "unchanged")


def _page(files: Files, planned: Planned, html: str) -> dict[Path, str]:
    """The page of a plan, where it differs from what is there."""
    from rayserve import inventory, page

    path = page.path_of(html, planned)
    text = page.text_of(planned, files.spec.name)
    return {path: text} if inventory.current(path) != text else {}


def _say(line: str) -> None:
    """A line of progress, beside what the command prints."""
    click.echo(line, err=True)


def _style() -> Style:
    """What the terminal behind stdout can show."""
    from rayserve.planner.views.terminal import style_of

    return style_of(
        terminal=sys.stdout.isatty(),
        environment=os.environ,
        encoding=sys.stdout.encoding or "ascii",
        width=shutil.get_terminal_size((0, 0)).columns,
    )


def _rank_candidates(files: Files, others: list[str], *, as_json: bool) -> None:
    """Print how the checkpoints of a spec compare; exit code 3 where none can be served."""
    from rayserve import planning
    from rayserve.errors import DoesNotFitError
    from rayserve.planner.candidates import comparison_text

    if others:
        raise UsageError(
            "--candidates without options about files, since it reads the spec alone and writes none",
            found=", ".join(others),
            do="leave them out (the page of a plan compares its candidates too)",
        )
    comparison = planning.compare_candidates(files, say=_say)
    if as_json:
        click.echo(json.dumps({"format": FORMAT} | comparison.as_dict(), ensure_ascii=False))
    else:
        click.echo(comparison_text(comparison))
    if not any(row.rank for row in comparison.rows):
        raise SystemExit(DoesNotFitError.exit_code)


@main.command()
@click.argument("plan_file", metavar="PLAN", type=PLAN_FILE)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@click.option("--systemd", is_flag=True, help="Print KEY=VALUE lines, for an EnvironmentFile.")
def env(plan_file: str, *, as_json: bool, systemd: bool) -> None:
    """Print what every Ray node needs in its environment before Ray starts."""
    from rayserve.ingress import shell_environment
    from rayserve.inventory import read_plan
    from rayserve.planner.render import environment_lines

    values = shell_environment(read_plan(plan_file))
    click.echo(environment_lines(values, as_json=as_json, systemd=systemd))


@main.command()
@click.argument("command_file", metavar="[FILE]", type=COMMAND_FILE, default="-")
@click.option("--version", default="", help="The vLLM version that the command was written for.")
@click.option("--aim", type=click.Choice(["latency", "throughput"]), default="latency")
@click.option("--gpu", default="", help="GPU model of the catalogue, such as A100-80GB-SXM.")
@click.option("--hosts", type=click.IntRange(min=1), help="Else as few as hold the ranks.")
@click.option("--gpus-per-host", type=click.IntRange(min=1), default=None)
@click.option(
    "--config", "config_file", metavar="FILE", help="config.json of the model, to check its shape."
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object (docs/json.md).")
def convert(
    command_file: str, *, version: str, aim: str, gpu: str, hosts: int | None,
    gpus_per_host: int | None, config_file: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Turn a `vllm serve` command line, in FILE or on standard input, into a cluster.yml.

    What the command gets wrong stands above it as comments. Nothing of it is run.
    """
    from rayserve.planner.convert import convert_command
    from rayserve.planning import read_model_config

    text = read_command(command_file)
    config = read_model_config(config_file) if config_file is not None else None
    click.echo(
        convert_command(
            text, version=version, aim=aim, gpu=gpu, as_json=as_json, hosts=hosts or 0,
            gpus_per_host=gpus_per_host or 0, config=config,
        )
    )  # fmt: skip


@main.command()
@click.argument("what", type=click.Choice(["spec", "plan", "argument-specs", "reference"]))
def schema(what: str) -> None:
    """Print a schema: JSON Schema of spec or plan, Ansible argument specs, or the reference."""
    from rayserve import schema as schemas

    click.echo(schemas.render(what), nl=False)


@main.group()
def check() -> None:
    """Is this machine ready? Exit code 4 when a check fails."""


def _wanted(plan: str) -> Wanted:
    from rayserve.health.wants import wanted_of
    from rayserve.inventory import read_plan

    return wanted_of(read_plan(plan))


def _room(name: str, does: str, asks: str) -> None:
    """Add `rayserve check NAME`; `asks` names its options beside --textfile and --json."""
    options = {
        "plan": click.option(
            "--plan", metavar="PLAN", type=PLAN_FILE, help="What the hosts must be: a plan.yml."
        ),
        "before-start": click.option(
            "--before-start", is_flag=True, help="GPU memory must be free; no engine answers yet."
        ),
        "measure": click.option(
            "--measure", is_flag=True, help="Measure an all-reduce; the GPUs must be idle."
        ),
    }

    @click.option("--textfile", metavar="FILE", help="Also write metrics for node_exporter.")
    @click.option("--json", "as_json", is_flag=True, help="Print the verdicts as JSON.")
    def command(
        textfile: str | None,
        *,
        as_json: bool,
        plan: str | None = None,
        before_start: bool = False,
        measure: bool = False,
    ) -> None:
        from rayserve.errors import HostError
        from rayserve.health.gate import Request, run_checks
        from rayserve.health.results import failures, render, worst

        wanted = _wanted(plan) if plan is not None else None
        results = run_checks(name, Request(wanted, before_start, measure))
        if textfile is not None:
            from pathlib import Path

            from rayserve.health.textfile import write_textfile

            write_textfile(Path(textfile), results)
        if as_json:
            checks = [result.as_dict() for result in results]
            verdict = {"format": FORMAT, "status": worst(results).value, "checks": checks}
            click.echo(json.dumps(verdict, ensure_ascii=False))
        else:
            click.echo(render(results))
        if failures(results):
            raise SystemExit(HostError.exit_code)

    for option in asks.split():
        command = options[option](command)
    check.command(name, help=does)(command)


for _name, _does, _asks in (
    ("install", "Judge this Python environment: versions, builds, libraries, imports.", ""),
    ("host", "Judge kernel, driver, holds, limits, clock and disks of this host.", "plan"),
    ("gpu", "Judge the GPUs: all there, whole, sound, free, and CUDA starts.", "plan before-start"),
    ("fabric", "Judge the ways between the GPUs of this host.", "plan measure"),
    ("engine", "Ask whether the plan's engine answers on this host.", "plan"),
    (
        "all",
        "All of these, in under five seconds (without the imports and the measurement).",
        "plan before-start measure",
    ),
):
    _room(_name, _does, _asks)


@check.command("args")
@click.argument("file", type=STARTED_FILE)
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
def check_args_command(file: str, *, as_json: bool) -> None:
    """Ask the installed vLLM whether it accepts what FILE, a plan or Serve config, would start."""
    from rayserve.serving.argcheck import check as check_args

    verdict = check_args(file)
    if as_json:
        click.echo(json.dumps({"format": FORMAT} | verdict, ensure_ascii=False))
    elif verdict.get("ok"):
        for replica in verdict["replicas"]:
            click.echo(f"accepted: revision {replica['revision']}")
    else:
        click.echo(f"error: {RayserveError.from_dict(verdict).message()}", err=True)
    raise SystemExit(verdict.get("exit_code", 0))


@main.command()
@click.option(
    "--dir",
    "directory",
    default="build/demo",
    show_default=True,
    metavar="DIR",
    help="Folder of the model, the plan, the key and the logs.",
)
@click.option("--port", type=click.IntRange(1024, 65535), default=8000, show_default=True)
@click.option(
    "--ranks",
    type=click.Choice(["1", "2", "4", "8"]),
    default="1",
    show_default=True,
    help="Tensor-parallel ranks, a logical GPU each.",
)
@click.option("--keep", is_flag=True, help="Leave it running, and say how to use and stop it.")
@click.option("--stop", is_flag=True, help="Stop a demo that was kept.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON on stdout.")
def demo(directory: str, port: int, ranks: str, *, keep: bool, stop: bool, as_json: bool) -> None:
    """Serve a tiny model on this machine with the whole stack, and ask it one question."""
    from rayserve.demo.interrupts import EXIT_CODE, Interrupted, Interrupts

    stream = sys.stderr if as_json else sys.stdout
    code = EXIT_CODE
    figures: dict[str, Any] = {}
    with contextlib.suppress(Interrupted), Interrupts() as interrupts:
        from pathlib import Path

        from rayserve.demo import run as demo_run

        if stop:
            code = demo_run.stop(Path(directory), stream)
        else:
            options = demo_run.Options(Path(directory), port, int(ranks), keep)
            code, figures = demo_run.run(options, stream, interrupts)
    if as_json and figures:
        click.echo(json.dumps(figures, ensure_ascii=False))
    raise SystemExit(code)


if __name__ == "__main__":
    main()
