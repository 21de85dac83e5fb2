"""Ray Serve's entry: `serve run rayserve.app:build plan=plan.yml`, or the generated Serve config.

This module must not use `from __future__ import annotations`: Ray Serve reads the annotation of
`build` to validate the arguments, and a string in its place turns that off without a word.
"""

import click
from ray import serve

from rayserve.errors import RayserveError
from rayserve.serve_config import DEPLOYMENT, replica_options
from rayserve.serving.arguments import AppArgs, refused, resolve
from rayserve.serving.deployment import Engine


def build(args: AppArgs) -> serve.Application:
    """The Serve application of one plan.

    Raises:
        click.ClickException: the arguments, the plan or this environment cannot work; nothing was
            started.
    """
    try:
        start = resolve(args)
    except RayserveError as error:
        raise refused(error) from None
    for warning in start.warnings:
        click.echo(f"warning: {warning}", err=True)
    engine = serve.deployment(name=DEPLOYMENT)(serve.ingress()(Engine))
    engine = engine.options(**replica_options(start.replica), **(start.live or {}))
    return engine.bind(start.replica, start.environment, start.profile)
