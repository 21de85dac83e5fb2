"""Is a file that is not what it should be refused before it costs anything?"""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from rayserve import files
from rayserve.errors import SpecError
from rayserve.files import read_bytes, read_config

MOST = 1000


def make_socket(path: Path) -> None:
    """A socket that is bound and closed again: its file stays."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


@pytest.mark.parametrize(
    "make, found",
    [
        (Path.mkdir, "a folder"),
        (os.mkfifo, "a pipe"),
        (make_socket, "a socket"),
        (lambda path: path.symlink_to("/dev/null"), "a device"),
    ],
    ids=["folder", "pipe", "socket", "device"],
)
def test_what_is_no_regular_file_is_not_opened(tmp_path, monkeypatch, make, found):
    """Its kind is told, and it is never opened, since opening a device may do something."""
    make(tmp_path / "x")
    monkeypatch.setattr(files.os, "open", lambda *_: pytest.fail("it was opened"))
    with pytest.raises(SpecError) as caught:
        read_bytes(tmp_path / "x", MOST)
    assert caught.value.found == found
    assert caught.value.do


def test_a_loop_of_links_is_told(tmp_path):
    """A link to itself is an error of ours."""
    (tmp_path / "x").symlink_to("x")
    for read in (lambda path: read_bytes(path, MOST), read_config):
        with pytest.raises(SpecError) as caught:
            read(tmp_path / "x")
        assert caught.value.found == os.strerror(errno.ELOOP)


def test_a_link_to_nothing_names_its_target(tmp_path):
    """As in a copy of a download cache whose blobs stayed behind."""
    (tmp_path / "x").symlink_to("../blobs/0123")
    with pytest.raises(SpecError, match="blobs/0123, which is not there"):
        read_config(tmp_path / "x")


def test_a_file_without_permission_says_what_to_correct(tmp_path, monkeypatch):
    """Owner and mode are to be corrected."""

    def refuse(path, *flags):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    (tmp_path / "x").touch()
    monkeypatch.setattr(files.os, "open", refuse)
    with pytest.raises(SpecError, match="owner and mode"):
        read_bytes(tmp_path / "x", MOST)


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_a_name_that_no_file_has_is_an_error_of_ours(tmp_path, name):
    """What the system refuses as a name is told with its own words."""
    with pytest.raises(SpecError, match="a file that can be read"):
        read_config(tmp_path / name)


@pytest.mark.parametrize("name", ["none.json", "file/none.json"])
def test_no_config_is_told_from_a_broken_one(tmp_path, name):
    """A file that is not there is none; the plan says what it is needed for."""
    (tmp_path / "file").touch()
    assert read_config(tmp_path / name) is None


def test_a_large_file_is_refused_by_its_size_alone(tmp_path, monkeypatch):
    """Nothing of a gigabyte is read."""
    with (tmp_path / "x").open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(SpecError, match="1024 MiB"):
        read_bytes(tmp_path / "x", MOST)


def test_a_file_of_unknown_size_is_read_to_the_bound():
    """Files of /proc say that they are empty."""
    assert b"MemTotal" in read_bytes(Path("/proc/meminfo"), 2**20)
    with pytest.raises(SpecError, match="at most"):
        read_bytes(Path("/proc/meminfo"), 10)


def test_a_file_that_fails_while_it_is_read_is_an_error_of_ours():
    """The memory of a process is a regular file that cannot be read at its start."""
    with pytest.raises(SpecError, match="a file that can be read"):
        read_bytes(Path("/proc/self/mem"), MOST)
