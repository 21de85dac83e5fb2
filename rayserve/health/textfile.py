"""Where do a host's verdicts go as metrics? Into a file of node_exporter's textfile collector."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from rayserve.errors import HostError, UsageError
from rayserve.health.results import CheckResult, metrics
from rayserve.inventory import current, write_all


def write_textfile(path: Path, results: Sequence[CheckResult]) -> None:
    """The verdicts as metrics, for node_exporter's textfile collector: whole or not at all.

    Raises:
        UsageError: there is another file, which is not replaced.
        HostError: the folder does not take it.
    """
    text = metrics(results, host=socket.gethostname(), now_s=time.time())
    begin = text.partition("{")[0]
    if not path.parent.is_dir():
        raise HostError(
            "a folder for the metrics that is there",
            found=f"no folder for {path}",
            do="make it, and give it to the user of this command",
        )
    there = current(path)
    if there and not there.startswith(begin):
        raise UsageError(
            "a file for the metrics: a new one, or one with metrics of these checks",
            found=f"{path} holds something else",
            do="name another file: --textfile /var/lib/node_exporter/rayserve.prom",
        )
    write_all({path: text})
    with contextlib.suppress(OSError):
        path.chmod(0o644)  # node_exporter is another user
