"""The keeper and the processes below it: all of them end, and nobody else's do."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rayserve.demo import keeper, processes

REPOSITORY = Path(__file__).parents[2]
DEMO_ID = secrets.token_hex(8)  # the tests of another checkout may run beside these

FAMILY = """
import subprocess, sys, time
from pathlib import Path
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True)
orphan = subprocess.Popen(["sh", "-c", "setsid sleep 600 & echo $!"], stdout=subprocess.PIPE)
pid = int(orphan.stdout.readline())
Path(sys.argv[1]).write_text(f"{child.pid} {pid}")
time.sleep(float(sys.argv[2]))
"""
"""A command with a child that ignores SIGTERM, and an orphan in a session of its own."""


def wait_for(condition, seconds=20.0):
    """Poll until the condition holds; fail the test if it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.02)


@pytest.fixture
def family(tmp_path, monkeypatch):
    """Starts a keeper over FAMILY; stops what a failing test leaves."""
    monkeypatch.setattr(keeper, "GRACE_S", 0.3)
    temp_dir = tmp_path / "temp"
    temp_dir.mkdir()
    started = []

    def start(lasts_s: float):
        pids_file = tmp_path / "pids"
        process, lifeline = keeper.start(
            [sys.executable, "-c", FAMILY, str(pids_file), str(lasts_s)],
            demo_id=DEMO_ID,
            temp_dir=temp_dir,
            log=tmp_path / "log",
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), processes.MARK: DEMO_ID},
        )
        started.append(process)
        wait_for(lambda: pids_file.exists() and len(pids_file.read_text().split()) == 2)
        return process, lifeline, [int(pid) for pid in pids_file.read_text().split()], temp_dir

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.wait(20)


def alive(pids):
    """Those of the pids that still run."""
    return [
        pid for pid in pids if psutil.pid_exists(pid) and processes.is_alive(psutil.Process(pid))
    ]


def test_the_end_of_the_lifeline_ends_everything(family):
    """Stubborn children and orphans in other sessions end too, and the folder is removed."""
    process, lifeline, pids, temp_dir = family(600)
    assert len(alive(pids)) == 2
    os.close(lifeline)
    assert process.wait(20) == 0
    assert alive(pids) == []
    assert not temp_dir.exists()


def test_a_keeper_hears_no_key_of_the_terminal_and_shares_its_session(family):
    """Ctrl-C goes to the demo's process group alone; of two sessions Linux would let one starve."""
    process, lifeline, pids, _ = family(600)
    assert os.getpgid(process.pid) == process.pid != os.getpgrp()
    assert os.getsid(process.pid) == os.getsid(0)
    os.close(lifeline)
    assert process.wait(20) == 0
    assert alive(pids) == []


def test_a_kept_family_outlives_the_lifeline_and_ends_on_sigterm(family):
    """After KEEP the closed lifeline means nothing; SIGTERM to the keeper ends everything."""
    process, lifeline, pids, temp_dir = family(600)
    os.write(lifeline, keeper.KEEP)
    os.close(lifeline)
    time.sleep(3 * keeper.POLL_S)
    assert process.poll() is None
    assert len(alive(pids)) == 2
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert alive(pids) == []
    assert not temp_dir.exists()


def test_a_command_that_ends_by_itself_takes_its_family_along(family):
    """The rest is stopped at once; the folder stays until the demo has read its logs."""
    process, lifeline, pids, temp_dir = family(0)
    wait_for(lambda: not alive(pids))
    assert (temp_dir / keeper.ENDED).exists()
    os.close(lifeline)
    assert process.wait(20) == 1
    assert not temp_dir.exists()


def test_the_mark_finds_what_a_killed_keeper_left(family):
    """Without a keeper the environment's mark still finds every process, and only those."""
    process, lifeline, pids, temp_dir = family(600)
    stranger = subprocess.Popen(["sleep", "600"])
    try:
        process.kill()
        process.wait()
        os.close(lifeline)

        def find():
            return processes.marked(DEMO_ID, str(temp_dir))

        assert set(pids) <= {one.pid for one in find()}
        assert processes.stop(find, grace_s=0.3) == []
        assert alive(pids) == []
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


SEGMENTS = """
import signal, sys, time
from multiprocessing import resource_tracker, shared_memory
resource_tracker.register = lambda *_: None
name, held = sys.argv[1], []
def more(*_):
    held.append(shared_memory.SharedMemory(f"{name}-{len(held)}", create=True, size=4096))
if sys.argv[2] == "asked":
    signal.signal(signal.SIGTERM, more)
else:
    while len(held) < 20_000:
        more()
        print(flush=True) if len(held) == 1 else time.sleep(0.001)
more()
print(flush=True)
time.sleep(600)
"""
"""A process that maps one more piece of shared memory when it is asked to end, or without pause."""


@pytest.mark.parametrize("when", ["asked", "always"])
def test_shared_memory_that_is_made_while_all_ends_goes_too(when):
    """What is mapped until the last moment is found, however late it was made."""
    name = f"rayserve-test-{os.getpid()}-{when}"
    command = [sys.executable, "-c", SEGMENTS, name, when]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        one = psutil.Process(process.pid)

        def find():
            return [one] if processes.is_alive(one) else []

        assert processes.stop(find, grace_s=0.3) == []
    assert list(Path("/dev/shm").glob(f"{name}-*")) == []


def test_a_reader_of_the_logs_is_not_ours(tmp_path):
    """A process of somebody else that has a file of the demo open is left alone."""
    log = tmp_path / "log"
    log.touch()
    reader = subprocess.Popen(["tail", "-f", str(log)], stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: str(log) in processes._open_paths(reader.pid))
        assert processes.marked("another", str(tmp_path)) == []
    finally:
        reader.kill()
        reader.wait()


def test_shared_memory_in_use_stays(tmp_path):
    """Only files that no process has mapped any more are removed."""
    import mmap

    used = Path("/dev/shm") / f"rayserve-test-{os.getpid()}-used"
    left = used.with_name(f"rayserve-test-{os.getpid()}-left")
    try:
        for file in (used, left):
            file.write_bytes(b"x" * mmap.PAGESIZE)
        with used.open("r+b") as stream, mmap.mmap(stream.fileno(), 0):
            assert used in processes.shared_memory([psutil.Process()])
            processes.remove_unused({used, left})
            assert used.exists()
            assert not left.exists()
    finally:
        used.unlink(missing_ok=True)
        left.unlink(missing_ok=True)


def test_a_keeper_that_cannot_start_leaves_nothing_open(tmp_path):
    """Neither end of the lifeline stays behind, whatever the start failed of."""

    def pipes():
        found = {os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()}
        return {name for name in found if "/pipe:" in name}

    before = pipes()
    starts = [(tmp_path / "no" / "log", {}, OSError), (tmp_path / "log", {"A": "\0"}, ValueError)]
    for log, env, error in starts:
        with pytest.raises(error):
            keeper.start(["true"], demo_id="id", temp_dir=tmp_path, log=log, env=env)
    assert pipes() == before
