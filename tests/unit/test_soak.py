"""Does the soak see what leaked, and only that?"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import pytest

from benchmarks import census, open_files
from benchmarks.open_files import UDP, Socket
from benchmarks.soak import (
    Job,
    Load,
    Outcome,
    flat_lists,
    judge_counts,
    judge_loads,
    judge_streams,
)
from rayserve.bench import Answer, Census

TITLES = {10: "haproxy", 20: "ray::ServeReplica:a:Engine"}
REPLICA_END, PROXY_END = ("127.0.0.1", 30001), ("127.0.0.1", 51000)
CLIENT_END, CLOSED_END = ("127.0.0.1", 52000), ("127.0.0.1", 53000)
SOCKETS = [
    Socket(20, 4, "listen", ("0.0.0.0", 30001), ""),
    Socket(20, 5, "established", REPLICA_END, PROXY_END),
    Socket(10, 5, "established", PROXY_END, REPLICA_END),
    Socket(20, 6, "close_wait", REPLICA_END, CLOSED_END),
    Socket(20, 7, "established", REPLICA_END, CLIENT_END),
    Socket(99, 3, "established", CLIENT_END, REPLICA_END),
    Socket(20, 8, "", "/tmp/s-71/admin.sock", ""),
    Socket(20, 9, UDP, ("127.0.0.1", 999), ""),
]


def tally_of(links: dict[int, dict[int, str]]) -> dict[tuple[str, str], int]:
    """Files by short names of the processes."""
    found = open_files.tally(TITLES, links, SOCKETS)
    return {(title[-6:], name): number for (title, name), number in found.items()}


def test_a_connection_is_named_by_its_two_ends():
    """Both ends of a connection name the process at the other one and the port that was asked for."""
    found = tally_of({10: {5: "socket:[1]"}, 20: {4: "socket:[2]", 5: "socket:[3]"}})
    assert found == {
        ("aproxy", "tcp established, to ray::ServeReplica:a:Engine at port 30001"): 1,
        ("Engine", "tcp listen, port 30001"): 1,
        ("Engine", "tcp established, from haproxy to port 30001"): 1,
    }


def test_a_connection_that_only_one_side_holds_says_so():
    """A socket whose client is gone is told apart from one whose client was not counted."""
    assert set(tally_of({20: {6: "socket:[1]", 7: "socket:[2]"}})) == {
        ("Engine", "tcp close_wait, from no process to port 30001"),
        ("Engine", "tcp established, from another process to port 30001"),
    }


def test_other_sockets_have_their_kind():
    """Unix and UDP sockets, and those that no table knows, have names of their own."""
    links = {20: {8: "socket:[1]", 9: "socket:[2]", 50: "socket:[3]"}}
    assert set(tally_of(links)) == {
        ("Engine", "unix socket /tmp/s-N/admin.sock"),
        ("Engine", "udp socket"),
        ("Engine", "socket"),
    }


def test_a_descriptor_that_was_used_anew_is_not_taken_for_its_old_socket():
    """Between the two readings a socket may have become a file: the link decides."""
    assert set(tally_of({20: {5: "/tmp/log"}})) == {("Engine", "/tmp/log")}


@pytest.mark.parametrize(
    "link, name",
    [
        ("pipe:[71]", "pipe"),
        ("anon_inode:[eventpoll]", "eventpoll"),
        ("anon_inode:inotify", "inotify"),
        ("/dev/null", "/dev/null"),
        ("/tmp/rsv-k3x/session_2026-11-30/worker-4f.out", "/tmp/rsv-N/session_N-N-N/worker-N.out"),
        ("/memfd:a:[b] (deleted)", "/memfd:a:[b] (deleted)"),
    ],
)
def test_names_of_files_leave_out_what_is_unique(link, name):
    """Two logs of the same kind, or two pipes, count as the same file."""
    assert open_files.file_name(link) == name


def test_only_what_changed_is_listed():
    """The files that grew come first, then those that shrank; steady ones are left out."""
    tallies = [
        Counter({("a", "pipe"): 3, ("a", "log"): 1, ("b", "pipe"): 2}),
        Counter({("a", "pipe"): 3, ("b", "log"): 4, ("b", "pipe"): 3}),
    ]
    assert open_files.changes(tallies) == [
        {"process": "b", "file": "log", "open": [0, 4]},
        {"process": "b", "file": "pipe", "open": [2, 3]},
        {"process": "a", "file": "log", "open": [1, 0]},
    ]


@pytest.mark.parametrize(
    "samples, expected",
    [
        ([(0, 595)], False),
        ([(0, 595), (10, 547), (29, 547)], False),
        ([(0, 595), (10, 547), (29, 547), (30, 547)], True),
        ([(0, 595), (10, 547), (20, 499), (30, 499)], False),
        ([(0, 475), (5, 477), (10, 475), (20, 476)], True),
        ([(0, 475), (10, 485), (20, 495)], True),
    ],
)
def test_a_stack_is_at_rest_once_its_files_see_no_new_low(samples, expected):
    """A falling number is not at rest, a flickering one is, and a growing one is not waited for."""
    assert census.at_rest(samples, quiet_s=20) is expected


REPLICA = "ray::ServeReplica:a:Engine 7"


def a_count(replica_pid: int = 7, pipes: int = 3, **changes: int) -> census.Count:
    """A stack of one replica at rest."""
    held = {"processes": 7, "open_files": 475, "rss_bytes": 10**9, "kv_usage": 0, "running": 0}
    total = Census(**{**held, "waiting": 0, **changes})
    files = Counter({("replica", "pipe"): pipes, ("replica", "/dev/null"): 1})
    return census.Count(total, total, {REPLICA: total.rss_bytes}, files, replica_pid)


def failed(verdicts):
    """Names of the checks that did not pass."""
    return [one.name for one in verdicts if not one.passed]


def test_growth_over_all_rounds_is_a_leak():
    """Few files more in each round are added up, and what came and went is none."""
    assert failed(judge_counts([a_count(), a_count(open_files=480), a_count(open_files=485)]))
    assert not failed(judge_counts([a_count(), a_count(open_files=525), a_count()]))


def test_a_replica_that_came_back_is_noticed():
    """A restart in any round fails, also where the count is the same again."""
    assert failed(judge_counts([a_count(), a_count(8), a_count(8)])) == ["replicas restarted"]


def test_a_report_shows_each_count_and_what_changed():
    """Totals for each count, files of each process, and only the kinds of file that changed."""
    found = census.report([a_count(), a_count(pipes=5, rss_bytes=2 * 10**9)])
    assert found["open_files_by_process"] == {"replica": [4, 6]}
    assert found["open_files_changed"] == [{"process": "replica", "file": "pipe", "open": [3, 5]}]
    assert found["rss_bytes_by_process"] == {REPLICA: [10**9, 2 * 10**9]}
    assert [one["serving"]["open_files"] for one in found["counts"]] == [475, 475]


def test_gauges_that_never_moved_prove_nothing():
    """A round in which the engine showed no requests, or no cache in use, fails."""
    good = Load([], 1.0, running=64, kv_usage=0.01)
    assert not failed(judge_loads([good, good]))
    assert len(failed(judge_loads([good, Load([], 1.0, running=0, kv_usage=0.0)]))) == 2


WORKER, PROXY, DAEMON = "VLLM::Worker 8", "haproxy 9", "raylet 10"


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, 0.0),
        ({REPLICA: 110_000_000, WORKER: 900_000_000}, 0.1),
        ({REPLICA: 90_000_000, WORKER: 900_000_000}, -0.1),
        ({PROXY: 30_000_000, DAEMON: 900_000_000}, 0.0),
        ({"VLLM::Worker 11": 1_000_000_000}, 0.0),
    ],
)
def test_a_process_that_grew_is_seen_beside_one_that_shrank(changes, expected):
    """The largest share counts, of large processes that serve and were there before."""
    held = {REPLICA: 10**8, WORKER: 10**9, PROXY: 14 * 10**6, DAEMON: 2 * 10**8}
    before = dataclasses.replace(a_count(), rss_bytes=held)
    after = dataclasses.replace(a_count(), rss_bytes=held | changes)
    assert census.largest_growth(before, after) == pytest.approx(expected)


def test_memory_is_not_judged_by_nothing():
    """Where no process is left from before, growth is an error and not zero."""
    with pytest.raises(ValueError, match="both before and after"):
        census.largest_growth(a_count(), dataclasses.replace(a_count(), rss_bytes={WORKER: 10**9}))


def test_growth_of_one_process_is_judged():
    """A replica that grows by a tenth fails its own check while the stack's total stands still."""
    after = dataclasses.replace(a_count(), rss_bytes={REPLICA: 1_100_000_000})
    assert failed(judge_counts([a_count(), after])) == [
        "resident memory added by one process, share"
    ]


def an_outcome(cut_after: int = -1, text: str | None = "t", error: str = "") -> Outcome:
    """One stream of the prompt `p`; without a text its client left."""
    answer = None if text is None else Answer(text, 64, "length", 64, done=True)
    return Outcome(Job("p", cut_after), answer, error)


@pytest.mark.parametrize(
    "outcome, failing",
    [
        (an_outcome(), []),
        (an_outcome(cut_after=3, text=None), []),
        (an_outcome(cut_after=62), []),
        (an_outcome(text="u"), ["texts that differ from the prompt's own, alone"]),
        (an_outcome(text=None), ["undisturbed streams complete"]),
        (
            an_outcome(text=None, error="HTTP 500"),
            ["streams that failed", "undisturbed streams complete"],
        ),
        (an_outcome(cut_after=3, text=None, error="HTTP 500"), ["streams that failed"]),
    ],
)
def test_a_stream_is_judged_by_whether_its_client_stayed(outcome, failing):
    """A client that left in good time is no failure; a short, wrong or refused answer is one."""
    assert failed(judge_streams([an_outcome(), outcome], {"p": "t"})) == failing


def test_a_finished_answer_of_a_client_that_was_to_leave_replaces_no_other():
    """A late leaver's whole answer does not stand in for an undisturbed stream that is missing."""
    outcomes = [an_outcome(text=None), an_outcome(cut_after=62)]
    assert failed(judge_streams(outcomes, {"p": "t"})) == ["undisturbed streams complete"]


def test_lists_of_numbers_take_one_line():
    """The file stays the same JSON, with no line for each number."""
    data = {"a": [475, 475.5, -1e-05], "b": [{"c": [1]}], "d": ["x", 2], "e": []}
    text = flat_lists(json.dumps(data, indent=1))
    assert json.loads(text) == data
    assert '"a": [475, 475.5, -1e-05]' in text
