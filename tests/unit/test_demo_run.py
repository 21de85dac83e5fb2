"""The demo from beginning to end, with stand-ins for Ray, Serve and the model."""

from __future__ import annotations

import io
import json
import os
import signal

import pytest

from rayserve.clients import AppStatus
from rayserve.demo import chat, cluster, host, local_ray, run
from rayserve.demo.interrupts import Interrupts
from rayserve.demo.workdir import Running
from rayserve.errors import HostError, StartError

ANSWER = chat.Answer("a b", 7, 2, 2, 0.05, 0.01)
MOMENTS = ["check_host", "make_model", "prepare", "start", "wait_until_up", "deploy", "ask", "stop"]


class FakeApi:
    """Serve's interface: takes the config, then says `status`."""

    def __init__(self, world):
        self.world = world

    def deploy(self, config):
        self.world.reach("deploy")

    def status(self, app):
        return self.world.status


class FakeRay:
    """A Ray that counts how often it was stopped."""

    demo_id = "id"

    def __init__(self, world, temp_dir):
        self.world, self.temp_dir = world, temp_dir
        self.session = temp_dir / "session_latest"
        self.engine_temp = temp_dir / "t"
        self.api = FakeApi(world)
        self.process = type("Process", (), {"pid": os.getpid()})

    def wait_until_up(self, tick):
        self.world.reach("wait_until_up")

    def check_running(self):
        pass

    def keep(self):
        self.world.kept = True

    def stop(self):
        self.world.reach("stop")
        self.world.stopped += 1
        host.remove_tree(self.temp_dir)
        return []


class World:
    """Everything outside, with a moment at which Ctrl-C comes."""

    def __init__(self, folder):
        self.folder = folder
        self.status = AppStatus("RUNNING", "", True)
        self.interrupt_at = ""
        self.interrupts = 0
        self.stopped = 0
        self.kept = False
        self.temp_dirs = []

    def reach(self, moment):
        if moment == self.interrupt_at and not self.interrupts:
            self.interrupts += 1
            os.kill(os.getpid(), signal.SIGINT)

    def start(self, *, temp_dir, **_):
        self.temp_dirs.append(temp_dir)
        self.reach("start")
        return FakeRay(self, temp_dir)

    def options(self, *, keep=False):
        return run.Options(self.folder, 21123, 1, keep)


def start(options, stream):
    """Run a demo as the command does."""
    with Interrupts() as interrupts:
        return run.run(options, stream, interrupts)


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A world in which everything works unless the test says otherwise."""
    it = World(tmp_path / "demo")

    def at(moment, function=lambda *_, **__: None):
        def stand_in(*args, **kwargs):
            it.reach(moment)
            return function(*args, **kwargs)

        return stand_in

    monkeypatch.setattr(host, "check_host", at("check_host"))
    monkeypatch.setattr(host, "check_port", lambda *_: None)
    make_model = run.make_model
    monkeypatch.setattr(run, "make_model", at("make_model", make_model))
    monkeypatch.setattr(cluster, "prepare", at("prepare", cluster.prepare))
    monkeypatch.setattr(local_ray, "start", it.start)
    monkeypatch.setattr(run, "answers", lambda _: True)
    monkeypatch.setattr(chat, "stream_answer", at("ask", lambda *_, **__: ANSWER))
    return it


def test_a_run_reports_and_leaves_nothing(world):
    """Exit code 0, the figures, Ray stopped once, the key of the run gone, the model kept."""
    stream = io.StringIO()
    code, figures = start(world.options(), stream)
    assert code == 0
    assert world.stopped == 1
    assert figures["ttft_ms"] == 50.0
    assert figures["tokens_per_s"] == 100.0
    assert figures["kept"] is False
    assert set(figures["timings_s"]) == {"check", "model", "plan", "ray", "serve", "answer"}
    assert sorted(path.name for path in world.folder.iterdir()) == [
        "cluster.yml", "lock", "logs", "model", "plan.yml", "serve.yml",
    ]  # fmt: skip
    assert "/metrics" in stream.getvalue()
    assert not world.temp_dirs[0].exists()
    json.dumps(figures)


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_at_any_moment_stops_what_was_started(world, moment):
    """Exit code 130; whatever was started is stopped exactly once, and its folder is gone."""
    world.interrupt_at = moment
    code, figures = start(world.options(), io.StringIO())
    assert world.interrupts == 1
    assert (code, figures) == (130, {})
    began = MOMENTS.index(moment) >= MOMENTS.index("start")
    assert world.stopped == (1 if began else 0)
    assert not any(folder.exists() for folder in world.temp_dirs)
    assert not (world.folder / "demo.json").exists()
    assert not (world.folder / "keys").exists()
    os.close(run.WorkDir(world.folder).lock())  # free again


def test_what_an_earlier_demo_left_is_swept_first(world, tmp_path):
    """When a keeper was killed, the next demo in the folder removes what remained."""
    left = tmp_path / "rsd-left"
    left.mkdir()
    world.folder.mkdir()
    work = run.WorkDir(world.folder)
    work.write_running(Running("no-such-demo", 1, 0.0, str(left), "http://127.0.0.1:1/v1"))
    assert start(world.options(), io.StringIO())[0] == 0
    assert not left.exists()
    assert not work.state.exists()


def test_keep_leaves_it_running_and_says_how_to_stop_it(world):
    """Nothing is stopped; the state file and the key stay; the output has both commands."""
    stream = io.StringIO()
    code, figures = start(world.options(keep=True), stream)
    host.remove_tree(world.temp_dirs[0])
    assert code == 0
    assert figures["kept"] is True
    assert world.kept
    assert world.stopped == 0
    assert (world.folder / "demo.json").exists()
    assert (world.folder / "keys").exists()
    assert "OPENAI_BASE_URL=http://127.0.0.1:21123/" in stream.getvalue()
    assert "rayserve demo --stop" in stream.getvalue()


@pytest.mark.parametrize(
    "status",
    [
        AppStatus("DEPLOY_FAILED", "no such engine", True),
        AppStatus("DEPLOYING", "The deployment failed to start 1 times in a row", True),
    ],
)
def test_a_failed_start_is_told_at_once_with_its_log(world, status, monkeypatch):
    """The first failed try ends the demo, with Serve's message and the lines that explain it."""
    world.status = status
    monkeypatch.setattr(run.logs, "read_explanation", lambda _: ["ValueError: bad head size"])
    with pytest.raises(StartError) as error:
        start(world.options(), io.StringIO())
    assert status.message in error.value.found
    assert "ValueError: bad head size" in error.value.found
    assert world.stopped == 1


def test_an_engine_that_never_gets_ready_misses_its_budget(world, monkeypatch):
    """Past the start budget the demo gives up by itself."""
    world.status = AppStatus("DEPLOYING", "", True)
    monkeypatch.setattr(run, "BEYOND_ENGINE_S", -600.0)
    with pytest.raises(StartError, match="a ready replica within 0 s"):
        start(world.options(), io.StringIO())
    assert world.stopped == 1


def test_a_full_disk_under_ray_is_a_readable_error(world, monkeypatch):
    """What the system says is in the message, and nothing stays."""

    def fail(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(local_ray, "start", fail)
    with pytest.raises(HostError, match="No space left on device"):
        start(world.options(), io.StringIO())
    os.close(run.WorkDir(world.folder).lock())


def test_stopping_where_nothing_runs_is_an_error(tmp_path):
    """`--stop` in a folder without a demo says so."""
    with pytest.raises(HostError, match="a demo that runs in"):
        run.stop(tmp_path, io.StringIO())
