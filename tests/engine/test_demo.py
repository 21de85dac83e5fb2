"""`rayserve demo` on this machine: the real model, Ray, Serve, HAProxy and engine.

Each test ends with the same question: is anything left that was not there before?
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from openai import AuthenticationError, BadRequestError, OpenAI

from rayserve.demo import host, processes
from rayserve.demo.workdir import Running, WorkDir

REPOSITORY = Path(__file__).parents[2]
START_LIMIT_S = 420
STOP_LIMIT_S = 45
DASHBOARD_PORT = re.compile(r"--dashboard-port[=\0](\d+)")
pytestmark = pytest.mark.timeout(600)


class Run:
    """One `rayserve demo` in a process of its own, its output, and all processes it ever had."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.work = WorkDir(folder)
        self.log = folder.with_suffix(".out")
        self.port = host.free_ports(["http"])["http"]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", "rayserve.cli", "demo",
                    "--dir", str(folder), "--port", str(self.port), *arguments,
                ],
                stdout=subprocess.PIPE if "--json" in arguments else output,
                stderr=output,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONIOENCODING": "utf-8"},
            )  # fmt: skip
        self.seen: set[psutil.Process] = set()
        self.temp_dirs: set[Path] = set()
        self.shared: set[Path] = set()

    def look(self) -> None:
        """Note every process below the demo, and its temporary folder."""
        running = self.work.running()
        if running is not None:
            self.temp_dirs.add(Path(running.temp_dir))
        try:
            self.seen |= set(psutil.Process(self.process.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return
        self.shared |= processes.shared_memory(self.seen)

    def output(self) -> str:
        """What the demo has said so far."""
        return self.log.read_text("utf-8")

    def wait_for(self, pattern: str) -> None:
        """Wait until the output matches."""
        deadline = time.monotonic() + START_LIMIT_S
        while not re.search(pattern, self.output()):
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            self.look()
            time.sleep(0.1)
        self.look()

    def wait(self, limit_s: float) -> int:
        """The exit code."""
        deadline = time.monotonic() + limit_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.output()
            self.look()
            time.sleep(0.1)
        return self.process.returncode

    def left(self) -> list[str]:
        """Everything of this demo that still exists."""
        found = [f"process {p}" for p in self.seen if processes.is_alive(p)]
        found += [f"folder {folder}" for folder in self.temp_dirs if folder.exists()]
        found += [f"shared memory {file}" for file in self.shared if file.exists()]
        found += [f"socket {c}" for c in psutil.net_connections("tcp") if self._listens(c)]
        for process in psutil.process_iter():
            try:
                values = process.environ().get(processes.MARK)
            except psutil.Error:
                continue
            if values and any(folder.name[4:] in values for folder in self.temp_dirs):
                found.append(f"marked {process}")
        return found

    def _listens(self, connection) -> bool:
        return connection.status == psutil.CONN_LISTEN and connection.laddr.port == self.port


@pytest.fixture
def demo(tmp_path):
    """Starts demos; whatever a failing test leaves is stopped by the demo's own means."""
    runs = []

    def start(*arguments: str, name: str = "demo") -> Run:
        runs.append(Run(tmp_path / name, *arguments))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.terminate()
            run.process.wait(STOP_LIMIT_S)
        running = run.work.running()
        keeper = running.keeper() if running else None
        if keeper is not None:
            keeper.terminate()
            keeper.wait(STOP_LIMIT_S)


def test_the_whole_demo(demo):
    """From nothing to an answer, token by token, and back to nothing; the figures are JSON."""
    run = demo("--json")
    code = run.wait(START_LIMIT_S)
    stdout = run.process.stdout.read().decode()
    assert code == 0, run.output()
    figures = json.loads(stdout)
    assert figures["answer_tokens"] == figures["events"] == 64
    assert figures["ttft_ms"] > 0
    assert figures["tokens_per_s"] > 1
    assert run.seen, "no process was ever seen, so that none left proves nothing"
    assert run.shared, "nor any shared memory"
    assert run.left() == []


@pytest.mark.parametrize(
    "moment,number",
    [
        (r"… ray ", signal.SIGINT),
        (r"import \d.*engine …", signal.SIGINT),
        (r"✓ model", signal.SIGTERM),
    ],
)
def test_an_interrupted_demo_leaves_nothing(demo, moment, number):
    """Ctrl-C while Ray starts or while the engine starts, or SIGTERM before: 130, and all ends."""
    run = demo()
    run.wait_for(moment)
    run.process.send_signal(number)
    assert run.wait(STOP_LIMIT_S) == 130, run.output()
    assert run.left() == []


def test_a_killed_demo_leaves_nothing(demo):
    """Even after SIGKILL, which nothing can catch, the keeper ends everything."""
    run = demo()
    run.wait_for(r"✓ ray ")
    run.process.kill()
    run.process.wait()
    deadline = time.monotonic() + STOP_LIMIT_S
    while run.left():
        assert time.monotonic() < deadline, run.left()
        time.sleep(0.2)


def dashboard_of(running: Running) -> str:
    """Where Ray's dashboard of this demo listens."""
    keeper = running.keeper()
    assert keeper is not None
    commands = ["\0".join(one.cmdline()) for one in keeper.children(recursive=True)]
    port = next(found[1] for text in commands if (found := DASHBOARD_PORT.search(text)))
    return f"http://127.0.0.1:{port}"


def where_it_is_told(secret: str, run: Run, running: Running) -> list[str]:
    """Every place but its own file in which the secret can be read by others: processes, files, Ray's API."""
    word = secret.encode()
    found = []
    keeper = running.keeper()
    assert keeper is not None
    for process in [keeper, *keeper.children(recursive=True)]:
        for name in ("environ", "cmdline"):
            with contextlib.suppress(OSError):
                if word in Path(f"/proc/{process.pid}/{name}").read_bytes():
                    found.append(f"{name} of {process}")
    for folder in (run.work.path, Path(running.temp_dir)):
        files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
        assert files
        found += [
            str(path) for path in files if path != run.work.keys and word in path.read_bytes()
        ]
    token = Path(running.temp_dir, "token").read_text()
    for path in ("/api/serve/applications/", "/api/v0/actors?detail=1", "/api/v0/tasks?detail=1"):
        request = urllib.request.Request(dashboard_of(running) + path)
        request.add_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=30) as answer:
            if word in answer.read():
                found.append(path)
    return found


def test_a_kept_demo_serves_refuses_a_second_and_stops(demo, tmp_path):
    """--keep answers clients with the key; a second demo is told why not; --stop ends it all."""
    run = demo("--keep")
    assert run.wait(START_LIMIT_S) == 0, run.output()
    running = run.work.running()
    assert running is not None
    run.seen |= {running.keeper(), *running.keeper().children(recursive=True)}
    run.shared |= processes.shared_memory(run.seen)
    try:
        key = run.work.keys.read_text().strip()
        client = OpenAI(base_url=running.url, api_key=key, max_retries=0)
        assert client.models.list().data[0].id == "demo"
        with pytest.raises(AuthenticationError):
            OpenAI(base_url=running.url, api_key="wrong", max_retries=0).models.list()

        same_folder = demo("--port", "21999")
        assert same_folder.wait(30) == 4
        assert f"{running.url} (pid {running.keeper_pid})" in same_folder.output()

        shutil.copytree(run.work.model, tmp_path / "other" / "model")
        same_port = demo("--port", str(run.port), name="other")
        assert same_port.wait(30) == 4
        assert re.search(rf"free port {run.port} .*\n.*haproxy \(pid \d+\)", same_port.output())
        assert client.models.list().data[0].id == "demo"

        with pytest.raises(BadRequestError):
            client.completions.create(model="demo", prompt="a", max_tokens=10**6)
        assert where_it_is_told(key, run, running) == []
        with pytest.raises(
            urllib.error.HTTPError, match="401"
        ):  # Ray's own token closes its dashboard
            urllib.request.urlopen(dashboard_of(running) + "/api/serve/applications/", timeout=10)
    finally:
        command = [sys.executable, "-m", "rayserve.cli", "demo", "--stop", "--dir", run.work.path]
        stopped = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, check=False
        )
    assert stopped.returncode == 0
    assert run.left() == []
    assert not run.work.state.exists()
    assert not run.work.keys.exists()
