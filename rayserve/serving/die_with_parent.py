"""Imported by a process that must not outlive the one that started it, nor what it forks: the fork
server, and the engines of a benchmark.

vLLM's engine core watches no parent, and Ray kills a replica's children, not its grandchildren: so
when a replica is killed outright, the core that came from the fork server would keep the GPUs.
The kernel's parent-death signal goes down the chain: replica, fork server, core, workers.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_INIT = 1


def die_with_parent() -> None:
    """Ask for SIGKILL at the parent's death; leave at once where it is dead already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == _INIT:
        os._exit(1)


die_with_parent()
os.register_at_fork(after_in_child=die_with_parent)
