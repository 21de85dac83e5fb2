"""Which files do processes hold, of which kind, and to whom do their connections lead?

    /proc/PID/fd, psutil's sockets -> tally -> how many of each (process, file) -> changes

A file's name carries nothing that differs from one connection to the next, so that counts compare.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

Address = tuple[str, int]
Tally = Counter[tuple[str, str]]
"""Open files by (title of the process, name of the file)."""

UDP = "udp"
_UNIQUE = re.compile(r"[A-Za-z0-9]*\d[A-Za-z0-9]*")
"""Process ids, dates and random names."""


@dataclass(frozen=True, slots=True)
class Socket:
    """One socket of a process."""

    pid: int
    fd: int
    status: str
    """TCP's state in lower case, or `udp`; empty for a Unix socket."""
    local: Address | str
    """(host, port), or a Unix socket's path."""
    remote: Address | str
    """Empty where there is none."""


def count(processes: Iterable[tuple[psutil.Process, str]]) -> Tally:
    """Open files of titled processes.

    The other end of a connection is known if it is on this machine and this user may see it.
    """
    titles = {process.pid: title for process, title in processes}
    sockets = [_socket(one) for one in psutil.net_connections("all") if one.pid is not None]
    return tally(titles, {pid: _links(pid) for pid in titles}, sockets)


def tally(
    titles: Mapping[int, str], links: Mapping[int, Mapping[int, str]], sockets: Sequence[Socket]
) -> Tally:
    """Count what /proc/PID/fd links to (by process and descriptor), told apart by `sockets`."""
    places = {(one.pid, one.fd): one for one in sockets}
    owners = {(one.local, one.remote): one.pid for one in sockets if one.remote}
    served = {one.local[1] for one in sockets if one.status == "listen"}
    out: Tally = Counter()
    for pid, files in links.items():
        for fd, link in files.items():
            one = places.get((pid, fd)) if link.startswith("socket:") else None
            if one is None:
                name = file_name(link)
            else:
                owner = owners.get((one.remote, one.local))
                peer = "no process" if owner is None else titles.get(owner, "another process")
                name = _socket_name(one, peer, served)
            out[titles[pid], name] += 1
    return out


def changes(tallies: Sequence[Tally]) -> list[dict[str, Any]]:
    """The files whose number is not the same in all tallies; those that grew most come first."""
    rows = []
    for process, name in sorted(set[tuple[str, str]]().union(*tallies)):
        numbers = [one[process, name] for one in tallies]
        if len(set(numbers)) > 1:
            rows.append({"process": process, "file": name, "open": numbers})
    return sorted(rows, key=lambda row: row["open"][0] - row["open"][-1])


def file_name(link: str) -> str:
    """`pipe:[71]` is a pipe, `anon_inode:[eventpoll]` an eventpoll, `/tmp/a-71` is `/tmp/a-N`."""
    kind, _, rest = link.partition(":")
    if kind == "anon_inode":
        return rest.strip("[]")
    return kind if rest.startswith("[") else _UNIQUE.sub("N", link)


def _socket_name(one: Socket, peer: str, served: set[Any]) -> str:
    """A connection leads from whoever asked to the port that is listened on."""
    if isinstance(one.local, str):
        return f"unix socket {_UNIQUE.sub('N', one.local)}".rstrip()
    if one.status == "listen":
        return f"tcp listen, port {one.local[1]}"
    if one.status == UDP or not one.remote:
        return f"{one.status} socket"
    if one.local[1] in served:
        return f"tcp {one.status}, from {peer} to port {one.local[1]}"
    return f"tcp {one.status}, to {peer} at port {one.remote[1]}"


def _socket(one: Any) -> Socket:
    """Of psutil's own kind. Where a socket takes both families, IPv4 stands in IPv6 form."""
    local, remote = (
        (end.ip.removeprefix("::ffff:"), end.port) if hasattr(end, "ip") else (end or "")
        for end in (one.laddr, one.raddr)
    )
    status = "" if one.family == socket.AF_UNIX else one.status.lower()
    return Socket(one.pid, one.fd, UDP if one.type == socket.SOCK_DGRAM else status, local, remote)


def _links(pid: int) -> dict[int, str]:
    """What each descriptor of a process stands for; empty once the process is gone."""
    out = {}
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                out[int(entry.name)] = str(entry.readlink())
    return out
