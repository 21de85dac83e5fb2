"""Is an id planned as from a folder, at one commit, whatever the hub answers?"""

from __future__ import annotations

import socket
import time

import pytest

from rayserve.errors import HostError, SpecError
from rayserve.hub import bounds, fetch
from tests.contract.hub_client import (
    CONFIG,
    HERE,
    ID,
    TOKEN,
    cached_files,
    refused,
    shards,
)
from tests.contract.hub_server import COMMIT, LATER, safetensors
from tests.contract.strange_answers import (
    big,
    busy,
    chunks,
    circles,
    climbing,
    endless,
    packed,
    page,
    strange_commit,
    unsized,
)


def test_what_a_hub_keeps_in_xet_comes_over_http_within_bounds(hub, client):
    """No second client fetches it, whatever servers the hub names for that."""

    def kept(handler, file):
        if handler.command != "HEAD":
            return False
        size, elsewhere = str(len(CONFIG)), '<http://127.0.0.1:1/token>; rel="xet-auth"'
        handler.send(
            200, X_Repo_Commit=COMMIT, ETag='"a"', Content_Length=size, X_Xet_Hash="0" * 64,
            Link=elsewhere,
        )  # fmt: skip
        return file == "config.json"

    hub.misbehave = kept
    snapshot = client.open(hub).snapshot(ID, "", HERE)
    assert (snapshot.folder / "config.json").read_bytes() == CONFIG
    assert len(hub.asked("config.json")) == 1


# ── a checkpoint ────────────────────────────────────────────────────────────────────────────────
def test_a_branch_becomes_the_commit_that_it_is(hub, client):
    """The snapshot names the commit, and its folder holds config.json as it is on the hub."""
    snapshot = client.open(hub).snapshot(ID, "", HERE)
    assert snapshot.commit == COMMIT
    assert (snapshot.folder / "config.json").read_bytes() == CONFIG
    assert client.said == [f"{ID}: asking 127.0.0.1 for config.json at main"]


def test_a_cached_commit_asks_nobody(hub, client):
    """What is in the cache under its commit is taken from there without a request."""
    client.open(hub).snapshot(ID, "main", HERE)
    hub.log.clear()
    snapshot = client.open(hub).snapshot(ID, COMMIT, HERE)
    assert (snapshot.folder / "config.json").read_bytes() == CONFIG
    assert hub.log == []


def test_a_branch_is_asked_for_anew_and_taken_from_the_cache_where_nobody_answers(hub, client):
    """A branch that moved gives its new commit; without a hub the last one is taken, and told."""
    client.open(hub).snapshot(ID, "main", HERE)
    hub.repos[ID][LATER] = {"config.json": CONFIG.replace(b"2048", b"4096")}
    hub.refs["main"] = LATER
    assert client.open(hub).snapshot(ID, "main", HERE).commit == LATER
    hub.misbehave = lambda handler, _file: handler.send(503) or True
    assert client.open(hub).snapshot(ID, "main", HERE).commit == LATER
    assert client.said[-1] == f"{ID}: HTTP 503; taking what the cache has"


def test_offline_takes_the_cache_and_nothing_else(hub, client, monkeypatch):
    """HF_HUB_OFFLINE sends no request: a cached branch is found, another id is refused."""
    client.open(hub).snapshot(ID, "main", HERE)
    hub.log.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    client.said.clear()
    assert client.open(hub).snapshot(ID, "", HERE).commit == COMMIT
    assert client.said == []
    with pytest.raises(HostError, match="HF_HUB_OFFLINE is set"):
        client.open(hub).snapshot("acme/other", "", HERE)
    assert hub.log == []


def test_a_file_that_is_not_there_is_asked_for_once(hub, client):
    """The cache keeps in mind that a commit has no quantization file."""
    opened = client.open(hub)
    snapshot = opened.snapshot(ID, "", HERE)
    assert opened.optional(snapshot, "hf_quant_config.json") is None
    hub.log.clear()
    assert client.open(hub).optional(snapshot, "hf_quant_config.json") is None
    assert hub.log == []


def test_headers_are_summed_by_type_and_the_data_is_not_read(hub, client, monkeypatch):
    """Of each file of the index the beginning is asked for; what the index claims counts for nothing."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.repos[ID][COMMIT] |= shards(20)
    opened = client.open(hub)
    assert opened.stored(opened.snapshot(ID, "", HERE)) == {"BF16": 160, "F32": 80}
    asked = hub.asked(".safetensors")
    assert len(asked) == 40  # the hub, and where it redirects to
    assert {one.headers["range"] for one in asked} == {"bytes=0-99999"}
    away = [one for one in asked if one.path.startswith("/cdn")]
    assert len(away) == 20
    assert not any("authorization" in one.headers for one in away)
    assert all(
        one.headers["authorization"] == f"Bearer {TOKEN}" for one in asked if one not in away
    )
    assert not any(name.endswith(".safetensors") for name in cached_files(client.cache))


def test_a_long_header_takes_a_second_request(hub, client):
    """A header beyond the first 100 000 bytes is read whole."""
    hub.repos[ID][COMMIT] |= shards(1, rows=2000)
    opened = client.open(hub)
    assert opened.stored(opened.snapshot(ID, "", HERE)) == {"BF16": 16000, "F32": 4}
    assert len([one for one in hub.asked(".safetensors") if one.path.startswith("/cdn")]) == 2


@pytest.mark.parametrize("ranges", [True, False])
def test_one_file_without_an_index_is_read_where_ranges_are_ignored_too(hub, client, ranges):
    """A server that answers a range with the whole file is read no further than needed."""
    hub.ranges = ranges
    hub.repos[ID][COMMIT]["model.safetensors"] = safetensors(a=("BF16", [2**21], 2**22))
    opened = client.open(hub)
    assert opened.stored(opened.snapshot(ID, "", HERE)) == {"BF16": 2**22}


def test_a_checkpoint_without_safetensors_has_no_sum(hub, client):
    """Neither index nor model.safetensors: nobody knows, which is no error."""
    opened = client.open(hub)
    assert opened.stored(opened.snapshot(ID, "", HERE)) == {}


@pytest.mark.parametrize(
    "change, kind, found",
    [
        (lambda files, name: files.pop(name), SpecError, "no such file"),
        (lambda files, name: files.update({name: files[name][:-1]}), SpecError, "bytes"),
        (lambda files, name: files.update({name: b"<html>" * 20}), SpecError, "a length of"),
        (lambda files, name: files.update({name: b""}), SpecError, "0 bytes"),
    ],
    ids=["missing", "cut", "no-safetensors", "empty"],
)
def test_broken_weights_are_refused(hub, client, change, kind, found):
    """A file that the index names must be there, whole, and what it claims to be."""
    files = hub.repos[ID][COMMIT]
    files |= shards(3)
    change(files, "model-00001-of-00003.safetensors")
    opened = client.open(hub)
    with pytest.raises(kind) as caught:
        opened.stored(opened.snapshot(ID, "", HERE))
    assert found in caught.value.message()
    assert "model-00001-of-00003.safetensors" in caught.value.message()


def failing(name: str):
    """An answer of a server that fails for one file alone."""
    return lambda handler, file: file == name and (handler.send(500) or True)


def test_the_file_that_fails_is_the_one_that_is_named(hub, client):
    """Of many files of weights, the error names the one that the hub does not give."""
    hub.repos[ID][COMMIT] |= shards(12)
    hub.misbehave = failing("model-00007-of-00012.safetensors")
    opened = client.open(hub)
    with pytest.raises(HostError) as caught:
        opened.stored(opened.snapshot(ID, "", HERE))
    assert "model-00007-of-00012.safetensors" in caught.value.needed
    assert caught.value.found == "HTTP 500"


@pytest.mark.parametrize(
    "limit, most, what", [("MAX_TENSORS", 25, "tensors"), ("MAX_CHARACTERS", 250, "characters")]
)
def test_a_checkpoint_with_too_many_tensors_is_refused_before_all_of_it_is_read(
    hub, client, monkeypatch, limit, most, what
):
    """Tensors and their names count file by file: the first few files already end it."""
    monkeypatch.setattr(f"rayserve.files.{limit}", most)
    hub.misbehave = lambda _handler, file: file.endswith(".safetensors") and time.sleep(0.1)
    hub.repos[ID][COMMIT] |= shards(200, rows=10)
    opened = client.open(hub)
    with pytest.raises(SpecError, match=f"at most {most} {what}"):
        opened.stored(opened.snapshot(ID, "", HERE))
    assert len({one.path for one in hub.asked(".safetensors")}) < 100


def test_a_header_that_breaks_off_is_refused(hub, client):
    """Fewer bytes than the range has are not taken for the header."""

    def cut(handler, file):
        if not handler.is_cdn or not file.endswith(".safetensors"):
            return False
        handler.send(206, b"12345678", Content_Range="bytes 0-99999/200000")
        return True

    hub.repos[ID][COMMIT] |= shards(2)
    hub.misbehave = cut
    opened = client.open(hub)
    with pytest.raises(HostError, match="broke off"):
        opened.stored(opened.snapshot(ID, "", HERE))


# ── what goes wrong ─────────────────────────────────────────────────────────────────────────────
def test_unknown_ids_revisions_and_files_are_the_specs_mistake(hub, client):
    """Each is a SpecError that names what there is none of."""
    assert "no `v2`" in refused(client, hub, "v2").found
    del hub.repos[ID][COMMIT]["config.json"]
    error = refused(client, hub)
    assert isinstance(error, SpecError)
    assert "no such file on 127.0.0.1" in error.found
    hub.repos.clear()
    assert "none of this name, or a private one" in refused(client, hub).found


@pytest.mark.parametrize("token", ["", TOKEN], ids=["without", "with"])
@pytest.mark.parametrize(
    "status, code, kind",
    [(401, "", "a private model"), (401, "GatedRepo", "a gated"), (403, "GatedRepo", "a gated")],
)
def test_what_needs_a_token_says_so_and_never_shows_one(
    hub, client, monkeypatch, token, status, code, kind
):
    """The error says whether a token was sent and what to do, and the token is not in it."""
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    hub.misbehave = lambda handler, _file: (
        handler.send(status, token.encode(), X_Error_Code=code) or True
    )
    error = refused(client, hub)
    assert isinstance(error, HostError)
    assert f"HTTP {status}: {kind}" in error.found
    assert error.found.endswith("a token that may not read it" if token else "no token")
    assert ("HF_TOKEN" in error.do) is not bool(token)
    sent = hub.asked("config.json", "HEAD")[0].headers.get("authorization", "")
    assert sent == (f"Bearer {token}" if token else "")


@pytest.mark.parametrize(
    "answer, found",
    [
        (big, "4768 MiB"),
        (endless, "broke off or was wrong"),
        (chunks, "more than 32 MiB"),
        (page, "not a model hub's"),
        (packed, "a packed answer"),
        (climbing, "no plain name"),
        (strange_commit, "not a model hub's"),
        (unsized, "how long the file is"),
        (busy, "HTTP 429: too many requests, wait 3600 s"),
        (circles, "broke off or was wrong (TooManyRedirects)"),
        (lambda handler, _file: handler.send(500) or True, "HTTP 500"),
        (lambda handler, _file: handler.send(503, Retry_After="86400") or True, "HTTP 503"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_strange_answer_is_refused_soon_and_leaves_nothing(hub, client, answer, found):
    """Whatever a server sends ends within seconds in one error, with no part of a file kept."""
    hub.misbehave = answer
    begin = time.monotonic()
    error = refused(client, hub)
    assert found in error.found
    assert time.monotonic() - begin < 20
    assert not (client.cache.parent / "outside").exists()


def test_a_body_that_drips_ends_with_the_time_for_it(hub, client, monkeypatch):
    """A byte now and then keeps no plan waiting for ever."""
    monkeypatch.setattr(fetch, "FILES_S", 1.0)

    def drip(handler, _file):
        handler.send(200, X_Repo_Commit=COMMIT, ETag='"a"', Content_Length="700")
        if handler.command == "GET":
            for _ in range(100):
                handler.wfile.write(b" ")
                time.sleep(0.1)
        return True

    hub.misbehave = drip
    assert "no end of it in 1 s" in refused(client, hub).found


def test_a_server_that_says_nothing_is_given_up(client, monkeypatch):
    """A connection that is taken and never answered ends after the longest wait."""
    monkeypatch.setattr(bounds, "STEP_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        error = refused(client, f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert "no answer in" in error.found


@pytest.mark.parametrize(
    "endpoint, found",
    [
        ("http://127.0.0.1:1", "Connection refused"),
        ("http://no-such-host.invalid", "name"),
        ("http://[::1", "HF_ENDPOINT is no URL"),
        ("http://127.0.0.1:99999", "HF_ENDPOINT is no URL"),
        ("http://two words", "HF_ENDPOINT is no URL"),
        ("http://na\u2100me", "HF_ENDPOINT is no URL"),
        (f"http://{'a' * 64}.invalid", "HF_ENDPOINT is no URL"),
        ("localhost:8000", "HF_ENDPOINT is no URL"),
        ("ftp://127.0.0.1", "HF_ENDPOINT is no URL"),
    ],
)
def test_an_endpoint_that_is_none_says_what_to_check(client, endpoint, found):
    """No listener, no such name, no URL: each is told, with HF_ENDPOINT among what to do."""
    error = refused(client, endpoint)
    assert isinstance(error, HostError)
    assert found in error.found.lower() or found in error.found
    assert "Errno" not in error.message()
    assert "HF_ENDPOINT" in error.found + error.do


def test_a_redirect_to_another_host_carries_no_token(hub, client, monkeypatch):
    """config.json on another origin is fetched from there without the token."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)

    def away(handler, file):
        if handler.is_cdn or file != "config.json":
            return False
        handler.send(
            302, X_Repo_Commit=COMMIT, X_Linked_ETag='"a"', X_Linked_Size=str(len(CONFIG)),
            Location=f"{hub.cdn}/cdn{handler.path}",
        )  # fmt: skip
        return True

    hub.misbehave = away
    snapshot = client.open(hub).snapshot(ID, "", HERE)
    assert (snapshot.folder / "config.json").read_bytes() == CONFIG
    there = [one for one in hub.log if one.path.startswith("/cdn")]
    assert there
    assert not any("authorization" in one.headers for one in there)
