"""Who makes sure that nothing of a demo outlives it, however the demo ends?

The keeper is a small process between the demo and Ray:

    rayserve demo ──lifeline (a pipe)──▶ keeper ──▶ ray start --head --block ──▶ raylet, Serve, vLLM

It is a subreaper: whatever descends from it and loses its parent becomes its child, so that no
process escapes by starting a session of its own. When the lifeline closes, for whatever reason
(SIGKILL included), or on SIGTERM, it stops all its descendants, removes the shared memory that they
had mapped and the demo's temporary folder, and ends. The byte KEEP on the lifeline lets the demo go
and Ray stay.

It imports nothing heavy, because it starts before anything else.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

import psutil

from rayserve.demo import processes

KEEP = b"k"
ENDED = "ended"
"""File in the temporary folder which says that the command ended by itself."""
GRACE_S = 2.0
"""How long processes may take to end by themselves. Nobody waits for an answer from them."""
POLL_S = 0.2
_PR_SET_CHILD_SUBREAPER = 36


class Keeper:
    """Holds one command and everything below it."""

    def __init__(self, lifeline: int, demo_id: str, temp_dir: str) -> None:
        self._lifeline: int | None = lifeline
        self._demo_id = demo_id
        self._temp_dir = temp_dir
        self._asked_to_stop = False
        self._reaped: set[int] = set()

    def run(self, command: list[str]) -> int:
        """Run the command until it ends or the demo does; 0 if it was asked to stop, else 1."""
        _become_subreaper()
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        while not self._asked_to_stop and child.pid not in self._reaped:
            self._listen()
            self._reap()
        ended_by_itself = child.pid in self._reaped
        if ended_by_itself:
            (Path(self._temp_dir) / ENDED).touch()
        self._stop_all()
        while self._lifeline is not None and not self._asked_to_stop:
            self._listen()  # the demo may still want to read the logs in the temporary folder
        shutil.rmtree(self._temp_dir, ignore_errors=True)
        return 1 if ended_by_itself else 0

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._asked_to_stop = True

    def _listen(self) -> None:
        """Wait a moment for the demo's word: KEEP, or the end of the lifeline."""
        fds = [] if self._lifeline is None else [self._lifeline]
        ready, _, _ = select.select(fds, [], [], POLL_S)
        if not ready or self._lifeline is None:
            return
        said = os.read(self._lifeline, 1)
        os.close(self._lifeline)
        self._lifeline = None
        self._asked_to_stop = said != KEEP

    def _find(self) -> list[psutil.Process]:
        return processes.descendants(psutil.Process())

    def _stop_all(self) -> None:
        left = processes.stop(self._find, grace_s=GRACE_S, reap=self._reap)
        left += processes.stop(
            lambda: processes.marked(self._demo_id, self._temp_dir), grace_s=0.0, reap=self._reap
        )
        for process in left:
            print(f"keeper: process {process.pid} does not end", file=sys.stderr, flush=True)

    def _reap(self) -> None:
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._reaped.add(pid)


def _become_subreaper() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def start(
    command: list[str],
    *,
    demo_id: str,
    temp_dir: Path,
    log: Path,
    env: dict[str, str],
    pass_fds: tuple[int, ...] = (),
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a keeper with its command.

    Args:
        command: what it runs.
        demo_id: the mark that `env` carries.
        temp_dir: removed by the keeper at the end.
        log: where its output and the command's go.
        env: the environment of both.
        pass_fds: open files that it holds for as long as it lives, such as a lock.

    Returns:
        The process, and the demo's end of the lifeline.
    """
    module = [sys.executable, "-m", "rayserve.demo.keeper"]
    arguments = ["--id", demo_id, "--temp-dir", str(temp_dir), "--", *command]
    with contextlib.ExitStack() as on_failure:
        read_end, write_end = os.pipe()
        on_failure.callback(os.close, write_end)
        try:
            with log.open("wb") as output:
                keeper = subprocess.Popen(
                    [*module, "--lifeline", str(read_end), *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=env,
                    # A Ctrl-C in the terminal is for the demo alone. Not a session: Linux schedules each as a
                    # unit, and the demo's client then waits for a core while the engine polls.
                    process_group=0,
                    pass_fds=(read_end, *pass_fds),
                )
        finally:
            os.close(read_end)
        on_failure.pop_all()
    return keeper, write_end


def main() -> int:
    """Entry of the keeper's process."""
    parser = argparse.ArgumentParser(prog="rayserve.demo.keeper")
    parser.add_argument("--lifeline", type=int, required=True)
    parser.add_argument("--id", required=True)
    parser.add_argument("--temp-dir", required=True)
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    return Keeper(args.lifeline, args.id, args.temp_dir).run(args.command)


if __name__ == "__main__":
    sys.exit(main())
