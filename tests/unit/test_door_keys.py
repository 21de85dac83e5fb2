"""Are API keys read, compared, reloaded and kept secret as they should be?"""

from __future__ import annotations

import hmac
import logging
import os

import pytest

from rayserve.errors import HostError
from rayserve.keyfile import MAX_FILE_BYTES
from rayserve.serving import keys
from rayserve.serving.keys import Account, KeyRing
from tests.unit.door_client import KEY, OTHER_KEY, Clock, key_file


def test_comments_blank_lines_and_spaces_are_not_keys(tmp_path):
    """Only lines with a key count, without the white space around them, and once each."""
    path = key_file(tmp_path, "# first", "", f"  {KEY}\t", KEY, "   ", OTHER_KEY + "\r")
    ring = KeyRing(path, Clock())
    assert len(ring) == 2
    assert ring.account(KEY.encode())
    assert ring.account(OTHER_KEY.encode())
    assert ring.account(b"# first") is None


def test_an_account_is_named_after_the_digest(tmp_path):
    """The public name of a key is 8 hex digits, and neither object shows the key."""
    ring = KeyRing(key_file(tmp_path, KEY), Clock())
    account = ring.account(KEY.encode())
    assert len(account.name) == 8
    assert int(account.name, 16) >= 0
    assert KEY not in repr(ring) + repr(account)
    assert ring.account(KEY.encode()) is account


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o610, 0o601])
def test_a_file_that_others_can_touch_is_refused(mode, tmp_path):
    """Any permission for group or others is an error that names the mode."""
    with pytest.raises(HostError) as error:
        KeyRing(key_file(tmp_path, KEY, mode=mode), Clock())
    assert f"{mode:04o}" in error.value.found


def quoted(content):
    """The lines of a key file that are not comments."""
    return [line for line in content.split(b"\n") if line and not line.startswith(b"#")]


@pytest.mark.parametrize(
    "content,found,line",
    [
        (b"", "none", None),
        (b"# nothing\n\n", "none", None),
        (b"# c\nfifteen-letters\n", "15 characters", 2),
        (KEY.encode() + b"\nkey with spaces in it\n", "a character that is not visible ASCII", 2),
        (b"\xff" * 20, "a character that is not visible ASCII", 1),
        (b"key\x00with-a-null-byte", "a character that is not visible ASCII", 1),
        (b"k" * (MAX_FILE_BYTES + 1), "a larger one", None),
    ],
)
def test_a_wrong_file_is_refused_without_being_quoted(content, found, line, tmp_path):
    """The error says what is wrong and where, and never shows a byte of the file."""
    path = tmp_path / "keys"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(HostError) as error:
        KeyRing(str(path), Clock())
    assert error.value.found == found
    assert error.value.where.line == line
    assert not any(line.decode(errors="replace") in str(error.value) for line in quoted(content))
    assert error.value.__cause__ is None


def test_a_missing_file_or_a_folder_is_refused(tmp_path):
    """What is no file is an error of the host, not a door without keys."""
    with pytest.raises(HostError, match="readable file"):
        KeyRing(str(tmp_path / "absent"), Clock())
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    with pytest.raises(HostError, match="only the service"):
        KeyRing(str(folder), Clock())
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    with pytest.raises(HostError, match="only the service"):
        KeyRing(str(pipe), Clock())


def test_a_file_of_another_user_is_refused(tmp_path, monkeypatch):
    """A file that another user owns could be changed by that user."""
    path = key_file(tmp_path, KEY)
    status = os.stat(path)  # noqa: PTH116
    monkeypatch.setattr(os, "geteuid", lambda: status.st_uid + 1)
    if status.st_uid == 0:
        fields = list(status)
        fields[4] = 4242
        monkeypatch.setattr(os, "fstat", lambda _: os.stat_result(fields))
    with pytest.raises(HostError, match="only the service") as error:
        KeyRing(path, Clock())
    assert error.value.found.startswith("owner uid")


@pytest.mark.parametrize("position", [0, 1, 2])
def test_every_key_is_compared(position, tmp_path, monkeypatch):
    """The comparison runs over all keys whichever of them matches: no early exit to time."""
    ring_keys = [f"key-number-{number}-of-the-ring" for number in range(3)]
    ring = KeyRing(key_file(tmp_path, *ring_keys), Clock())
    calls = []
    original = hmac.compare_digest

    def compare(known, presented):
        calls.append(known)
        return original(known, presented)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert ring.account(ring_keys[position].encode())
    assert len(set(calls)) == len(calls) == 3
    assert ring.account(b"a-key-that-is-not-in-the-ring") is None
    assert len(calls) == 6


def test_a_changed_file_is_read_within_a_second(tmp_path):
    """New keys work and old ones stop working one second later, without a restart."""
    clock = Clock()
    ring = KeyRing(key_file(tmp_path, KEY), clock)
    account = ring.account(KEY.encode())
    key_file(tmp_path, OTHER_KEY, KEY)
    assert ring.account(OTHER_KEY.encode()) is None
    clock.now += 1
    assert ring.account(OTHER_KEY.encode())
    assert ring.account(KEY.encode()) is account
    key_file(tmp_path, OTHER_KEY)
    clock.now += 1
    assert ring.account(KEY.encode()) is None


def test_a_file_put_in_place_by_rename_is_read(tmp_path):
    """An atomic replacement of the same size and time is still another file."""
    clock = Clock()
    path = key_file(tmp_path, KEY)
    ring = KeyRing(path, clock)
    other = tmp_path / "new"
    other.write_text("K" * len(KEY) + "\n")
    other.chmod(0o600)
    status = os.stat(path)  # noqa: PTH116
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(path)
    clock.now += 1
    assert ring.account(b"K" * len(KEY))


@pytest.mark.parametrize("fault", ["mode", "short", "empty", "absent"])
def test_a_broken_new_file_keeps_the_old_keys(fault, tmp_path, caplog):
    """A bad reload is logged once, without content, and the keys stay; the next good file counts."""
    clock = Clock()
    path = key_file(tmp_path, KEY)
    ring = KeyRing(path, clock)
    if fault == "mode":
        key_file(tmp_path, OTHER_KEY, mode=0o644)
    elif fault == "absent":
        (tmp_path / "keys").unlink()
    else:
        key_file(tmp_path, "secret-word" if fault == "short" else "#")
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            clock.now += 1
            assert ring.account(KEY.encode())
    assert ring.account(OTHER_KEY.encode()) is None
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert OTHER_KEY not in caplog.text
    assert "secret-word" not in caplog.text
    key_file(tmp_path, OTHER_KEY)
    clock.now += 1
    assert ring.account(OTHER_KEY.encode())


def test_the_file_is_looked_at_once_a_second(tmp_path, monkeypatch):
    """Between two looks a request costs no system call."""
    clock = Clock()
    ring = KeyRing(key_file(tmp_path, KEY), clock)
    looks = []
    monkeypatch.setattr(keys.Path, "stat", lambda path: looks.append(path) or os.lstat(path))
    for _ in range(10):
        clock.now += 0.25
        ring.account(KEY.encode())
    assert len(looks) == 2


def test_the_window_forgets_second_by_second():
    """The sum is exact to the second, and the wait is the time until it is below the budget."""
    clock = Clock()
    account = Account("a", clock)
    assert account.wait_s(1) == 0
    for _ in range(5):
        account.charge(10)
        clock.now += 1
    assert account.tokens() == 50
    assert account.wait_s(51) == 0
    assert account.wait_s(50) == 55
    assert account.wait_s(10) == 59
    clock.now += 55
    assert account.tokens() == 40
    clock.now += 4
    assert account.tokens() == 0
    assert account.wait_s(1) == 0
