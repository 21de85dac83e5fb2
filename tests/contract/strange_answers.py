"""Answers that no hub should give."""

from __future__ import annotations

from tests.contract.hub_client import (
    CONFIG,
)
from tests.contract.hub_server import COMMIT


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
