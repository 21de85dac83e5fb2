"""Which of the engine's processes is the one that the others wait for?

A gang of ranks moves in step: when one stops, the engine core and every other rank wait in a message
queue or a collective, and look alike. The one that does not wait, or that the kernel does not run, is
the one to look at. Where nothing tells them apart nobody is named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

_THREAD = re.compile(r"^Thread \S+ \((?P<state>[^)]*)\)(?:: \"(?P<name>.*)\")?$", re.MULTILINE)
_FRAME = re.compile(r"^\s+(?P<function>\S.*?) \((?P<place>[^()]*)\)$")
RANKS: Final = "VLLM::"
"""How vLLM's processes are titled. Beside them are Python's own: fork server, resource tracker."""
WAITS: Final = frozenset(
    {
        "acquire_read", "acquire_write", "dequeue", "enqueue", "wait", "wait_for", "_wait_for_tstate_lock",
        "recv", "_recv", "_recv_bytes", "recv_bytes", "recv_multipart", "recv_string", "poll", "_poll", "select", "sched_yield",
        "barrier", "all_reduce", "_all_reduce_in_place", "_all_reduce_out_place", "all_gather",
        "all_gather_into_tensor", "reduce_scatter", "broadcast", "broadcast_object", "gather", "send",
        "get_response", "sleep", "spin",
    }
)  # fmt: skip
"""Functions, innermost first, in which a process waits for another: those of vLLM's message queues and
of torch's collectives, and what they call. py-spy puts the class before the name on Python 3.11 and later."""
_INNERMOST: Final = 4
"""So many frames are asked for one of them."""
GONE: Final = ""
UNREAD: Final = "?"
_KERNEL: Final = {
    "T": "is stopped by a signal",
    "t": "is stopped by a debugger",
    "D": "hangs in the kernel, in a driver or a file system",
    "Z": "has ended",
    "X": "has ended",
    GONE: "has ended",
}


@dataclass(frozen=True, slots=True)
class Sight:
    """One process of the engine as it was seen."""

    name: str
    """Its title: `VLLM::EngineCore`, `VLLM::Worker_TP3`."""
    pid: int
    state: str
    """The kernel's letter (proc(5)); GONE, or UNREAD where it could not be asked."""
    stack: str = ""
    """What py-spy's `dump` printed; empty where it could not."""
    no_stack: str = ""
    """Why there is none."""


@dataclass(frozen=True, slots=True)
class Silent:
    """A process that does not do its part, and how that shows."""

    name: str
    pid: int
    why: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}) {self.why}"


def silent_ranks(sights: Sequence[Sight]) -> tuple[Silent, ...]:
    """Those that do not do their part, in the order given; empty where nothing tells them apart.

    Only processes that vLLM titled are judged: a helper that ended or idles is none of them.
    """
    ranks = [sight for sight in sights if sight.name.startswith(RANKS)]
    halted = tuple(
        Silent(sight.name, sight.pid, _KERNEL[sight.state])
        for sight in ranks
        if sight.state in _KERNEL
    )
    if halted:
        return halted
    frames = [(sight, main_stack(sight.stack)) for sight in ranks]
    seen = [(sight, stack) for sight, stack in frames if stack]
    alone = [(sight, stack) for sight, stack in seen if not _waits(stack)]
    # One that computes among others that wait. Where several compute, or one alone was seen, the
    # stacks tell nothing.
    if len(alone) != 1 or len(seen) < 2:
        return ()
    sight, stack = alone[0]
    return (Silent(sight.name, sight.pid, f"is in {stack[0]} while the others wait"),)


def main_stack(dump: str) -> tuple[str, ...]:
    """Frames of the main thread, innermost first, as `function (file:line)`."""
    threads = list(_THREAD.finditer(dump))
    for index, thread in enumerate(threads):
        if (thread["name"] or "MainThread") != "MainThread":
            continue
        end = threads[index + 1].start() if index + 1 < len(threads) else len(dump)
        return tuple(_frames(dump[thread.end() : end].splitlines()))
    return ()


def _frames(lines: Iterable[str]) -> Iterable[str]:
    for line in lines:
        match = _FRAME.match(line)
        if match:
            yield f"{match['function']} ({match['place']})"


def _waits(stack: Sequence[str]) -> bool:
    names = (frame.partition(" (")[0] for frame in stack[:_INNERMOST])
    return any(name.rpartition(".")[2] in WAITS for name in names)
