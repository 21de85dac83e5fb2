"""A model hub on loopback: the paths and headers that huggingface_hub speaks, and ways to go wrong."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LATER = "fedcba9876543210fedcba9876543210fedcba98"
RESOLVE = re.compile(r"/(?P<id>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


@dataclass
class Request:
    """What a client asked for."""

    method: str
    path: str
    headers: dict[str, str]


@dataclass
class HubServer:
    """Repositories by id, then commit, then file; big files are redirected to another origin."""

    repos: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    misbehave: Callable[[Handler, str], bool] | None = None
    """Answers a request for a file itself, and says so with True."""
    ranges: bool = True
    log: list[Request] = field(default_factory=list)
    url: str = ""
    cdn: str = ""

    def asked(self, name: str, method: str = "GET") -> list[Request]:
        """The requests for a file."""
        return [one for one in self.log if one.path.endswith(name) and one.method == method]


class Handler(BaseHTTPRequestHandler):
    """One request; `hub` and `is_cdn` are set by `serving`."""

    hub: HubServer
    is_cdn = False
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def log_message(self, *args):
        """Say nothing on stderr."""

    def send(self, status: int, body: bytes = b"", **headers: str) -> None:
        """A whole answer; header names with _ for -."""
        self.send_response(status)
        rows = {name.replace("_", "-"): value for name, value in headers.items()}
        for name, value in ({"Content-Length": str(len(body))} | rows).items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_file(self, body: bytes, **headers: str) -> None:
        """A file, or the range of it that was asked for."""
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted is None or not self.hub.ranges:
            self.send(200, body, **headers)
            return
        if not body:
            self.send(416, Content_Range="bytes */0")
            return
        part = body[int(wanted[1]) : int(wanted[2]) + 1]
        last = int(wanted[1]) + len(part) - 1
        told = f"bytes {wanted[1]}-{last}/{len(body)}"
        self.send(206, part, Content_Range=told, **headers)

    def _answer(self) -> None:
        self.hub.log.append(
            Request(self.command, self.path, {k.lower(): v for k, v in self.headers.items()})
        )
        found = RESOLVE.fullmatch(self.path.removeprefix("/cdn"))
        if found is None:
            self.send(404)
            return
        if self.hub.misbehave is not None and self.hub.misbehave(self, found["file"]):
            return
        repo = self.hub.repos.get(found["id"])
        if repo is None:
            self.send(404, X_Error_Code="RepoNotFound")
            return
        commit = self.hub.refs.get(found["revision"], found["revision"])
        if commit not in repo:
            self.send(404, X_Error_Code="RevisionNotFound")
            return
        body = repo[commit].get(found["file"])
        if body is None:
            self.send(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
            return
        etag = f'"{hashlib.sha256(body).hexdigest()}"'
        if found["file"].endswith(".safetensors") and not self.is_cdn:
            self.send(
                302, X_Repo_Commit=commit, X_Linked_ETag=etag, X_Linked_Size=str(len(body)),
                Location=f"{self.hub.cdn}/cdn{self.path}",
            )  # fmt: skip
            return
        self.send_file(body, X_Repo_Commit=commit, ETag=etag)


@contextmanager
def serving(repos: dict[str, dict[str, dict[str, bytes]]]) -> Iterator[HubServer]:
    """A running hub and its other origin."""
    hub = HubServer(repos)
    kind = type("HubHandler", (Handler,), {"hub": hub})
    cdn_kind = type("CdnHandler", (Handler,), {"hub": hub, "is_cdn": True})
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), each) for each in (kind, cdn_kind)]
    for server in servers:
        server.daemon_threads = True
    threads = [
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        for server in servers
    ]
    for thread in threads:
        thread.start()
    hub.url, hub.cdn = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    try:
        yield hub
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join(10)


def safetensors(**tensors: tuple[str, list[int], int]) -> bytes:
    """A file of zeros; each tensor as dtype, shape and size in bytes."""
    rows, at = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        rows[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    header = json.dumps(rows).encode()
    return len(header).to_bytes(8, "little") + header + bytes(at)
