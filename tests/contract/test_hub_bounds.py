"""Does a fetch end in time, and say what to do, whatever server, cache and environment are like?"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from rayserve import inventory
from rayserve.errors import HostError, SpecError, Where
from rayserve.hub import bounds, cache, fetch
from rayserve.planner.support.reading import MAX_NAME, parse_index
from tests.bad_specs import ROOT
from tests.contract.hub_client import (
    CONFIG,
    HERE,
    ID,
    TOKEN,
    cached_files,
    environment,
    plan,
    refused,
    shards,
    spec,
)
from tests.contract.hub_server import COMMIT


def dripping(handler, _file):
    """A head of an answer that never ends, byte by byte."""
    with contextlib.suppress(OSError):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
        for _ in range(600):
            handler.wfile.write(b"X")
            time.sleep(0.1)
    handler.close_connection = True
    return True


def continuing(handler, _file):
    """Nothing but interim answers."""
    with contextlib.suppress(OSError):
        for _ in range(6000):
            handler.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            time.sleep(0.01)
    handler.close_connection = True
    return True


STALL_S = 30
"""That a server holds an answer back; a plan that is told to end does not wait for it."""


# ── time ────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("answer", [dripping, continuing])
def test_a_head_without_an_end_ends_with_the_time_for_it(hub, client, monkeypatch, answer):
    """Bytes that keep coming before an answer begins extend no plan beyond its time."""
    monkeypatch.setattr(fetch, "FILES_S", 1.0)
    hub.misbehave = answer
    begin = time.monotonic()
    assert "no end of it in 1 s" in refused(client, hub).found
    assert time.monotonic() - begin < 10


def test_heads_of_weights_without_an_end_end_with_the_time_for_them(hub, client, monkeypatch):
    """The same holds for the headers, which threads read."""
    monkeypatch.setattr(fetch, "HEADERS_S", 1.0)
    hub.repos[ID][COMMIT] |= shards(3)
    hub.misbehave = lambda handler, file: file.endswith(".safetensors") and dripping(handler, file)
    opened = client.open(hub)
    snapshot = opened.snapshot(ID, "", HERE)
    begin = time.monotonic()
    with pytest.raises(HostError, match="no end of it in 1 s"):
        opened.stored(snapshot)
    assert time.monotonic() - begin < 10


def test_bounds_hold_behind_a_proxy(hub, client, monkeypatch):
    """The connection to a proxy is bound as one to the hub is."""
    monkeypatch.setattr(fetch, "FILES_S", 1.0)
    monkeypatch.setenv("HTTP_PROXY", hub.url)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setattr("tests.contract.hub_server.RESOLVE", _Any())
    hub.misbehave = dripping
    assert "no end of it in 1 s" in refused(client, "http://hub.invalid").found


class _Any:
    """Takes every path for a file."""

    @staticmethod
    def fullmatch(_path: str) -> dict[str, str]:
        """The parts of a path that asks a proxy."""
        return {"id": ID, "revision": "main", "file": "config.json"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_plan_at_once_while_headers_drip(hub, tmp_path, number):
    """No thread that waits for a server keeps the process."""
    begun = threading.Event()

    def drip(handler, file):
        if not file.endswith(".safetensors"):
            return False
        begun.set()
        return dripping(handler, file)

    config = json.loads(CONFIG) | {"quantization_config": {"quant_method": "torchao"}}
    hub.repos[ID][COMMIT] |= {"config.json": json.dumps(config).encode()} | shards(3)
    hub.misbehave = drip
    code, _err, seconds = ended(hub, tmp_path, begun, number)
    assert code != 0
    assert seconds < STALL_S / 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_a_file_comes_leaves_no_part_of_it(hub, tmp_path, number):
    """Ended from outside, a fetch cleans up as it does on Ctrl-C."""
    begun = threading.Event()

    def stall(handler, _file):
        handler.send(200, X_Repo_Commit=COMMIT, ETag='"a"', Content_Length="700")
        if handler.command == "GET":
            handler.wfile.write(b"{")
            begun.set()
            time.sleep(STALL_S)
            handler.close_connection = True
        return True

    hub.misbehave = stall
    code, err, seconds = ended(hub, tmp_path, begun, number)
    assert code == 128 + number, err
    assert "Traceback" not in err
    assert seconds < STALL_S / 2
    assert [name for name in cached_files(tmp_path / "home" / "hub") if name != "main"] == []


def ended(hub, tmp_path, begun, number):
    """Send a signal to a plan once the server is asked: exit code, stderr and seconds to the end."""
    folder = spec(tmp_path / "env")
    with subprocess.Popen(
        [sys.executable, "-m", "rayserve.cli", "plan", str(folder)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env=environment(hub, tmp_path / "home"),
    ) as child:  # fmt: skip
        try:
            assert begun.wait(120)
            time.sleep(0.5)  # the first byte is there, and the client waits for the next
            begin = time.monotonic()
            child.send_signal(number)
            _out, err = child.communicate(timeout=2 * STALL_S)
            seconds = time.monotonic() - begin
        finally:
            child.kill()
    return child.returncode, err, seconds


def test_a_lock_that_another_process_holds_is_told_and_given_up(hub, client, monkeypatch):
    """A plan says that it waits and for what, and ends with its time; once free, it goes on."""
    opened = client.open(hub)
    snapshot = opened.snapshot(ID, "", HERE)
    (lock,) = client.cache.glob(".locks/**/*.lock")
    for each in (snapshot.folder / "config.json", *client.cache.glob("models--*/blobs/*")):
        each.unlink()
    monkeypatch.setattr(fetch, "FILES_S", 2.0)
    monkeypatch.setattr(cache, "QUIET_S", 0.2)
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        error = refused(client, hub)
        assert f"holds {lock}" in error.found
        assert client.said[-1] == f"waiting for another process, which holds {lock}"
        monkeypatch.setattr(fetch, "FILES_S", 20.0)
        threading.Timer(1.0, fcntl.flock, (held, fcntl.LOCK_UN)).start()
        assert client.open(hub).snapshot(ID, "", HERE).commit == COMMIT


# ── answers ─────────────────────────────────────────────────────────────────────────────────────
def test_half_a_file_for_a_whole_one_is_refused(hub, client):
    """A partial answer that nobody asked for is not kept as config.json."""
    hub.misbehave = lambda handler, _file: (
        handler.send(206, CONFIG[:50], X_Repo_Commit=COMMIT, ETag='"a"') or True
    )
    assert "a part of the file" in refused(client, hub).found
    assert cached_files(client.cache) == []


def test_weights_that_end_with_their_header_are_refused(hub, client):
    """Only a local file may be kept without its tensors; on a hub it was cut short."""
    head = json.dumps({"a": {"dtype": "U8", "shape": [2**62], "data_offsets": [0, 2**62]}}).encode()
    hub.repos[ID][COMMIT]["model.safetensors"] = len(head).to_bytes(8, "little") + head
    opened = client.open(hub)
    with pytest.raises(SpecError, match="nothing behind it"):
        opened.stored(opened.snapshot(ID, "", HERE))


@pytest.mark.parametrize(
    "told, found",
    [
        ("120", "too many requests, wait 120 s"),
        (format_datetime(datetime.now(UTC) - timedelta(days=9), usegmt=True), ", wait 0 s"),
        ("Wed, 99 Nov 2055 07:28:00 GMT", "too many requests"),
        ("in 5 days", "too many requests"),
        ("1" * 5000, "too many requests"),
    ],
    ids=["seconds", "past", "no-date", "words", "huge"],
)
def test_too_many_requests_says_how_long_only_where_it_is_known(hub, client, told, found):
    """Retry-After is a number of seconds or a date; what is neither is not quoted."""
    hub.misbehave = lambda handler, _file: handler.send(429, Retry_After=told) or True
    assert refused(client, hub).found.endswith(found)


def test_a_date_to_retry_after_is_told_in_seconds(hub, client):
    """An HTTP date half an hour from now is half an hour."""
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=1800), usegmt=True)
    hub.misbehave = lambda handler, _file: handler.send(429, Retry_After=later) or True
    seconds = int(refused(client, hub).found.split("wait ")[1].removesuffix(" s"))
    assert 1700 < seconds <= 1800


def test_a_redirect_to_a_file_is_not_laid_to_the_endpoint(hub, client):
    """The endpoint is a URL: it is the answer that is none."""
    hub.misbehave = lambda handler, _file: (
        handler.send(
            302, X_Repo_Commit=COMMIT, X_Linked_ETag='"a"', X_Linked_Size="9",
            Location="file:///etc/hostname",
        ) or True
    )  # fmt: skip
    assert "a redirect" in refused(client, hub).found


def test_an_index_with_a_name_that_no_file_has_is_told_in_a_few_words():
    """A name of 100 000 characters is refused, and not repeated."""
    index = {"weight_map": {"a": "x" * 100_000 + ".safetensors"}}
    with pytest.raises(SpecError, match=f"at most {MAX_NAME} characters") as caught:
        parse_index(json.dumps(index).encode(), Where("index"))
    assert len(caught.value.message()) < 1000


# ── environment ─────────────────────────────────────────────────────────────────────────────────
def test_a_token_file_that_is_not_needed_is_not_looked_at(hub, client, monkeypatch, tmp_path):
    """With HF_TOKEN set nobody reads the file, and /dev/null is a way to have none."""
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "fifo"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert client.open(hub).snapshot(ID, "main", HERE).commit == COMMIT
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", os.devnull)
    monkeypatch.delenv("HF_TOKEN")
    assert client.open(hub).snapshot(ID, "main", HERE).commit == COMMIT


@pytest.mark.parametrize(
    "name, value, do",
    [
        ("SSL_CERT_FILE", "/nonexistent", "SSL_CERT_FILE"),
        ("HTTP_PROXY", "http://u:secretword@h:notaport", "HTTP_PROXY"),
        ("ALL_PROXY", "ftp://127.0.0.1", "ALL_PROXY"),
        ("HF_HUB_USER_AGENT_ORIGIN", "caf\udce9", "HF_HUB_USER_AGENT_ORIGIN"),
        ("HF_ENDPOINT", "http://127.0.0.1/caf\udce9", "https://host"),
        ("HF_HUB_ETAG_TIMEOUT", "abc", "HF_HUB_ETAG_TIMEOUT"),
        ("HF_HUB_DOWNLOAD_TIMEOUT", "abc", "HF_HUB_DOWNLOAD_TIMEOUT"),
        ("HF_TOKEN_PATH", "folder", "HF_TOKEN_PATH"),
        ("HF_TOKEN_PATH", "fifo", "HF_TOKEN_PATH"),
    ],
)
def test_an_environment_that_cannot_be_used_is_named(hub, tmp_path, name, value, do):
    """The error names the variable to correct, repeats no password, and no traceback is shown."""
    made = {"folder": str(tmp_path), "fifo": str(tmp_path / "fifo")}
    os.mkfifo(made["fifo"])
    env = environment(hub, tmp_path / "home") | {name: made.get(value, value)}
    done = plan(spec(tmp_path / "env"), env, "--json")
    assert done.returncode == 4, done.stderr
    told = json.loads(done.stdout)
    assert do in told["found"] + told["do"]
    assert "Traceback" not in done.stderr
    assert "secretword" not in done.stdout + done.stderr


def test_a_socks_proxy_without_its_package_says_what_to_install(hub, client, monkeypatch):
    """ALL_PROXY that names one is met with an error of ours."""
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "socksio", None)
    assert "socksio" in refused(client, hub).do


def test_offline_says_of_nobody_that_it_is_asked(hub, client, monkeypatch):
    """HF_HUB_OFFLINE without the file at hand: one error, and no word of a hub that is asked."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refused(client, hub).found
    assert client.said == []
    assert hub.log == []


def test_a_full_disk_says_to_make_room(hub, client, monkeypatch):
    """What is missing is space, not a permission."""
    full = OSError(28, "No space left on device")

    def fail(*_args, **_kwargs):
        raise full

    monkeypatch.setattr(fetch, "hf_hub_download", fail)
    error = refused(client, hub)
    assert "No space left" in error.found
    assert "free some space" in error.do


def test_a_full_disk_under_the_plan_says_to_make_room(tmp_path, monkeypatch):
    """The plan's own files do the same, and leave none of themselves."""

    def fail(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(inventory, "_write", fail)
    with pytest.raises(HostError) as caught:
        inventory.write_all({tmp_path / "plan.yml": "x"})
    assert caught.value.do.startswith("free some space there")
    assert list(tmp_path.iterdir()) == []


def test_a_cache_with_bytes_that_are_no_text_is_not_laid_to_a_token(hub, client, monkeypatch):
    """refs/main that is no text is told as what it is, and the token is not suspected."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    client.open(hub).snapshot(ID, "", HERE)
    (ref,) = client.cache.glob("models--*/refs/main")
    ref.write_bytes(b"\xff\xfe")
    with pytest.raises(HostError) as caught:
        client.open(hub).snapshot(ID, "", HERE)
    assert "refs/" in caught.value.do


def test_the_bounds_are_on_every_connection(hub, client):
    """Where the client's insides have moved, this fails: no request would be bound."""
    client.open(hub).snapshot(ID, "", HERE)
    session = bounds.Bounds()._client()
    assert type(session._transport._pool._network_backend).__module__ == "rayserve.hub.wire"
