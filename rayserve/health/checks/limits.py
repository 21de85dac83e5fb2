"""May Ray and its engines open as many files and lock as much memory as serving takes?

Judged is Ray as it runs and as its unit starts it next: a shell's limits say nothing of a service's.
"""

from __future__ import annotations

from collections.abc import Callable

from rayserve.health.checks.driver import NO_GPU
from rayserve.health.checks.host_facts import HostFacts, Limits
from rayserve.health.results import Check, CheckResult

NOFILE = 65536
"""A stream takes a few descriptors, HAProxy and Ray some each; the usual soft limit of 1024 breaks at a
few hundred streams (vllm issue 7920)."""


def check_nofile(facts: HostFacts) -> CheckResult:
    """May a process hold as many open files as streams need?"""
    check = Check("nofile", f"at least {NOFILE} open files", "host-limits")
    known = [(one, one.nofile) for one in facts.limits if one.nofile is not None]
    if not known:
        return check.skipped("the limit could not be read")
    low = [(one, limit) for one, limit in known if 0 <= limit < NOFILE]
    if not low:
        return check.passed(_each(known, str))
    return check.warned(
        _each(low, str),
        why="each stream takes descriptors; beyond the limit the engine ends with `Too many open files`",
        do=f"LimitNOFILE=1048576 in Ray's unit, and restart it (a shell: ulimit -n {NOFILE})",
    )


def check_memlock(facts: HostFacts) -> CheckResult:
    """May NCCL and the KV offload pin host memory?"""
    check = Check("memlock", "no limit on locked memory", "host-limits")
    if not facts.gpus:
        return check.skipped(NO_GPU)
    known = [(one, one.memlock_bytes) for one in facts.limits if one.memlock_bytes is not None]
    if not known:
        return check.skipped("the limit could not be read")
    low = [(one, limit) for one, limit in known if limit >= 0]
    if not low:
        return check.passed(_each(known, _kib))
    return check.warned(
        _each(low, _kib),
        why="NCCL registers buffers for its network, and fails with `unhandled system error`",
        do="LimitMEMLOCK=infinity in Ray's unit, and restart it (a shell: ulimit -l unlimited)",
    )


def _each(known: list[tuple[Limits, int]], show: Callable[[int], str]) -> str:
    return "; ".join(
        f"{'no limit' if limit < 0 else show(limit)} ({one.whose})" for one, limit in known
    )


def _kib(limit: int) -> str:
    return f"{limit // 1024} KiB"
