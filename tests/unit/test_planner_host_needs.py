"""Does the planner say what a cut asks of a host: shared memory, memory, whole GPUs?"""

from __future__ import annotations

import pytest

from rayserve.planner.support.host_limits import QUEUE_BYTES, HostFacts, check_host, shm_bytes
from rayserve.units import GIB


# ── the host ──────────────────────────────────────────────────────────────────────────────────────
def host_findings(offload=0.0, replicas=1, tensor=8, weights=0.0, **facts):
    """What a host with these facts lacks."""
    return check_host(
        HostFacts(gpus=8, **facts), tensor=tensor, pipeline=1, replicas_on_host=replicas,
        offload_gib=offload, weights_gib=weights,
    )  # fmt: skip


def test_nothing_is_said_of_facts_that_nobody_knows():
    """A host of unknown memory and modes passes."""
    assert host_findings(offload=512) == ()


def test_mig_is_refused():
    """GPUs in slices have neither peer access nor the catalogue's memory."""
    (refusal,) = host_findings(mig=True)
    assert "nvidia-smi -mig 0" in refusal.do
    assert host_findings(mig=False) == ()


@pytest.mark.parametrize(
    "offload, replicas, shm, ok",
    [
        (0, 1, 1, True),
        (0, 1, 64 / 1024, False),
        (256, 1, 257, True),
        (256, 1, 256, False),
        (256, 2, 300, False),
    ],
)
def test_shared_memory_holds_queue_and_offloaded_blocks(offload, replicas, shm, ok):
    """/dev/shm holds the KV blocks of every replica on the host and vLLM's queue."""
    found = host_findings(offload=offload, replicas=replicas, shm_gib=shm)
    assert (found == ()) is ok
    if offload and not ok:
        room = (shm * GIB - QUEUE_BYTES) // replicas // GIB
        assert found[0].do.startswith(f"write cpu_gib: {room:.0f}, or mount")


def test_one_rank_needs_no_queue():
    """A model on one GPU has no ranks to tell."""
    assert shm_bytes(ranks=1, replicas=3, offload_gib=0) == 0
    assert shm_bytes(ranks=2, replicas=1, offload_gib=1) == QUEUE_BYTES + GIB


def test_host_memory_for_offloaded_blocks():
    """More KV blocks than the host has memory are refused with what fits."""
    (refusal,) = host_findings(offload=256, replicas=2, memory_gib=512)
    assert refusal.do == "write cpu_gib: 252"
    assert host_findings(offload=252, replicas=2, memory_gib=512) == ()
    (tiny,) = host_findings(offload=4, memory_gib=8)
    assert tiny.do == "leave kv_offload out"


def test_host_memory_for_weights_that_stay_there():
    """Each GPU's share counts, and KV blocks get what the weights leave."""
    (refusal,) = host_findings(weights=100, memory_gib=512)
    assert refusal.key == ("engine_args", "cpu_offload_gb")
    assert refusal.do == "write cpu_offload_gb: 63"
    assert host_findings(weights=63, memory_gib=512) == ()
    (both,) = host_findings(weights=10, offload=500, memory_gib=512)
    assert both.do == "write cpu_gib: 424"
    assert host_findings(weights=10, offload=424, memory_gib=512) == ()


def test_what_is_proposed_works_for_memory_and_shared_memory():
    """Each refusal names a size that passes both checks."""
    for finding in host_findings(offload=400, replicas=1, memory_gib=256, shm_gib=128):
        assert finding.do.startswith("write cpu_gib: 127")
    assert host_findings(offload=127, replicas=1, memory_gib=256, shm_gib=128) == ()
