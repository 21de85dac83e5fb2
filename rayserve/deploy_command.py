"""`rayserve deploy`: parse, call, print."""

from __future__ import annotations

import json
import os

import click

from rayserve.entry import FORMAT
from rayserve.ports import RAY
from rayserve.usage import PLAN_FILE


@click.command()
@click.argument("plan_file", metavar="PLAN", type=PLAN_FILE)
@click.option(
    "--dashboard-port", type=click.IntRange(1, 65535), default=RAY["dashboard"], show_default=True
)
@click.option(
    "--token-file",
    metavar="FILE",
    envvar="RAY_AUTH_TOKEN_PATH",
    help="Ray's token; else as Ray finds it, at last in ~/.ray/auth_token.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def deploy(plan_file: str, *, dashboard_port: int, token_file: str | None, as_json: bool) -> None:
    """Make the Serve of this host's Ray run PLAN, and nothing else; wait until it is ready.

    On the head, as the user of Ray. What runs already is left alone, what has failed is tried anew. What served before
    is taken away once Serve has built the new revision. An application of `serve run`, which no config takes away,
    is named, and nothing is changed.
    """
    from dataclasses import asdict
    from functools import partial

    from rayserve.clients import ServeApi, find_token
    from rayserve.deploy import deploy as make_it_run
    from rayserve.inventory import read_plan

    serve = ServeApi(dashboard_port, *find_token(token_file, os.environ))
    done = make_it_run(read_plan(plan_file), serve, tell=partial(click.echo, err=True))
    text = f"{done.app} is ready after {done.seconds:.0f} s: {done.url}"
    click.echo(json.dumps({"format": FORMAT} | asdict(done)) if as_json else text)
