"""Ports on loopback for what a test starts: free now, and none of them twice."""

from __future__ import annotations

import socket

_given_ports: set[int] = set()


def free_port() -> int:
    """A TCP port on loopback that is free now, and a new one each time: the kernel gives a port out
    again at once, and one Ray asks for several. Another process may still take it first.
    """
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port not in _given_ports:
            _given_ports.add(port)
            return port
