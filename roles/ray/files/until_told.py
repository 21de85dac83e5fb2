"""Did the command fail, or was it told to stop? Runs it, passes SIGTERM on, and ends with 0 where it stops after that.

    until_told.py COMMAND ARGUMENT...

`ray start --block` ends with 1 when it is told to stop and does, as it does when a part of Ray has died. systemd's
SuccessExitStatus could not tell the two apart, and would let a failed ExecStartPre pass as well.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence

STOPPED = (0, 1, 128 + signal.SIGTERM, -signal.SIGTERM)
"""How a command ends that stops because it is told to."""


def main(command: Sequence[str]) -> int:
    """The exit code: 0 after a told stop, else the command's own, 128 + n where signal n ended it."""
    told = False
    child = subprocess.Popen(command)

    def tell(*_: object) -> None:
        nonlocal told
        told = True
        child.terminate()

    signal.signal(signal.SIGTERM, tell)
    status = child.wait()
    if told and status in STOPPED:
        return 0
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
