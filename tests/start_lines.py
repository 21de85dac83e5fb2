"""Lines of a start ledger as a replica with GPUs would write them, for tests that have none."""

from __future__ import annotations

import json
from typing import Any

from rayserve.plan import Plan, ReplicaPlan
from rayserve.planner.memory.budget import requested_bytes
from rayserve.serving.ledger import StartLedger
from rayserve.starts import Ledger, identity, read_starts
from rayserve.units import GIB

A100 = {"device_name": "NVIDIA A100-SXM4-80GB", "total_bytes": int(79.25 * GIB)}
PHASES = {
    "import": 10.0,
    "config": 1.0,
    "engine": 180.0,
    "weights": 120.0,
    "read": 100.0,
    "profile": 30.0,
    "app": 1.0,
    "warm-up": 3.0,
}


def rank_memory(rank: int, **terms: Any) -> dict[str, Any]:
    """One rank, whose sum is vLLM's own: what is left is the KV cache."""
    found = {
        "rank": rank,
        **A100,
        "weights_bytes": 25 * GIB,
        "consumed_bytes": 27 * GIB,
        "activation_bytes": GIB,
        "cudagraph_bytes": GIB // 2,
        **terms,
    }
    found.setdefault("requested_bytes", requested_bytes(found["total_bytes"], 0.92))
    left = found["requested_bytes"] - found["consumed_bytes"] - found["activation_bytes"]
    return {"kv_bytes": left, **found}


def start_line(plan: Plan | ReplicaPlan, **changes: Any) -> dict[str, Any]:
    """The line of a start of a plan's replica; `changes` to the line, or to its engine's facts.

    `terms` changes the memory of every rank.
    """
    replica = plan.replica if isinstance(plan, Plan) else plan
    placement, arguments = replica.placement, replica.engine_arguments()
    terms = changes.pop("terms", {})
    engine = {
        "vllm_version": replica.vllm_version,
        "tensor_parallel_size": placement.tensor_parallel_size,
        "pipeline_parallel_size": placement.pipeline_parallel_size,
        "block_size": 16,
        "num_gpu_blocks": 1000,
        "kv_tokens": 16000,
        **{
            name: arguments[name]
            for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens")
        },
    }
    engine |= {name: changes.pop(name) for name in [*changes] if name in engine}
    ranks = engine["tensor_parallel_size"] * engine["pipeline_parallel_size"]
    memory = [rank_memory(rank, **terms) for rank in range(ranks)]
    if replica.device == "cpu":
        memory = [{"rank": rank, "requested_bytes": GIB} for rank in range(ranks)]
    ledger = StartLedger(replica.revision, started_at=1.7e9, phases=dict(PHASES))
    line = ledger.line(identity(replica), memory, engine)
    return {**line, "total_s": 200.0, **changes}


def lines(*records: dict[str, Any]) -> bytes:
    """A ledger file."""
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def ledger_of(*records: dict[str, Any]) -> Ledger:
    """What is read of it: all of it is sound."""
    found = read_starts(lines(*records))
    assert not found.faults
    return found
