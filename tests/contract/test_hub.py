"""Is an id planned as from a folder, at one commit, whatever the hub answers?"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from rayserve.errors import HostError, RayserveError, SpecError, Where
from rayserve.hub import Hub, bounds, fetch
from tests.bad_specs import ROOT
from tests.contract.hub_server import COMMIT, LATER, HubServer, safetensors, serving

ID = "acme/tiny"
HERE = Where("cluster.yml", 9, "model.hf_id")
CONFIG = (ROOT / "inventories" / "demo" / "model" / "config.json").read_bytes()
ODD = json.dumps(json.loads(CONFIG) | {"quantization_config": {"quant_method": "torchao"}}).encode()
"""In a format that the planner does not know: only the headers say how large it is."""
TOKEN = "hf_neverShowThisToken"
SPEC = """\
rayserve_cluster:
  name: hub
  profile: local
  node_pools: [{name: gpu, hosts: 1, gpu: A100-80GB-SXM, gpus_per_host: 8}]
  model: {hf_id: acme/tiny, served_name: chat%s}
  parallelism: {tensor: 1}
  endpoint: {ingress: proxy}
"""


@pytest.fixture
def hub():
    """A hub with one small model."""
    with serving({ID: {COMMIT: {"config.json": CONFIG}}}) as server:
        yield server


@dataclass
class Client:
    """A Hub with its own cache, and what it said."""

    cache: Path
    said: list[str]

    def open(self, server: HubServer | str) -> Hub:
        """A client of this server."""
        url = server if isinstance(server, str) else server.url
        return Hub(self.said.append, endpoint=url, cache=self.cache)


@pytest.fixture
def client(tmp_path, monkeypatch):
    """A client without a token, in a cache of its own."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return Client(tmp_path / "hub", [])


def cached_files(cache: Path) -> list[str]:
    """Names of the files in a cache, but for locks and marks."""
    if not cache.exists():
        return []
    return sorted(
        path.name
        for path in cache.rglob("*")
        if path.is_file() and ".locks" not in path.parts and path.name != "CACHEDIR.TAG"
    )


def refused(client: Client, server: HubServer | str, revision: str = "") -> RayserveError:
    """The error that an id gives; nothing of a file is left in the cache."""
    with pytest.raises(RayserveError) as caught:
        client.open(server).snapshot(ID, revision, HERE)
    left = [name for name in cached_files(client.cache) if name not in {"main", "config.json"}]
    assert left == []
    assert caught.value.do
    assert TOKEN not in caught.value.message()
    return caught.value


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


# ── weights ─────────────────────────────────────────────────────────────────────────────────────
def shards(count: int, *, rows: int = 1) -> dict[str, bytes]:
    """A checkpoint of `count` files with `rows` small tensors each, and its index."""
    files, places = {}, {}
    for number in range(count):
        name = f"model-{number:05}-of-{count:05}.safetensors"
        tensors = {f"layers.{number}.{row}": ("BF16", [4], 8) for row in range(rows)}
        files[name] = safetensors(**tensors, **{f"scale.{number}": ("F32", [1], 4)})
        places |= dict.fromkeys([*tensors, f"scale.{number}"], name)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    return files | {"model.safetensors.index.json": json.dumps(index).encode()}


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


def big(handler, _file):
    """A file of 5 GB, of which nothing is sent."""
    handler.send(200, X_Repo_Commit=COMMIT, ETag='"a"', Content_Length=str(5 * 10**9))
    return True


def endless(handler, _file):
    """A small file by its head, without end by its body."""
    handler.send(200, X_Repo_Commit=COMMIT, ETag='"a"', Content_Length="700")
    if handler.command == "GET":
        handler.wfile.write(b"x" * 100)
        handler.close_connection = True
    return True


def chunks(handler, _file):
    """A small file by its head, 64 MiB in chunks by its body."""
    if handler.command == "HEAD":
        handler.send(200, X_Repo_Commit=COMMIT, ETag='"a"', Content_Length="700")
        return True
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    try:
        for _ in range(64):
            handler.wfile.write(b"100000\r\n" + bytes(2**20) + b"\r\n")
        handler.wfile.write(b"0\r\n\r\n")
    except OSError:  # the client has seen enough
        handler.close_connection = True
    return True


def page(handler, _file):
    """A page for people, as a captive portal answers."""
    handler.send(200, b"<html>log in</html>", Content_Type="text/html")
    return True


def packed(handler, _file):
    """A packed body that was not asked for."""
    handler.send(
        200, b"xx", X_Repo_Commit=COMMIT, ETag='"a"', Content_Encoding="gzip", Content_Length="2"
    )
    return True


def climbing(handler, _file):
    """An ETag that is a path out of the cache."""
    handler.send(200, CONFIG, X_Repo_Commit=COMMIT, ETag='"../../../../outside"')
    return True


def strange_commit(handler, _file):
    """A commit that is a path out of the cache."""
    handler.send(200, CONFIG, X_Repo_Commit="../../../outside", ETag='"a"')
    return True


def unsized(handler, _file):
    """No length at all."""
    handler.send(200, b"", X_Repo_Commit=COMMIT, ETag='"a"', Content_Length="")
    handler.close_connection = True
    return True


def busy(handler, _file):
    """Too many requests, and an hour to wait."""
    handler.send(429, Retry_After="3600")
    return True


def circles(handler, _file):
    """A redirect to itself."""
    handler.send(307, Location=handler.path)
    return True


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


# ── the command ─────────────────────────────────────────────────────────────────────────────────
def environment(hub: HubServer, home: Path, **more: str) -> dict[str, str]:
    """The environment of a plan that asks this hub."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return kept | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home)} | more


def plan(folder: Path, env: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    """Run `rayserve plan` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "rayserve.cli", "plan", str(folder), *args],
        capture_output=True, text=True, cwd=ROOT, env=env, check=False, timeout=120,
    )  # fmt: skip


def spec(folder: Path, more: str = "") -> Path:
    """A cluster.yml of the id, in a folder."""
    folder.mkdir(exist_ok=True)
    (folder / "cluster.yml").write_text(SPEC % more)
    return folder


def test_plan_pins_the_commit_and_plans_it_again_without_the_hub(hub, tmp_path):
    """The plan serves the commit that was read; made again offline it is the same, moved branch or not."""
    hub.repos[ID][COMMIT] |= {"config.json": ODD} | shards(2)
    folder, home = spec(tmp_path / "env"), tmp_path / "home"
    done = plan(folder, environment(hub, home, HF_TOKEN=TOKEN))
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        f"{ID}: asking 127.0.0.1 for config.json at main",
        f"{ID}: reading the headers of 2 files of weights",
    ]
    text = (folder / "plan.yml").read_text()
    made = yaml.safe_load(text)["rayserve_plan"]
    assert {"name": "revision", "value": COMMIT} in made["replica"]["engine_args"]
    assert made["replica"]["model_source"] == "hub"
    assert made["checkpoint"] == [{"name": "BF16", "value": 16}, {"name": "F32", "value": 8}]
    assert made["choices"][0]["value"] == COMMIT
    assert TOKEN not in text + done.stdout + done.stderr
    hub.refs["main"] = LATER
    again = plan(folder, environment(hub, home, HF_HUB_OFFLINE="1"), "--check")
    assert again.returncode == 0, again.stderr


def test_an_interrupted_download_is_not_planned_as_the_whole(hub, tmp_path):
    """Some files of the weights in the cache, without the index: the hub is asked for all of them."""
    files = {"config.json": ODD} | shards(3)
    hub.repos[ID][COMMIT] |= files
    folder, home = spec(tmp_path / "env", f", revision: {COMMIT}"), tmp_path / "home"
    snapshot = home / "hub" / "models--acme--tiny" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model-00000-of-00003.safetensors"):
        (snapshot / name).write_bytes(files[name])
    offline = plan(folder, environment(hub, home, HF_HUB_OFFLINE="1"), "--json")
    assert offline.returncode == 2, offline.stdout
    assert "checkpoint_bytes" in json.loads(offline.stdout)["needed"]
    done = plan(folder, environment(hub, home), "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)["plan"]
    assert made["checkpoint"] == [{"name": "BF16", "value": 24}, {"name": "F32", "value": 12}]


def test_plan_reads_the_quantization_beside_config_json(hub, tmp_path):
    """hf_quant_config.json of ModelOpt counts as vLLM counts it, and is part of the revision."""
    quant = {
        "producer": {"name": "modelopt", "version": "0.29.0"},
        "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    }
    hub.repos[ID][COMMIT]["hf_quant_config.json"] = json.dumps(quant).encode()
    folder, home = spec(tmp_path / "env", f", revision: {COMMIT}"), tmp_path / "home"
    done = plan(folder, environment(hub, home), "--json", "--html", str(tmp_path / "plan.html"))
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)["plan"]
    names = [item["name"] for item in made["replica"]["content"]]
    assert names == [f"{ID}/config.json", f"{ID}/hf_quant_config.json"]
    del hub.repos[ID][COMMIT]["hf_quant_config.json"]
    plain = plan(folder, environment(hub, tmp_path / "other"), "--json", "--dry-run")
    assert plain.returncode == 0, plain.stderr
    memory = json.loads(plain.stdout)["plan"]["memory"]
    assert memory["model"] == made["memory"]["model"] == "exact"
    assert made["memory"]["weights_bytes"] < memory["weights_bytes"]


def test_candidates_may_be_ids_and_one_that_fails_has_its_row(hub, tmp_path):
    """`--candidates` fetches each config.json, and an id that is not there stops no other."""
    folder = spec(tmp_path / "env")
    text = (
        (folder / "cluster.yml")
        .read_text()
        .replace(
            "{hf_id: acme/tiny, served_name: chat}",
            "{served_name: chat, candidates: [{name: one, hf_id: acme/tiny}, {name: two, hf_id: acme/none}]}",
        )
    )
    (folder / "cluster.yml").write_text(text)
    done = plan(folder, environment(hub, tmp_path / "home"), "--candidates", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows["one"]["rank"] == 1
    assert "acme/none" in json.dumps(rows["two"])
    picked = plan(folder, environment(hub, tmp_path / "home"))
    assert picked.returncode == 0, picked.stderr
    made = yaml.safe_load((folder / "plan.yml").read_text())["rayserve_plan"]
    assert [item["value"] for item in made["choices"][:2]] == ["one", COMMIT]


DRAFT = "acme/draft"
GUESS = "  speculative: {method: draft_model, model: acme/draft, num_tokens: 2%s}\n"


def test_the_draft_model_of_an_id_is_fetched_and_pinned_as_the_model_is(hub, tmp_path):
    """Its memory is counted from the config.json of the commit that every host will load."""
    hub.repos[DRAFT] = {COMMIT: {"config.json": CONFIG}}
    folder, home = spec(tmp_path / "env"), tmp_path / "home"
    with (folder / "cluster.yml").open("a") as file:
        file.write(GUESS % "")
    done = plan(folder, environment(hub, home))
    assert done.returncode == 0, done.stderr
    assert f"{DRAFT}: asking 127.0.0.1 for config.json at main" in done.stderr
    made = yaml.safe_load((folder / "plan.yml").read_text())["rayserve_plan"]
    arguments = {item["name"]: item["value"] for item in made["replica"]["engine_args"]}
    assert arguments["speculative_config"]["revision"] == COMMIT
    assert made["memory"]["draft_bytes"] > 0
    assert made["memory"].get("uncounted", []) == []
    assert [item["name"] for item in made["choices"][:2]] == [
        "model.revision",
        "speculative.revision",
    ]
    hub.refs["main"] = LATER
    again = plan(folder, environment(hub, home, HF_HUB_OFFLINE="1"), "--check")
    assert again.returncode == 0, again.stderr


def test_a_draft_model_that_is_not_there_is_told_at_its_key(hub, tmp_path):
    """An id that the hub does not have names `speculative.model`, and no plan is written."""
    folder = spec(tmp_path / "env")
    with (folder / "cluster.yml").open("a") as file:
        file.write(GUESS % "")
    done = plan(folder, environment(hub, tmp_path / "home"), "--json")
    assert done.returncode == 2, done.stderr
    told = json.loads(done.stdout)
    assert told["key"].endswith("speculative.model")
    assert DRAFT in told["needed"]
    assert [path.name for path in folder.iterdir()] == ["cluster.yml"]


def test_the_page_of_a_plan_asks_the_hub_for_nothing_more(hub, tmp_path):
    """With candidates on the hub, a plan with its page reads each header once, as one without."""
    hub.repos[ID][COMMIT] |= {"config.json": ODD} | shards(3)
    folder = spec(tmp_path / "env")
    path = folder / "cluster.yml"
    path.write_text(
        path.read_text().replace(
            "{hf_id: acme/tiny, served_name: chat}",
            "{served_name: chat, candidates: [{name: one, hf_id: acme/tiny}]}",
        )
    )
    html = tmp_path / "plan.html"
    done = plan(folder, environment(hub, tmp_path / "home"), "--html", str(html))
    assert done.returncode == 0, done.stderr
    assert "Candidates" in html.read_text()
    away = [one.path for one in hub.asked(".safetensors") if one.path.startswith("/cdn")]
    assert len(away) == len(set(away)) == 3


def test_a_gated_id_ends_with_exit_code_4_and_writes_nothing(hub, tmp_path):
    """The command says in JSON what is missing, and leaves no plan."""
    hub.misbehave = lambda handler, _file: handler.send(403, X_Error_Code="GatedRepo") or True
    folder = spec(tmp_path / "env")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text(TOKEN)
    done = plan(folder, environment(hub, tmp_path / "home"), "--json")
    assert done.returncode == 4, done.stderr
    told = json.loads(done.stdout)
    assert told["error"] == "HostError"
    assert told["key"].endswith("model.hf_id")
    assert TOKEN not in done.stdout + done.stderr
    assert "a token that may not read it" in told["found"]
    sent = [one.headers.get("authorization") for one in hub.asked("config.json", "HEAD")]
    assert sent == [f"Bearer {TOKEN}"]
    assert len(hub.log) == 1  # and nothing else is asked, or told to the hub
    assert "torch" not in hub.log[0].headers["user-agent"]
    assert [path.name for path in folder.iterdir()] == ["cluster.yml"]


def test_ctrl_c_while_fetching_ends_at_once_and_leaves_nothing(hub, tmp_path):
    """An interrupted fetch leaves no part of a file, no plan and no traceback."""
    begun, go_on = threading.Event(), threading.Event()

    def stall(handler, _file):
        handler.send(200, X_Repo_Commit=COMMIT, ETag='"a"', Content_Length="700")
        if handler.command == "GET":
            handler.wfile.write(b"{")
            begun.set()
            go_on.wait(30)
            handler.close_connection = True
        return True

    hub.misbehave = stall
    folder, home = spec(tmp_path / "env"), tmp_path / "home"
    with subprocess.Popen(
        [sys.executable, "-m", "rayserve.cli", "plan", str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env=environment(hub, home),
    ) as child:  # fmt: skip
        try:
            assert begun.wait(60)
            child.send_signal(signal.SIGINT)
            out, err = child.communicate(timeout=30)
        finally:
            go_on.set()
            child.kill()
    assert child.returncode == 1
    assert "Traceback" not in out + err
    assert [path.name for path in folder.iterdir()] == ["cluster.yml"]
    left = [name for name in cached_files(home / "hub") if "incomplete" in name or name == "a"]
    assert left == []


def test_without_huggingface_hub_a_plan_says_what_to_install(tmp_path):
    """Only an id without `config` needs the package, and its absence is told."""
    folder = spec(tmp_path / "env")
    code = (
        "import sys; sys.modules['huggingface_hub'] = None\n"
        "from rayserve.cli import main\n"
        f"main(['plan', {str(folder)!r}, '--json'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--json"],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 4
    assert "pip install" in json.loads(done.stdout)["do"]
