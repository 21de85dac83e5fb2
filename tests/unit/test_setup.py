"""How the set-up judges what it finds, and what it says when a step fails."""

from __future__ import annotations

import os
import subprocess

import pytest

from scripts import setup_browser, setup_venv
from scripts.setup_venv import failed, is_complete, parse_pins, show_step


@pytest.fixture
def dist_info(tmp_path):
    """An installed distribution of two files."""
    info = tmp_path / "thing-1.0.dist-info"
    info.mkdir()
    (tmp_path / "thing.py").write_text("x = 1\n")
    (info / "METADATA").write_text("Name: thing\n")
    (info / "RECORD").write_text(
        "thing.py,sha256=a,6\nthing-1.0.dist-info/METADATA,sha256=b,12\n"
        "thing-1.0.dist-info/RECORD,,\n"
    )
    return info


def test_a_whole_distribution_is_left_alone(dist_info):
    """When every recorded file is there in its size, nothing is repaired."""
    assert is_complete(dist_info)


def test_a_compiled_file_that_python_rewrote_is_no_damage(dist_info):
    """numpy ships .pyc files, whose size changes when they are compiled again."""
    with (dist_info / "RECORD").open("a") as record:
        record.write("__pycache__/thing.cpython-311.pyc,sha256=c,999\n")
    assert is_complete(dist_info)


@pytest.mark.parametrize("harm", ["missing", "truncated", "no record", "empty record"])
def test_a_half_written_distribution_is_noticed(dist_info, harm):
    """Whatever an interrupted installation leaves behind does not count as installed."""
    module = dist_info.parent / "thing.py"
    if harm == "missing":
        module.unlink()
    elif harm == "truncated":
        module.write_text("x =")
    elif harm == "no record":
        (dist_info / "RECORD").unlink()
    else:
        (dist_info / "RECORD").write_text("")
    assert not is_complete(dist_info)


@pytest.mark.parametrize(
    "output, advice",
    [
        ("ERROR: Could not install: [Errno 28] No space left on device", "disk space"),
        ("ERROR: No matching distribution found for click==8\n(from versions: none)", "reaches"),
        ("(from versions: 7, 7.1)\nERROR: No matching distribution found for click==8", "lacks"),
        ("WARNING: Retrying after connection broken by 'NewConnectionError'", "reaches"),
        ("Segmentation fault", "setup.log"),
    ],
)
def test_a_failed_step_says_what_to_do(output, advice):
    """The last lines of pip lead to the next thing to do, and are shown."""
    message = str(failed("pip: click", output.splitlines()))
    assert advice in message.partition("do:")[2]
    assert output.splitlines()[-1] in message


def test_progress_counts_packages_and_nothing_else():
    """Only a line that begins a package counts as a step."""
    assert show_step("Collecting click==8.5.1 (from -r cpu.lock)\n", 3) == 1
    assert show_step("  Downloading click-8.5.1.whl\n", 3) == 0
    assert show_step("Installing collected packages: click\n", 3) == 0


def test_a_lock_is_read_without_comments_and_markers():
    """The set-up, which has no packaging library, reads the same pins as scripts/lock.py."""
    text = '# title\npip==26.3\ntriton==3.9.0 ; platform_machine == "x86_64"\n'
    assert parse_pins(text) == {"pip": "26.3", "triton": "3.9.0"}


def test_a_python_that_cannot_be_used_is_refused_by_name():
    """RAYSERVE_PYTHON is not silently replaced by another Python."""
    done = subprocess.run(
        ["sh", str(setup_venv.ROOT / "scripts" / "setup")],
        env={**os.environ, "RAYSERVE_PYTHON": "/bin/false"},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 4
    assert "RAYSERVE_PYTHON=/bin/false" in done.stderr
    assert "do:" in done.stderr


@pytest.fixture
def pip_calls(monkeypatch):
    """Say how pip's calls end, in order; what it was called with is returned."""

    def prepare(*endings: str) -> list[list[str]]:
        seen: list[list[str]] = []

        def pip(arguments, *, what):
            seen.append(list(arguments))
            tail = endings[len(seen) - 1]
            if tail:
                raise failed(f"pip: {what}", tail.splitlines())

        monkeypatch.setattr(setup_venv, "pip", pip)
        return seen

    return prepare


NO_CPU_BUILD = "(from versions: 2.0)\nERROR: No matching distribution found for torch==2.9+cpu"


def test_torch_comes_from_the_configured_index_where_that_has_it(pip_calls):
    """A mirror of one's own is asked first, and nobody else where it answers."""
    seen = pip_calls("")
    setup_venv.install_torch("2.9+cpu")
    assert seen == [["torch==2.9+cpu"]]


def test_torch_comes_from_its_project_where_the_configured_index_has_none(pip_calls, capsys):
    """The second index is named before it is asked."""
    seen = pip_calls(NO_CPU_BUILD, "")
    setup_venv.install_torch("2.9+cpu")
    assert seen == [
        ["torch==2.9+cpu"],
        ["torch==2.9+cpu", "--index-url", setup_venv.TORCH_CPU_INDEX],
    ]
    assert f"asking {setup_venv.TORCH_CPU_INDEX}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "ending", ["OSError: [Errno 28] No space left on device", "connection broken by 'Timeout'"]
)
def test_torch_is_not_asked_for_elsewhere_for_another_failure(pip_calls, ending):
    """A full disk or an index that does not answer is told as it is."""
    seen = pip_calls(ending)
    with pytest.raises(setup_venv.SetupError, match="torch"):
        setup_venv.install_torch("2.9+cpu")
    assert len(seen) == 1


def test_torch_that_neither_index_has_is_told(pip_calls):
    """The message is of the last one asked."""
    seen = pip_calls(NO_CPU_BUILD, NO_CPU_BUILD)
    with pytest.raises(setup_venv.SetupError, match="lacks this version"):
        setup_venv.install_torch("2.9+cpu")
    assert len(seen) == 2


@pytest.mark.parametrize(
    "there, root, apt, done, said",
    [
        (True, True, True, [], ""),
        (False, False, True, [], "apt-get install chromium-headless-shell"),
        (False, True, False, [], "a test is skipped"),
        (False, True, True, ["update", "install"], "missing on this machine"),
    ],
)
def test_a_browser_is_installed_where_it_can_be(
    monkeypatch, tmp_path, capsys, there, root, apt, done, said
):
    """Only as root, only with apt-get, and only where none is; else it is said what to do."""
    seen = []
    programs = {"apt-get": "/usr/bin/apt-get"} if apt else {}
    if there:
        programs["chromium"] = "/usr/bin/chromium"
    monkeypatch.setattr(setup_browser.shutil, "which", programs.get)
    monkeypatch.setattr(setup_browser.os, "geteuid", lambda: 0 if root else 1000)
    monkeypatch.setattr(setup_browser, "LOG", tmp_path / "build" / "browser.log")
    monkeypatch.setattr(
        setup_browser.subprocess, "run", lambda command, **options: seen.append(command[1])
    )
    assert setup_browser.main() == 0
    assert seen == done
    assert said in capsys.readouterr().out


def test_a_browser_that_cannot_be_installed_stops_nothing(monkeypatch, tmp_path, capsys):
    """A mirror that does not answer is told, with the log; the set-up goes on."""

    def refuse(command, **options):
        raise subprocess.CalledProcessError(100, command)

    monkeypatch.setattr(setup_browser.shutil, "which", {"apt-get": "/usr/bin/apt-get"}.get)
    monkeypatch.setattr(setup_browser.os, "geteuid", lambda: 0)
    monkeypatch.setattr(setup_browser, "LOG", tmp_path / "build" / "browser.log")
    monkeypatch.setattr(setup_browser.subprocess, "run", refuse)
    assert setup_browser.main() == 0
    assert "browser.log" in capsys.readouterr().out
