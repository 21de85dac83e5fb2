"""Is the rank named that the others wait for, and nobody where nothing tells them apart?"""

from __future__ import annotations

import re

import pytest

from rayserve.health.readings.ranks import UNREAD, Sight, main_stack, silent_ranks

# Of py-spy 0.4.3 on Python 3.11 and vLLM 0.32.0, two ranks on the CPU engine, one of them stopped; the tails are cut.
CORE_WAITS = """\
Process 9507: VLLM::EngineCore
Python v3.11.7 (/usr/bin/python3.11)

Thread 9618 (idle): "MultiprocWorkerMonitor"
    _PollLikeSelector.select (selectors.py:415)
    wait (multiprocessing/connection.py:947)
Thread 9507 (idle): "MainThread"
    Poller.poll (zmq/sugar/poll.py:106)
    SpinCondition.wait (vllm/distributed/device_communicators/shm_broadcast.py:210)
    MessageQueue.acquire_read (vllm/distributed/device_communicators/shm_broadcast.py:864)
    _GeneratorContextManager.__enter__ (contextlib.py:137)
    MessageQueue.dequeue (vllm/distributed/device_communicators/shm_broadcast.py:971)
    EngineCore.step (vllm/v1/engine/core.py:674)
"""
IN_COLLECTIVE = """\
Process 9513: VLLM::Worker_TP1
Python v3.11.7 (/usr/bin/python3.11)

Thread 9513 (active): "MainThread"
    OpOverloadPacket.__call__ (torch/_ops.py:1279)
    _CPUSHMDistributed.all_reduce (vllm/distributed/device_communicators/cpu_communicator.py:275)
    CpuCommunicator.all_reduce (vllm/distributed/device_communicators/cpu_communicator.py:85)
    GroupCoordinator._all_reduce_out_place (vllm/distributed/parallel_state.py:750)
    RowParallelLinear.forward (vllm/model_executor/layers/linear.py:1781)
"""
IDLES = """\
Process 9482: python -B -c from multiprocessing.resource_tracker import main;main(56)
Python v3.11.7 (/usr/bin/python3.11)

Thread 9482 (idle): "MainThread"
    main (multiprocessing/resource_tracker.py:227)
    <module> (<string>:1)
"""
# Made up: no rank hung by itself.
COMPUTES = re.sub(r"\w+\.\w*all_reduce\w*", "ReplicatedLinear.apply", IN_COLLECTIVE)


def sight(name: str, state: str = "S", stack: str = CORE_WAITS) -> Sight:
    """A process of this name."""
    return Sight(name, 4800, state, stack)


def test_the_main_thread_is_read_whatever_stands_before_it():
    """Other threads are passed over; frames come innermost first."""
    stack = main_stack(CORE_WAITS)
    assert stack[0].startswith("Poller.poll (zmq/")
    assert stack[-1] == "EngineCore.step (vllm/v1/engine/core.py:674)"
    assert len(stack) == 6


@pytest.mark.parametrize("text", ["", "Error: Failed to suspend process", "Thread", "\0\n(\n"])
def test_what_is_no_dump_has_no_stack(text):
    """An error of py-spy in place of a dump is nothing to judge by."""
    assert main_stack(text) == ()


@pytest.mark.parametrize(
    "state, word",
    [("T", "stopped by a signal"), ("D", "in the kernel"), ("Z", "ended"), ("", "ended")],
)
def test_a_rank_that_the_kernel_does_not_run_is_named(state, word):
    """Its state alone tells, also where py-spy could not look."""
    ranks = [sight("VLLM::EngineCore"), sight("VLLM::Worker_TP0"), sight("VLLM::Worker_TP1", state)]
    (silent,) = silent_ranks(ranks)
    assert silent.name == "VLLM::Worker_TP1"
    assert word in str(silent)


def test_the_one_that_computes_while_the_others_wait_is_named():
    """Seven in a collective and one not: that one keeps them."""
    ranks = [
        sight("VLLM::EngineCore"),
        sight("VLLM::Worker_TP0", stack=IN_COLLECTIVE),
        sight("VLLM::Worker_TP1", stack=COMPUTES),
    ]
    (silent,) = silent_ranks(ranks)
    assert silent.name == "VLLM::Worker_TP1"
    assert "OpOverloadPacket.__call__ (torch/" in silent.why


@pytest.mark.parametrize(
    "stacks",
    [
        (CORE_WAITS, IN_COLLECTIVE, IN_COLLECTIVE),
        (CORE_WAITS, COMPUTES, COMPUTES),
        ("", "", COMPUTES),
        ("", "", ""),
        (),
    ],
    ids=["all wait", "two compute", "one seen", "none seen", "none"],
)
def test_nobody_is_named_where_the_stacks_tell_nothing(stacks):
    """An accusation without evidence would send people to the wrong GPU."""
    assert (
        silent_ranks([sight(f"VLLM::Worker_TP{i}", stack=stack) for i, stack in enumerate(stacks)])
        == ()
    )


def test_processes_that_are_no_ranks_are_not_judged():
    """Python's resource tracker computes nothing, and a helper that ended was to end."""
    helpers = [sight("python -B -c from multiprocessing.resource_tracker", stack=IDLES),
               sight("sh -c nvidia-smi", "")]  # fmt: skip
    waiting = [sight("VLLM::EngineCore"), sight("VLLM::Worker_TP0", stack=IN_COLLECTIVE)]
    assert silent_ranks([*helpers, *waiting]) == ()
    busy = sight("VLLM::Worker_TP1", stack=COMPUTES)
    assert [one.name for one in silent_ranks([*helpers, *waiting, busy])] == ["VLLM::Worker_TP1"]


def test_a_process_that_could_not_be_asked_is_not_called_ended():
    """Not to know is no sign of death."""
    ranks = [sight("VLLM::EngineCore"), sight("VLLM::Worker_TP0", UNREAD, "")]
    assert silent_ranks(ranks) == ()


def test_a_stopped_rank_outranks_what_stacks_say():
    """A core that computes beside a stopped worker is not the cause."""
    ranks = [sight("VLLM::EngineCore", stack=COMPUTES), sight("VLLM::Worker_TP0", "T", "")]
    assert [silent.name for silent in silent_ranks(ranks)] == ["VLLM::Worker_TP0"]
