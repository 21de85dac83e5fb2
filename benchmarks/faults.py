"""What does the product do when its engine dies, hangs, or something is missing?

    python -m benchmarks.faults [NAME…]     each fault on a product of its own, under load; `make test-faults`

Two replicas serve streams; one of them gets the fault. Measured from the fault on: seconds until its
door is shut (`/ready` is 503, and `rayserve_engine_state` says hung or dead), until as many replicas as
before serve again without a person, streams that broke, the evidence bundle, and what `rayserve doctor`
says of the logs. Writes build/faults.json, a row a fault.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.fault_kinds import FAULTS, Fault, Replica, Undo, replicas, small_disk
from benchmarks.load import prompts, request_body
from benchmarks.machine import describe
from benchmarks.workbench import OUT, workbench
from rayserve.bench import read_answer, split_events
from rayserve.health.facts.evidence import FOLDER
from rayserve.plan import Plan
from tests.served import Served, make_plan, metrics

STALL_S = 20.0
REPLICAS = 2
CLIENTS = 8
TOKENS = 256
WARM_S = 8.0
"""Load before the fault."""
LOOK_S = 0.2
UNDETECTED_S = 120.0
"""A fault that is to be detected is given up after so long; one that is not is watched for `watch_s`."""
UNRECOVERED_S = 400.0
PAUSE_S = 0.5
"""A client that was refused waits so long."""


@dataclass
class Load:
    """What the clients saw."""

    whole: int = 0
    lost: int = 0
    """Streams that broke, or ended short."""
    refused: Counter[int] = field(default_factory=Counter)
    """Answers with another status than 200."""
    faults: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Row:
    """One injected fault."""

    fault: str
    detected_s: float | None
    recovered_s: float | None
    requests_lost: int
    requests_refused: int
    requests_whole: int
    kills: int
    """Replicas that were replaced."""
    bundle: str
    silent: list[str]
    doctor_tag: str
    doctor_title: str
    why_lost: dict[str, int]
    statuses: dict[str, int]
    """Of the refused, by HTTP status."""
    told: str
    """What the fault itself has to tell, as the statuses of a request that kills the engine."""
    passed: bool


async def client(
    served: Served, load: Load, texts: Sequence[str], stop: asyncio.Event, number: int = 0
) -> None:
    """Streams, one after the other, until told to stop; `number`: of its first text."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=UNRECOVERED_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while not stop.is_set():
            body = request_body(served.model, texts[number % len(texts)], TOKENS)
            if await _stream(session, served, load, body):
                number += 1
            else:  # the same again, as clients and their libraries do
                await asyncio.sleep(PAUSE_S)


async def _stream(
    session: aiohttp.ClientSession, served: Served, load: Load, body: dict[str, Any]
) -> bool:
    events: list[bytes] = []
    rest = b""
    try:
        async with session.post(
            f"{served.url}/v1/completions", json=body, headers=served.headers
        ) as reply:
            if reply.status != 200:
                load.refused[reply.status] += 1
                return False
            async for chunk in reply.content.iter_any():
                found, rest = split_events(rest + chunk)
                events += found
        answer = read_answer(events)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        load.lost += 1
        load.faults[f"{type(error).__name__}: {error}"[:120]] += 1
        return False
    if answer.completion_tokens != TOKENS:
        load.lost += 1
        load.faults[f"{answer.completion_tokens} of {TOKENS} tokens"] += 1
        return False
    load.whole += 1
    return True


def is_ready(served: Served, port: int) -> bool:
    """Whether the replica behind this port would take a request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", f"{served.application['route_prefix']}/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def gave_up(served: Served, port: int) -> bool:
    """Whether a replica takes no request and its metric says why."""
    if is_ready(served, port):
        return False
    with contextlib.suppress(OSError, RuntimeError, http.client.HTTPException):
        for state in ("hung", "dead"):
            found = metrics(served, port, rayserve_engine_state=state)
            if found.get("rayserve_engine_state"):
                return True
    return False


def ready_replicas(served: Served) -> list[Replica]:
    """Those that would take a request now."""
    return [one for one in replicas(served) if is_ready(served, one.port)]


async def until(probe: Callable[[], bool], limit_s: float) -> float | None:
    """Seconds until `probe` is true; None if it is not within the limit."""
    began = time.monotonic()
    while time.monotonic() - began < limit_s:
        if await asyncio.to_thread(probe):
            return time.monotonic() - began
        await asyncio.sleep(LOOK_S)
    return None


@dataclass(frozen=True, slots=True)
class Seen:
    """What a trial saw."""

    load: Load
    detected_s: float | None
    recovered_s: float | None
    kills: int
    told: str


async def trial(fault: Fault, served: Served) -> Seen:
    """Load, the fault, and the way back."""
    load, stop = Load(), asyncio.Event()
    texts = prompts(32, "faults")
    firsts = range(0, len(texts), len(texts) // CLIENTS)
    tasks = [asyncio.create_task(client(served, load, texts, stop, first)) for first in firsts]
    await asyncio.sleep(WARM_S)
    before = {one.pid for one in ready_replicas(served)}
    victim = ready_replicas(served)[0]
    undo: Undo | None = None
    told = ""
    began = time.monotonic()
    try:
        undo = await asyncio.to_thread(fault.inject, served, victim)
        began = time.monotonic()
        limit_s = UNDETECTED_S if fault.replaces else fault.watch_s
        detected_s = await until(lambda: gave_up(served, victim.port), limit_s)
        if detected_s is not None:
            print(f"{fault.name}: detected after {detected_s:.1f} s", flush=True)
        if fault.mend is not None:
            await asyncio.sleep(fault.watch_s)
            await asyncio.to_thread(fault.mend, served, victim)
        recovered_s: float | None = None
        if detected_s is not None:
            recovered = await until(lambda: _whole_again(served, victim), UNRECOVERED_S)
            recovered_s = None if recovered is None else time.monotonic() - began
    finally:
        if undo is not None:
            told = await asyncio.to_thread(undo)
        stop.set()
        await asyncio.wait(tasks, timeout=60)
        for task in tasks:
            task.cancel()
    after = {one.pid for one in replicas(served)}
    return Seen(load, detected_s, recovered_s, len(before - after), told)


def _whole_again(served: Served, victim: Replica) -> bool:
    ready = [one.pid for one in ready_replicas(served)]
    return len(ready) >= REPLICAS and victim.pid not in ready


def judged(fault: Fault, served: Served, seen: Seen) -> Row:
    """A trial with what was left of it: bundle and logs."""
    load, detected_s, recovered_s = seen.load, seen.detected_s, seen.recovered_s
    bundles = sorted(Path(served.plan.replica.state_dir, FOLDER).glob("*.tar.gz"))
    silent = _silent(bundles[-1]) if bundles else []
    logs = served.ray.temp_dir / "session_latest" / "logs"
    cause = doctor([logs, *bundles])
    if fault.replaces:
        passed = (
            detected_s is not None
            and detected_s <= fault.detect_max_s(STALL_S)
            and recovered_s is not None
            and bool(bundles)
            and len(bundles) <= fault.deaths
            and seen.told.endswith(fault.tells)
            and not load.refused[400]
        )
    else:
        passed = detected_s is None and seen.kills == 0
    return Row(
        fault.name,
        None if detected_s is None else round(detected_s, 2),
        None if recovered_s is None else round(recovered_s, 1),
        load.lost,
        sum(load.refused.values()),
        load.whole,
        seen.kills,
        bundles[-1].name if bundles else "",
        silent,
        cause.get("tag", ""),
        cause.get("title", ""),
        dict(load.faults),
        {str(status): count for status, count in sorted(load.refused.items())},
        seen.told,
        passed,
    )


def _silent(bundle: Path) -> list[str]:
    import tarfile

    with tarfile.open(bundle) as tar:
        member = next(entry for entry in tar if entry.name.endswith("verdict.json"))
        file = tar.extractfile(member)
        assert file is not None
        return list(json.load(file)["silent"])


def doctor(paths: Sequence[Path]) -> dict[str, Any]:
    """The best cause that `rayserve doctor` finds, or nothing."""
    command = [
        str(Path(sys.executable).with_name("rayserve")),
        "doctor",
        "--json",
        *map(str, paths),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    causes = json.loads(done.stdout)["causes"] if done.returncode == 0 else []
    return causes[0] if causes else {}


def faults_plan(folder: Path) -> Plan:
    """Two replicas, and a stall limit that a trial can wait for."""
    return make_plan(
        folder,
        replicas={"min": REPLICAS, "max": REPLICAS},
        timeouts={
            "start_s": 240, "drain_s": 30, "stall_s": STALL_S,
            "health_period_s": 5, "health_timeout_s": 15,
        },
        node_pools=[{"name": "local", "hosts": 1, "gpu": "cpu", "gpus_per_host": REPLICAS}],
        parallelism={"tensor": 1, "pipeline": 1},
        limits={"max_model_len": 2048, "max_num_seqs": 16, "kv_cache_gib": 1},
    )  # fmt: skip


def run_fault(fault: Fault) -> Row:
    """One fault on a product of its own."""
    with workbench() as (_, folder), small_disk(folder, fault.disk_bytes) as root:
        plan = fault.prepared(faults_plan(folder))
        with Served(plan, folder, gangs=REPLICAS, temp_root=root) as served:
            asyncio.run(_wait_ready(served))
            row = judged(fault, served, asyncio.run(trial(fault, served)))
    print(f"{fault.name}: {'passed' if row.passed else 'FAILED'} {asdict(row)}", flush=True)
    return row


async def _wait_ready(served: Served) -> None:
    found = await until(lambda: len(ready_replicas(served)) >= REPLICAS, UNRECOVERED_S)
    if found is None:
        raise RuntimeError(f"{REPLICAS} replicas did not become ready")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; returns 1 when a bar was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="some of: " + ", ".join(FAULTS))
    options = parser.parse_args(arguments)
    unknown = set(options.names) - set(FAULTS)
    if unknown:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    rows = [run_fault(FAULTS[name]) for name in options.names or FAULTS]
    path = OUT.parent / ("faults.json" if not options.names else "faults-part.json")
    report = {"machine": describe(), "stall_s": STALL_S, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {path}")
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
