"""Where does a demo keep its files, and is another one running there?

build/demo/
  model/          the tiny model, kept from run to run
  cluster.yml     the spec  ─┐
  plan.yml        the plan   ├ what `rayserve plan` would make
  serve.yml       the config ┘
  keys            one random key for this run, 0600
  logs/           output of Ray; all logs of the session after a failure
  demo.json       how to reach and how to stop a running demo
  lock            held by a demo, or by the keeper of a kept one, for as long as it lives
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from rayserve.errors import HostError

STATE_FILE = "demo.json"


@dataclass(frozen=True)
class Running:
    """A running demo, as demo.json tells it."""

    demo_id: str
    keeper_pid: int
    keeper_started: float
    """Start time of the keeper, seconds since the epoch: tells it from a later one of that pid."""
    temp_dir: str
    url: str
    """Base URL for OpenAI clients."""

    def keeper(self) -> psutil.Process | None:
        """The keeper, if it still lives."""
        try:
            process = psutil.Process(self.keeper_pid)
            same = abs(process.create_time() - self.keeper_started) < 1.0
        except psutil.NoSuchProcess:
            return None
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None


class WorkDir:
    """The folder of one demo."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.model = self.path / "model"
        self.cluster = self.path / "cluster.yml"
        self.plan = self.path / "plan.yml"
        self.config = self.path / "serve.yml"
        self.keys = self.path / "keys"
        self.logs = self.path / "logs"
        self.state = self.path / STATE_FILE

    def lock(self) -> int:
        """Make the folder and take it for this demo.

        Returns:
            The open lock file; the lock lasts until it and all its copies in children are closed.

        Raises:
            HostError: another demo runs here, or the folder cannot be written.
        """
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise HostError(
                f"a folder for the demo that can be written: {self.path}",
                found=error.strerror or str(error),
                do="name another one with --dir",
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            running = self.running()
            raise HostError(
                f"no other demo in {self.path}",
                found="one is running"
                + (f" at {running.url} (pid {running.keeper_pid})" if running else ""),
                do=f"use it, stop it with `{self.stop_command()}`, or name another --dir and --port",
            ) from None
        return descriptor

    def running(self) -> Running | None:
        """What demo.json says; None if there is none."""
        try:
            return Running(**json.loads(self.state.read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def write_running(self, running: Running) -> None:
        """Say how to reach and stop the demo that was just started."""
        self.state.write_text(json.dumps(asdict(running), indent=2) + "\n", "utf-8")

    def forget(self) -> None:
        """Remove what is worth nothing when the demo has ended."""
        self.state.unlink(missing_ok=True)
        self.keys.unlink(missing_ok=True)

    def stop_command(self) -> str:
        """The command line that stops a kept demo here."""
        default = self.path == Path("build/demo").absolute()
        return "rayserve demo --stop" + ("" if default else f" --dir {self.path}")
