"""Where does the overhead of our path go?

    vllm               vLLM's own server
    replica            our replica's own port: door and Serve's server, without HAProxy
    rayserve           the whole path
    rayserve, Ray idle the whole path while Ray's and Serve's other processes are stopped
    door               the door alone, in this process, around an app that only sends

replica - vllm is what Ray Serve and the door add; rayserve - replica is HAProxy's part. What the
stop of Ray's other processes (dashboard, controller, GCS, agents) gives back is what they take from
an engine that has too few cores; no request needs them.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks import load
from benchmarks.stacks import Stack, only
from rayserve.bench import Round
from rayserve.plan import Plan
from rayserve.serving.door import Door
from rayserve.serving.replies import App, Message, Receive, Scope, Send
from tests.ray_cluster import wait_until

DOOR_EVENTS = 20_000
EVENT = b'data: {"choices":[{"index":0,"text":" word","finish_reason":null}]}\n\n'
CONCURRENCIES = (1, 8, 32)
SERVING = ("ray::ServeReplica", "haproxy", "VLLM::", "forkserver")
"""How the names of processes begin that a request needs."""


def run(plan: Plan, folder: Path, rounds: int) -> int:
    """Measure and print; returns the exit code."""
    load.import_generator()
    vllm, ours = Stack("vllm", plan, folder), Stack("rayserve", plan, folder)
    stacks = [vllm, ours]
    figures: dict[tuple[int, str], list[Round]] = {}
    try:
        for stack in stacks:
            with only(stack, stacks):
                print(f"{stack.name}: started in {stack.start():.1f} s", flush=True)
        with only(ours, stacks):
            # Until HAProxy has loaded the replica's port, it answers by way of Serve's own proxy.
            direct = wait_until(lambda: _replica_url(ours), 30, "a replica in HAProxy's config")
        places = (
            ("vllm", vllm, vllm.base_url, False),
            ("replica", ours, direct, False),
            ("rayserve", ours, ours.base_url, False),
            ("rayserve, Ray idle", ours, ours.base_url, True),
        )
        for number in range(rounds):
            for name, stack, url, alone in places:
                with only(stack, stacks):
                    time.sleep(0.5)
                    with _stopped(stack) if alone else contextlib.nullcontext():
                        for concurrency in CONCURRENCIES:
                            seed, log = f"breakdown{number}", folder / "load.log"
                            one = load.measure(stack, concurrency, seed, log, url=url)
                            figures.setdefault((concurrency, name), []).append(one)
    finally:
        for stack in stacks:
            stack.close()
    for (concurrency, name), measured in sorted(figures.items(), key=lambda item: item[0][0]):
        print(_line(concurrency, name, measured))
    print(f"door  {_door_us(plan):.1f} microseconds an event")
    return 0


def _line(concurrency: int, name: str, measured: list[Round]) -> str:
    speed = statistics.median(one.tokens_per_s for one in measured)
    ttft = statistics.median(one.ttft_p50_ms for one in measured)
    tpot = statistics.median(one.tpot_p50_ms for one in measured)
    return (
        f"concurrency {concurrency}  {name:<18} {speed:6.0f} tokens/s  TTFT {ttft:7.2f} ms  "
        f"TPOT {tpot:6.3f} ms"
    )


@contextlib.contextmanager
def _stopped(stack: Stack) -> Iterator[None]:
    """Stop what serves no request."""
    idle = []
    for process in stack.members():
        with contextlib.suppress(psutil.NoSuchProcess):
            if not _serves(process):
                process.suspend()
                idle.append(process)
    try:
        yield
    finally:
        for process in idle:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def _serves(process: psutil.Process) -> bool:
    """Whether a process is a replica, below one, or HAProxy."""
    return any(one.name().startswith(SERVING) for one in (process, *process.parents()))


def _replica_url(stack: Stack) -> str | None:
    """The replica's own port, when Serve's HAProxy forwards to it."""
    prefix = stack.base_url.split("/", 3)[3]
    for config in (stack.folder / "h").rglob("haproxy.cfg"):
        for line in config.read_text().splitlines():
            words = line.split()
            if words[:1] == ["server"] and "backup" not in words:
                return f"http://{words[2]}/{prefix}"
    return None


async def _sends(_: Scope, receive: Receive, send: Send) -> None:
    await receive()
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for _number in range(DOOR_EVENTS):
        await send({"type": "http.response.body", "body": EVENT, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _time(app: App, key: str) -> float:
    headers = [(b"authorization", f"Bearer {key}".encode()), (b"content-type", b"application/json")]
    scope: Scope = {
        "type": "http", "method": "POST", "path": load.PATH, "raw_path": load.PATH.encode(),
        "root_path": "", "query_string": b"", "headers": headers, "http_version": "1.1",
        "scheme": "http", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "state": {},
    }  # fmt: skip
    asked = False

    async def receive() -> Message:
        nonlocal asked
        if asked:
            await asyncio.Event().wait()
        asked = True
        body = b'{"model":"m","prompt":"p","stream":true,"max_tokens":8}'
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] != 200:
            raise RuntimeError(f"the door answered {message['status']}")

    began = time.perf_counter()
    await app(scope, receive, send)
    return time.perf_counter() - began


def _door_us(plan: Plan) -> float:
    """Microseconds that the door adds to an event; median of nine pairs."""
    key = Path(plan.door.api_key_file).read_text().split()[0]
    door = Door(_sends, plan.door)
    door.open()

    async def pair() -> float:
        return await _time(door, key) - await _time(_sends, key)

    pairs = [asyncio.run(pair()) for _ in range(9)]
    return 1e6 * statistics.median(pairs) / DOOR_EVENTS
