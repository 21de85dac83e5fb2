"""What do the kernel and psutil say about the open files of a process?"""

from __future__ import annotations

import os
import socket

import psutil

from benchmarks import open_files


def test_open_files_are_counted_and_named(tmp_path):
    """A new connection, pipe and file of this process are counted and named as such, and no other."""
    me = [(psutil.Process(), "me")]
    before = open_files.count(me)
    listener = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    port = listener.getsockname()[1]
    ends = os.pipe()
    with listener, socket.create_connection(("127.0.0.1", port)), (tmp_path / "log").open("w"):
        accepted, _ = listener.accept()
        after = open_files.count(me)
        accepted.close()
    for end in ends:
        os.close(end)
    added = {
        row["file"]: row["open"][1] - row["open"][0] for row in open_files.changes([before, after])
    }
    assert added == {
        "pipe": 2,
        open_files.file_name(str(tmp_path / "log")): 1,
        f"tcp listen, port {port}": 1,
        f"tcp established, to me at port {port}": 1,
        f"tcp established, from me to port {port}": 1,
    }


def test_no_open_file_is_left_out():
    """The kinds add up to the number of files that psutil counts for the process."""
    child = psutil.Popen(["sleep", "60"])
    try:
        assert open_files.count([(child, "sleep")]).total() == child.num_fds()
    finally:
        child.kill()
        child.wait()


def test_a_process_that_is_gone_holds_nothing():
    """A process that ends before it is counted is no error."""
    child = psutil.Popen(["true"])
    child.wait()
    assert open_files.count([(child, "gone")]).total() == 0
