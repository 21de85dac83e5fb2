"""Is the rank named that the others wait for, and nobody where nothing tells them apart?"""

from __future__ import annotations

import pytest

from rayserve.health.readings.ranks import Sight, main_stack, silent_ranks

# py-spy 0.4.3 on an engine core of vLLM 0.32.0 whose worker was stopped; the tail is cut.
CORE_WAITS = """\
Process 4711: VLLM::EngineCore
Python v3.11.7 (/usr/bin/python3.11)

Thread 4790 (idle): "Thread-3 (process_input_sockets)"
    _poll (zmq/sugar/poll.py:106)
Thread 4711 (active): "MainThread"
    acquire_read (vllm/distributed/device_communicators/shm_broadcast.py:611)
    dequeue (vllm/distributed/device_communicators/shm_broadcast.py:706)
    get_response (vllm/v1/executor/multiproc_executor.py:389)
    collective_rpc (vllm/v1/executor/multiproc_executor.py:412)
    sample_tokens (vllm/v1/executor/multiproc_executor.py:331)
    step (vllm/v1/engine/core.py:488)
"""
IN_COLLECTIVE = """\
Process 4800: VLLM::Worker_TP0
Python v3.11.7 (/usr/bin/python3.11)

Thread 4800 (active): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:3201)
    all_reduce (vllm/distributed/device_communicators/cpu_communicator.py:61)
    forward (vllm/model_executor/layers/linear.py:1502)
"""
COMPUTES = IN_COLLECTIVE.replace("all_reduce", "apply")


def sight(name: str, state: str = "S", stack: str = CORE_WAITS) -> Sight:
    """A process of this name."""
    return Sight(name, 4800, state, stack)


def test_the_main_thread_is_read_whatever_stands_before_it():
    """Other threads are passed over; frames come innermost first."""
    stack = main_stack(CORE_WAITS)
    assert stack[0].startswith("acquire_read (vllm/")
    assert stack[-1] == "step (vllm/v1/engine/core.py:488)"
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
    assert "apply (torch/distributed" in silent.why


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
    assert silent_ranks([sight(f"rank {i}", stack=stack) for i, stack in enumerate(stacks)]) == ()


def test_a_stopped_rank_outranks_what_stacks_say():
    """A core that computes beside a stopped worker is not the cause."""
    ranks = [sight("core", stack=COMPUTES), sight("VLLM::Worker_TP0", "T", "")]
    assert [silent.name for silent in silent_ranks(ranks)] == ["VLLM::Worker_TP0"]
