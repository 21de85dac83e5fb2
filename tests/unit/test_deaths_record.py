"""Are deaths remembered across replicas, by nobody but the service, and never half?"""

from __future__ import annotations

import json
import os
import shutil
import threading

import pytest

from rayserve.health.facts import deaths as module
from rayserve.health.facts.deaths import FILE, KEY, MOST_RUNNING, Deaths
from rayserve.health.poison import MOST_DEATHS, Death, Suspicions

NOW = 1_800_000_000.0


def record(folder, revision="r1"):
    """A record as a replica opens it."""
    found = Deaths(folder / "deaths", revision, clock=lambda: NOW)
    found.read()
    return found


def test_the_next_replica_knows_what_the_last_one_died_of(tmp_path):
    """Also another one that runs beside it; of another revision it is not told."""
    first, beside = record(tmp_path), record(tmp_path)
    fingerprint = first.fingerprint("/v1/completions", b"{}")
    first.add({fingerprint, "other"}, {})
    assert beside.read().suspected == {fingerprint, "other"}
    assert beside.fingerprint("/v1/completions", b"{}") == fingerprint
    assert beside.add({fingerprint}, {}).refused == {fingerprint}
    assert first.read().refused == {fingerprint}
    assert record(tmp_path, "r2").read() == Suspicions()


def test_what_ended_well_is_cleared_for_all(tmp_path):
    """A death of which nothing is left is forgotten."""
    first, beside = record(tmp_path), record(tmp_path)
    first.add({"a", "b"}, {})
    assert beside.clear({"a": NOW, "c": NOW}).suspected == {"b"}
    assert first.read().suspected == {"b"}
    assert first.clear({"b": NOW - 1}).suspected == {"b"}
    assert first.clear({"b": NOW}) == Suspicions()
    assert json.loads((tmp_path / "deaths" / FILE).read_text())["deaths"] == []


def test_who_ended_well_before_a_death_is_clear_of_the_ones_before(tmp_path):
    """Told with the death itself: there may be no other moment for it."""
    one = record(tmp_path)
    one.add({"a", "b"}, {})
    assert one.add({"b", "c"}, {"a": NOW}).suspected == {"b", "c"}


def test_path_and_body_make_a_fingerprint_that_only_the_key_can_tell(tmp_path):
    """Another path, another body or another host's key gives another one."""
    one = record(tmp_path)
    other = record(tmp_path / "elsewhere")
    prints = {
        one.fingerprint("/v1/completions", b"a"),
        one.fingerprint("/v1/completions", b"b"),
        one.fingerprint("/v1/embeddings", b"a"),
        other.fingerprint("/v1/completions", b"a"),
    }
    assert len(prints) == 4


def test_nobody_else_reads_it(tmp_path):
    """Folder, key and record are the service's own."""
    record(tmp_path).add({"a"}, {})
    folder = tmp_path / "deaths"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        FILE: 0o600, KEY: 0o600,
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"deaths": 1}', '{"deaths": [{}]}', '{"deaths": [{"at_s": "x"}]}', "\0",
     '{"deaths": [{"at_s": 1, "revision": "r1", "running": 5, "again": [], "clear": []}]}', "[" * 100_000,
     '{"deaths": [{"at_s": 1%s, "revision": "r1", "running": [], "again": [], "clear": []}]}' % ("0" * 400)],
)  # fmt: skip
def test_a_record_that_cannot_be_read_suspects_nobody(tmp_path, text):
    """And the next death is written over it."""
    one = record(tmp_path)
    (tmp_path / "deaths" / FILE).write_text(text)
    assert one.read() == Suspicions()
    assert one.add({"a"}, {}).suspected == {"a"}


def test_a_record_that_is_too_large_suspects_nobody(tmp_path):
    """Nobody waits for its parsing, and the next death is written over it."""
    one = record(tmp_path)
    with (tmp_path / "deaths" / FILE).open("wb") as file:
        file.truncate(module.MOST_RECORD + 1)
    assert one.read() == Suspicions()
    assert one.add({"a"}, {}).suspected == {"a"}


def test_of_a_death_the_first_requests_are_remembered_and_the_record_can_be_read(tmp_path):
    """However many clients left while the engine hung."""
    one = record(tmp_path)
    running = [one.fingerprint("/", str(number).encode()) for number in range(MOST_RUNNING + 9)]
    known = frozenset(running[:MOST_RUNNING])
    assert one.add(running, {}).suspected == known
    one._write((Death(NOW, "r1", known, known, known),) * MOST_DEATHS)
    assert (tmp_path / "deaths" / FILE).stat().st_size < module.MOST_RECORD


@pytest.mark.parametrize("name", [FILE, KEY])
def test_a_pipe_in_its_place_holds_up_nobody(tmp_path, name):
    """It may never be written to; a file is put in its place."""
    record(tmp_path)
    path = tmp_path / "deaths" / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert record(tmp_path).add({"a"}, {}).suspected == {"a"}
    assert path.is_file()


@pytest.mark.parametrize("name", [FILE, KEY])
def test_a_folder_in_its_place_is_an_error_of_the_system(tmp_path, name):
    """It is told, and everything is well once it is away."""
    one = Deaths(tmp_path / "deaths", "r1", clock=lambda: NOW)
    folder = tmp_path / "deaths" / name
    folder.mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        one.add({"a"}, {})
    folder.rmdir()
    assert one.add({"a"}, {}).suspected == {"a"}


def test_a_folder_that_is_removed_is_made_again_with_the_same_key(tmp_path):
    """So that a request has one name on all replicas, whatever a person clears away."""
    one = record(tmp_path)
    fingerprint = one.fingerprint("/", b"a")
    shutil.rmtree(tmp_path / "deaths")
    assert one.read() == Suspicions()
    assert one.add({"a"}, {}).suspected == {"a"}
    assert record(tmp_path).fingerprint("/", b"a") == fingerprint


def test_a_full_disk_leaves_the_old_record(tmp_path, monkeypatch):
    """What could not be written whole is not there at all."""
    one = record(tmp_path)
    one.add({"a"}, {})

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        one.add({"b"}, {})
    assert record(tmp_path).read().suspected == {"a"}
    assert sorted(path.name for path in (tmp_path / "deaths").iterdir()) == [FILE, KEY]


def test_a_replica_that_is_stopped_while_it_writes_stops_no_other(tmp_path, monkeypatch):
    """The wait for it ends, and is told as an error of the system."""
    monkeypatch.setattr(module, "ADD_LOCK_S", 0.05)
    one, other = record(tmp_path), record(tmp_path)
    with one._locked(1.0), pytest.raises(TimeoutError, match="is held"):
        other.add({"a"}, {})
    assert other.add({"a"}, {}).suspected == {"a"}


def test_a_damaged_key_is_made_anew(tmp_path):
    """A key that was cut off fits no old fingerprint, and harms nothing else."""
    record(tmp_path)
    (tmp_path / "deaths" / KEY).write_bytes(b"short")
    assert record(tmp_path).fingerprint("/", b"a")
    assert len((tmp_path / "deaths" / KEY).read_bytes()) == 32


def test_replicas_that_die_at_once_lose_no_death(tmp_path):
    """Each adds to what the others wrote."""
    replicas = [record(tmp_path) for _ in range(8)]
    threads = [
        threading.Thread(target=one.add, args=({f"n{number}"}, {}))
        for number, one in enumerate(replicas)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert record(tmp_path).read().suspected == {f"n{number}" for number in range(8)}
