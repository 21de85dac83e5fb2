"""How fast is an all-reduce among the GPUs of this host? Measured with the torch that vLLM runs on."""

from __future__ import annotations

import json
from typing import Literal

from rayserve.health.checks.fabric import BandwidthFact
from rayserve.health.facts.as_user import python
from rayserve.health.facts.run import run

SIZE_BYTES = 2**30
BUDGET_S = 120.0
"""NCCL's own watchdog waits ten minutes and more."""
ROUNDS = 10
PROGRAM = """
import json, statistics, sys, time
import torch, torch.distributed as dist, torch.multiprocessing as mp

def rank(index, ranks, size, rounds, backend, store):
    device = torch.device("cpu" if backend == "gloo" else f"cuda:{index}")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=index, world_size=ranks)
    data = torch.ones(size // 2, dtype=torch.bfloat16, device=device)
    times = []
    for turn in range(rounds + 2):
        data.fill_(1)
        if backend == "nccl":
            torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(data)
        if backend == "nccl":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    wrong = bool((data != ranks).any())
    dist.destroy_process_group()
    if index == 0:
        print(json.dumps({"seconds": statistics.median(times[2:]), "wrong": wrong}), flush=True)

if __name__ == "__main__":
    import os, tempfile
    ranks, size, rounds = map(int, sys.argv[1:4])
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank, (ranks, size, rounds, sys.argv[4], os.path.join(folder, "store")), ranks,
                           start_method="fork")
"""


def measure_all_reduce(
    ranks: int,
    *,
    size_bytes: int = SIZE_BYTES,
    rounds: int = ROUNDS,
    backend: Literal["nccl", "gloo"] = "nccl",
    budget_s: float = BUDGET_S,
) -> BandwidthFact:
    """The median time of an all-reduce of `size_bytes` among `ranks` GPUs, which must be idle.

    All ranks are children of one process group, which is killed when the budget is spent. `gloo`
    measures the same among processes without GPUs: it shows that the measurement works, not a fabric.
    """
    numbers = (str(number) for number in (ranks, size_bytes, rounds))
    answer = run([*python(PROGRAM), *numbers, backend], budget_s)
    if not answer.ok:
        last = answer.text.strip().splitlines()[-1:] or [""]
        said = f": {last[0][:160]}" if last[0] else ""
        return BandwidthFact(ranks, size_bytes, ending=answer.ending + said)
    for line in reversed(answer.text.splitlines()):
        try:
            found = json.loads(line)
            seconds = float(found["seconds"])
        except (ValueError, LookupError, TypeError):
            continue
        if found.get("wrong"):
            return BandwidthFact(
                ranks, size_bytes, ending="the sum is wrong: data were lost or changed"
            )
        return BandwidthFact(ranks, size_bytes, seconds)
    return BandwidthFact(ranks, size_bytes, ending="no figure in the answer")
