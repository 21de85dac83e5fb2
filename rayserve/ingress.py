"""With what environment does Ray start on this host?"""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

from rayserve.errors import HostError
from rayserve.haproxy import HAPROXY_BINARY
from rayserve.plan import Plan


def node_environment(plan: Plan) -> dict[str, str]:
    """The plan's environment with what only this host can tell: where a command lies.

    Raises:
        HostError: the command is not installed.
    """
    values = {item.name: str(item.value) for item in plan.environment}
    if HAPROXY_BINARY in values:
        values[HAPROXY_BINARY] = _command(values[HAPROXY_BINARY])
    return values


def shell_environment(plan: Plan) -> dict[str, str]:
    """`node_environment`, and in any case whether Ray asks for a token.

    Where nothing says so, a head asks for a token that lies in its user's home, and clients send none.

    Raises:
        HostError: as `node_environment`.
    """
    return {"RAY_AUTH_MODE": "disabled"} | node_environment(plan)


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
