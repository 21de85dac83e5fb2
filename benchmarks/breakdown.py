"""Where does the overhead of one token go, at concurrency 1?

    vllm               vLLM's own server
    replica            our replica's own port: door and Serve's server, without HAProxy
    rayserve           the whole path
    door               the door alone, in this process, around an app that only sends

replica - vllm is what Ray Serve and the door add; rayserve - replica is HAProxy's part.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

from benchmarks import load
from benchmarks.stacks import Stack, only
from rayserve.bench import Round
from rayserve.plan import Plan
from rayserve.serving.door import Door
from rayserve.serving.replies import App, Message, Receive, Scope, Send

DOOR_EVENTS = 20_000
EVENT = b'data: {"choices":[{"index":0,"text":" word","finish_reason":null}]}\n\n'


def run(plan: Plan, folder: Path, rounds: int) -> int:
    """Measure and print; returns the exit code."""
    load.import_generator()
    vllm, ours = Stack("vllm", plan, folder), Stack("rayserve", plan, folder)
    stacks = [vllm, ours]
    figures: dict[str, list[Round]] = {"vllm": [], "replica": [], "rayserve": []}
    try:
        for stack in stacks:
            with only(stack, stacks):
                print(f"{stack.name}: started in {stack.start():.1f} s", flush=True)
        direct = _replica_url(ours)
        for number in range(rounds):
            places = (("vllm", vllm, vllm.base_url), ("replica", ours, direct),
                      ("rayserve", ours, ours.base_url))  # fmt: skip
            for name, stack, url in places:
                with only(stack, stacks):
                    time.sleep(0.5)
                    seed = f"breakdown{number}"
                    figures[name].append(load.measure(stack, 1, seed, folder / "load.log", url=url))
    finally:
        for stack in stacks:
            stack.close()
    for name, measured in figures.items():
        ttft = statistics.median(one.ttft_p50_ms for one in measured)
        tpot = statistics.median(one.tpot_p50_ms for one in measured)
        print(f"{name:<10} TTFT {ttft:7.2f} ms  TPOT {tpot:6.3f} ms")
    print(f"door       {_door_us(plan):.1f} microseconds an event")
    return 0


def _replica_url(stack: Stack) -> str:
    """The replica's own port, which Serve's HAProxy forwards to."""
    prefix = stack.base_url.split("/", 3)[3]
    for config in (stack.folder / "h").rglob("haproxy.cfg"):
        for line in config.read_text().splitlines():
            words = line.split()
            if words[:1] == ["server"] and "backup" not in words:
                return f"http://{words[2]}/{prefix}"
    raise LookupError("no replica among HAProxy's servers")


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
    door.set_ready(True)

    async def pair() -> float:
        return await _time(door, key) - await _time(_sends, key)

    pairs = [asyncio.run(pair()) for _ in range(9)]
    return 1e6 * statistics.median(pairs) / DOOR_EVENTS
