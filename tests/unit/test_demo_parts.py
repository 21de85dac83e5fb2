"""The demo's smaller parts: interruptions, progress, logs, host, folder and spec."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import stat
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from rayserve.clients import ServeDetails, app_status
from rayserve.demo import cluster, host, local_ray, logs
from rayserve.demo.interrupts import Interrupted, Interrupts
from rayserve.demo.progress import Progress
from rayserve.demo.workdir import Running, WorkDir
from rayserve.errors import HostError, StartError
from rayserve.ports import RANGES
from rayserve.spec import parse_spec

REPOSITORY = Path(__file__).parents[2]


class Clock:
    """Seconds that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_interrupts_and_the_next_do_not(number):
    """Clean-up after an interruption is not cut short by a second Ctrl-C."""
    before = signal.getsignal(number)
    with Interrupts():
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before


def test_a_held_interruption_comes_when_the_block_ends():
    """What must not be torn apart is finished first."""
    finished = []

    def body(interrupts):
        with interrupts.hold():
            os.kill(os.getpid(), signal.SIGINT)
            finished.append("block")
        finished.append("beyond")

    with Interrupts() as interrupts, pytest.raises(Interrupted):
        body(interrupts)
    assert finished == ["block"]


def test_after_ignore_nothing_interrupts():
    """The clean-up of a run that ended well is not interrupted either."""
    finished = []
    with Interrupts() as interrupts:
        interrupts.ignore()
        os.kill(os.getpid(), signal.SIGINT)
        finished.append("clean-up")
        assert signal.getsignal(signal.SIGINT) == interrupts._on_signal  # nor by Python's own
    assert finished == ["clean-up"]


def test_progress_off_a_terminal_is_lines_and_a_heartbeat():
    """A changed detail is shown at once, the same one every five seconds, the end with its time."""
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream, clock=clock)
    with progress.step("serve"):
        for second in range(8):
            clock.now = float(second)
            progress.tick("weights")
        progress.done("ready")
    lines = stream.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["…", "…", "✓"]
    assert lines[-1].split() == ["✓", "serve", "7.0", "s", "ready"]
    assert progress.timings == {"serve": 7.0}
    assert "\x1b" not in stream.getvalue()


def test_progress_on_a_terminal_redraws_one_line():
    """The live line is redrawn in place and ends with one newline."""
    stream = io.StringIO()
    progress = Progress(stream, live=True, clock=Clock())
    with progress.step("ray"):
        progress.tick("head")
        progress.tick("agents")
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().count("\r\x1b[2K") == 4


def test_progress_marks_a_failed_step():
    """A step that raises is shown as failed, and has no timing."""
    stream = io.StringIO()
    progress = Progress(stream, clock=Clock())
    with pytest.raises(ValueError, match="no"), progress.step("ray"):
        raise ValueError("no")
    assert "✗ ray" in stream.getvalue()
    assert progress.timings == {}


def test_progress_survives_the_end_of_its_terminal():
    """A closed terminal must not keep the demo from stopping what it started."""

    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    progress = Progress(Gone(), clock=Clock())
    with progress.step("stop"):
        progress.tick("still")
    assert progress.timings == {"stop": 0.0}


def test_phase_of_a_start_log():
    """Finished phases with their seconds, and the one that runs."""
    lines = [
        "INFO start 1a: phase=import begins",
        "INFO start 1a: phase=import seconds=12.34",
        "INFO start 1a: phase=config begins",
        "something else",
    ]
    assert logs.current_phase(lines) == "import 12.3 s · config …"
    assert logs.current_phase([]) == ""


def test_lines_that_explain_a_failure():
    """The root cause first, without log prefixes, colours, repetitions and the code in between."""
    prefix = "ERROR 11-29 15:20:14 [multiproc_executor.py:953] "
    lines = [
        "INFO all is well",
        "UserWarning: an Error: that is none",
        prefix + "Traceback (most recent call last):",
        prefix + "    raise ValueError(message)",
        f"\x1b[31m{prefix}safetensors.SafetensorError: incomplete metadata\x1b[0m",
        "safetensors.SafetensorError: incomplete metadata",
        "(EngineCore pid=7) ERROR 11-29 15:20:15 [core.py:1] RuntimeError: see above",
        "Worker 3 died: SIGILL",
    ]
    assert logs.explaining_lines(lines) == [
        "safetensors.SafetensorError: incomplete metadata",
        "RuntimeError: see above",
        "Worker 3 died: SIGILL",
    ]
    assert logs.explaining_lines(["INFO fine", "this failed", ""]) == ["this failed"]
    assert logs.explaining_lines(["only", "this", ""]) == ["only", "this"]


def test_a_long_message_is_its_first_line_and_its_last():
    """Serve's message is a whole traceback; a short one stays whole."""
    text = "\n".join(f"line {index}" for index in range(100))
    assert logs.first_and_last(text).split() == ["line", "0", "…", "line", "99"]
    assert logs.first_and_last("one\n\ntwo") == "one\n  two"


def test_half_a_phase_line_is_skipped(tmp_path):
    """The engine may be writing while the demo reads."""
    file = tmp_path / "rayserve-phases-1.jsonl"
    file.write_text('{"phase": "weights", "seconds": 1.5}\n{"phase": "pro')
    assert logs.read_engine_phases(tmp_path) == "weights 1.5 s"


def test_a_taken_port_names_its_holder():
    """The message has the port, its name and the process that listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(HostError) as error:
            host.check_port(port, "HTTP (--port)")
    assert f"free port {port} for HTTP (--port)" in error.value.needed
    assert f"pid {os.getpid()}" in error.value.found


def test_free_ports_differ():
    """No two names get the same port, and none gets one that Ray's workers may pick."""
    names = [str(index) for index in range(50)]
    ports = set(host.free_ports(names).values())
    assert len(ports) == 50
    assert not any(port in taken for port in ports for taken in RANGES)


def test_little_memory_is_refused(monkeypatch):
    """The message says how much is needed and how much there is."""
    real = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: real._replace(available=1024**3))
    with pytest.raises(HostError, match=r"free memory\n  found: 1\.0 GiB"):
        host.check_host(1)


def test_a_containers_small_shared_memory_is_refused(monkeypatch):
    """64 MiB, what containers get by default, is refused with the option that helps."""
    plenty = psutil.virtual_memory()._replace(available=1024**4)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: plenty)
    real = host.shutil.disk_usage("/")
    monkeypatch.setattr(host.shutil, "disk_usage", lambda _: real._replace(free=64 * 1024**2))
    with pytest.raises(HostError, match="--shm-size"):
        host.check_host(1)


def test_private_files_are_private(tmp_path):
    """Keys and tokens are readable by their owner only, also where an open file stood before."""
    file = tmp_path / "keys"
    file.write_text("old")
    file.chmod(0o644)
    host.write_private(file, "secret")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text() == "secret"


def test_temp_dir_is_short_whatever_tmpdir_says(monkeypatch):
    """A long TMPDIR would exceed the length of Unix socket paths."""
    monkeypatch.setattr(host.tempfile, "gettempdir", lambda: "/var/folders/long/long/long/T")
    folder = host.make_temp_dir()
    try:
        assert len(str(folder)) <= len("/tmp/rsd-12345678")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    finally:
        folder.rmdir()


def test_a_second_demo_in_the_folder_is_refused(tmp_path):
    """It learns where the first one is and how to stop it; when that ends, the folder is free."""
    work = WorkDir(tmp_path / "demo")
    held = work.lock()
    work.write_running(Running("id", 4242, 0.0, "/tmp/x", "http://127.0.0.1:8000/r/v1"))
    with pytest.raises(HostError) as error:
        WorkDir(tmp_path / "demo").lock()
    assert "http://127.0.0.1:8000/r/v1 (pid 4242)" in error.value.found
    assert f"rayserve demo --stop --dir {tmp_path / 'demo'}" in error.value.do
    os.close(held)
    os.close(work.lock())


def test_a_folder_that_cannot_be_made_is_a_readable_error(tmp_path):
    """The path and the system's reason are in the message."""
    (tmp_path / "file").touch()
    with pytest.raises(HostError, match="Not a directory"):
        WorkDir(tmp_path / "file" / "demo").lock()


def test_a_reused_pid_is_not_the_keeper():
    """The keeper is known by its start time too."""
    started = psutil.Process().create_time()
    assert Running("id", os.getpid(), started, "", "").keeper() is not None
    assert Running("id", os.getpid(), started - 100, "", "").keeper() is None


def test_damaged_state_is_no_state(tmp_path):
    """A half-written demo.json is treated as none."""
    work = WorkDir(tmp_path)
    work.state.write_text('{"demo_id": "x"')
    assert work.running() is None


def test_the_written_spec_is_the_inventorys(tmp_path):
    """`rayserve demo` serves what inventories/demo plans, but for the paths of the run."""
    path = REPOSITORY / "inventories/demo/group_vars/all/cluster.yml"
    inventory = parse_spec(path.read_text(), str(path)).model_dump()
    work = WorkDir(tmp_path)
    mine = parse_spec(cluster.cluster_yml(work, port=8000, ranks=1), "cluster.yml").model_dump()
    for spec in (mine, inventory):
        del spec["state_dir"], spec["model"]["path"], spec["model"]["config"]
        del spec["endpoint"]["api_key_file"]
    assert mine == inventory


def test_paths_with_blanks_and_quotes_are_written_right(tmp_path):
    """A strange folder name survives YAML."""
    work = WorkDir(tmp_path / 'it\'s "my": # demo')
    spec = parse_spec(cluster.cluster_yml(work, port=8123, ranks=4), "cluster.yml")
    assert spec.model.path == str(work.model)
    assert spec.endpoint.port == 8123
    assert spec.node_pools[0].gpus_per_host == 4


def test_rays_environment_is_the_demos_own(tmp_path):
    """Another Ray's address, token and switches do not leak in; the user's other variables do."""
    base = {
        "RAY_ADDRESS": "10.0.0.1:6379",
        "VLLM_API_KEY": "x",
        "HOME": "/h",
        "TMPDIR": "/elsewhere",
    }
    ports = dict.fromkeys([*local_ray.RAY_PORTS, *local_ray.SERVE_PORTS], 1)
    env = local_ray.environment(base, tmp_path, ports)
    assert "RAY_ADDRESS" not in env
    assert "VLLM_API_KEY" not in env
    assert env["HOME"] == "/h"
    assert env["TMPDIR"] == str(tmp_path / "t")
    assert env["RAY_AUTH_MODE"] == "token"


def test_every_port_of_ray_is_chosen(tmp_path):
    """No port of the head is left to its default, where another Ray may listen."""
    ports = {name: 1000 + index for index, name in enumerate(local_ray.RAY_PORTS)}
    command = local_ray.ray_command(tmp_path, ports, 8)
    assert command[command.index("--dashboard-port") + 1] == str(ports["dashboard"])
    assert command[command.index("--num-gpus") + 1] == "8"
    assert all(option in command for option in local_ray.RAY_PORTS.values())


def test_a_dashboard_that_does_not_come_is_told_with_what_was_seen(tmp_path, monkeypatch):
    """Another program on its port is not called silence."""
    stranger = "does not answer as Ray's dashboard does: '<html>'"
    api = SimpleNamespace(url="http://127.0.0.1:1", missing=lambda: stranger)
    process = SimpleNamespace(poll=lambda: None)
    monkeypatch.setattr(local_ray, "START_TIMEOUT_S", 0.0)
    monkeypatch.setattr(local_ray, "POLL_S", 0.0)
    ray = local_ray.LocalRay("id", tmp_path, tmp_path / "log", api, process, None)
    with pytest.raises(StartError, match=r"127\.0\.0\.1:1 within 0 s") as error:
        ray.wait_until_up(lambda _text: None)
    assert error.value.found == stranger


def test_state_of_an_application():
    """The messages of application and deployments are joined; an unknown one has no state."""
    details = {
        "applications": {
            "a": {
                "status": "DEPLOYING",
                "message": "",
                "deployments": {"Engine": {"message": "failed to start 1 times"}},
            }
        },
        "proxies": {"n": {"status": "HEALTHY"}},
    }
    status = app_status(ServeDetails.model_validate_json(json.dumps(details)), "a")
    assert (status.state, status.message) == ("DEPLOYING", "failed to start 1 times")
    assert status.proxies_healthy
    assert app_status(ServeDetails(applications={}), "a").state == ""


@pytest.mark.parametrize(
    "state, serves",
    [("RUNNING", True), ("UPDATING", True), ("STARTING", False), ("STOPPING", False)],
)
def test_a_replica_counts_that_takes_requests(state, serves):
    """One that starts or stops serves nobody; one that takes new limits does."""
    replicas = [{"state": "STARTING"}, {"state": state}]
    details = {"applications": {"a": {"deployments": {"Engine": {"replicas": replicas}}}}}
    assert app_status(ServeDetails.model_validate(details), "a").has_replica is serves
