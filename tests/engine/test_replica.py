"""Does a replica with a real engine keep its promises: abort, drain, limits, keys?"""

from __future__ import annotations

import http.client
import json
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from rayserve import inventory, planning
from rayserve.clients import ServeApi
from rayserve.deploy import deploy
from rayserve.errors import StartError
from rayserve.starts import LEDGER, read_starts
from tests.engine.calls import Call, all_gone, family, replica_pid, stream, tokens_of
from tests.ray_cluster import wait_until
from tests.served import Served, make_plan, metrics, own_port

MOST_TOKENS = 1500
SPEC = {
    "sampling": {"temperature": 0.0},
    "door": {"max_tokens": MOST_TOKENS},
    "timeouts": {"start_s": 240, "drain_s": 30},
}


@pytest.fixture(scope="module")
def served():
    """The product with greedy sampling by default and a cap on tokens."""
    # Not tmp_path: HAProxy's sockets lie in this folder and take paths of 97 characters.
    with tempfile.TemporaryDirectory(prefix="rse-", dir="/tmp") as name:
        plan = make_plan(Path(name), **SPEC)
        with Served(plan, Path(name)) as running:
            yield running


def test_each_start_leaves_a_line_in_the_ledger(served):
    """Phases in seconds and the engine's own memory figures, for the planner to calibrate from."""
    (line,) = (served.folder / "state" / LEDGER).read_text().splitlines()
    start = json.loads(line)
    phases = {"import", "config", "engine", "read", "weights", "profile", "app", "warm-up"}
    assert phases <= set(start["phases_s"])
    assert start["revision"] == served.plan.revision
    assert start["memory"][0]["requested_bytes"] > 0
    assert start["engine"]["num_gpu_blocks"] > 0
    assert "total_bytes" not in start["memory"][0], "the CPU engine has no GPU memory"


def test_the_planner_predicts_the_next_start_from_the_ledger(served):
    """The line of a real start is comparable with its own plan, and becomes the next start's time."""
    ledger = served.folder / "state" / LEDGER
    (start,) = read_starts(ledger.read_bytes()).starts
    planned = planning.make_plan(inventory.locate(str(served.folder), None), [str(ledger)])
    assert planned.plan.revision == served.plan.revision
    assert planned.plan.memory is None
    assert planned.plan.start is not None
    assert planned.plan.start.starts == 1
    assert planned.plan.start.expected_s == pytest.approx(start.total_s, abs=0.1)


def test_serves_own_log_of_the_replica_goes_on_after_vllms_start(served):
    """People are sent to it for a failed start, a hang and the evidence."""
    (log,) = (served.ray.temp_dir / "session_latest/logs/serve").glob("replica_*.log")
    assert f"start {served.plan.revision}: ready after" in log.read_text()


def test_a_client_that_leaves_ends_its_generation(served):
    """The engine stops working for a client that hung up, long before the answer would be whole."""
    before = metrics(served)["vllm:generation_tokens_total"]
    call = stream(served, MOST_TOKENS)
    for _ in range(6):
        call.reply.readline()
    call.close()
    wait_until(lambda: metrics(served)["vllm:num_requests_running"] == 0, 5, "an idle engine")
    made = metrics(served)["vllm:generation_tokens_total"] - before
    assert made < MOST_TOKENS


def test_the_plans_sampling_holds_where_the_client_says_nothing(served):
    """Greedy by default: the same answer each time. The client's own temperature wins."""
    body = {"prompt": "a", "max_tokens": 24, "ignore_eos": True}
    own = {"temperature": 2.0}

    def texts(extra: dict[str, Any]) -> set[str]:
        answers = [
            Call(served, "/v1/completions", {**body, **extra, "seed": seed}).json()
            for seed in (1, 2, 3)
        ]
        return {answer["choices"][0]["text"] for answer in answers}

    assert len(texts({})) == 1
    assert len(texts(own)) == 3


def test_a_request_that_names_no_limit_gets_the_plans(served):
    """Without max_tokens a chat would run to the end of the context."""
    body = {"messages": [{"role": "user", "content": "go on"}], "ignore_eos": True}
    answer = Call(served, "/v1/chat/completions", body).json()
    assert answer["usage"]["completion_tokens"] == MOST_TOKENS


def test_tokens_come_one_by_one(served):
    """Each event of a stream carries one token: nothing on the way batches them."""

    def pieces() -> int:
        events = [json.loads(data) for data in stream(served, 64).events()[:-1]]
        return len([event for event in events if event["choices"]])

    # A replica that gets too little of the CPU puts tokens together, now and then; what would
    # batch on the way does so each time.
    assert any(pieces() == 64 for _ in range(3))


def test_keys_are_read_anew_while_the_model_runs(served):
    """A new key works within seconds, and the old one stops; the replica stays the same process."""
    pid = replica_pid(served)
    path = Path(served.plan.door.api_key_file)
    old, new = served.key, secrets.token_urlsafe(24)
    body = {"prompt": "a", "max_tokens": 1}

    def status(key: str) -> int:
        call = Call(served, "/v1/completions", body, key)
        call.events()
        return call.reply.status

    path.write_text(f"{new}\n")
    try:
        wait_until(lambda: status(new) == 200, 5, "the new key")
        assert status(old) == 401
    finally:
        path.write_text(f"{old}\n")
    wait_until(lambda: status(old) == 200, 5, "the old key again")
    assert replica_pid(served) == pid


def test_closing_admission_keeps_running_streams(served):
    """`admit: false` refuses new requests with 503 and Retry-After; a running stream ends whole."""
    pid = replica_pid(served)
    running = stream(served, MOST_TOKENS)
    served.change_door(admit=False)
    refused = Call(served, "/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert refused.reply.status == 503
    assert refused.reply.headers["Retry-After"]
    assert refused.json()["error"]["type"] == "service_unavailable_error"
    assert tokens_of(running) == MOST_TOKENS
    served.change_door(admit=True)
    assert Call(served, "/v1/completions", {"prompt": "a", "max_tokens": 1}).reply.status == 200
    assert replica_pid(served) == pid


def test_a_live_change_that_cannot_work_keeps_the_old_limits(served):
    """A key file that is not there is refused by the running replica, which goes on as before."""
    pid = replica_pid(served)
    served.change_door(api_key_file="/nonexistent/keys")
    body = {"prompt": "a", "max_tokens": 1}
    assert Call(served, "/v1/completions", body).reply.status == 200
    served.change_door()
    assert replica_pid(served) == pid


def test_a_deploy_of_limits_that_the_replica_refuses_fails(served, monkeypatch):
    """Serve itself calls it running; whoever took a key back would believe that it is gone."""
    monkeypatch.setattr("rayserve.deploy.LIMITS_S", 4.0)
    api = ServeApi(served.ray.dashboard_port, "")
    door = served.plan.door.model_copy(update={"api_key_file": "/nonexistent/keys"})
    with pytest.raises(StartError, match="refused these"):
        deploy(served.plan.model_copy(update={"door": door}), api)
    assert deploy(served.plan, api).app == served.application["name"]


def test_a_running_door_never_loses_its_keys(served):
    """Behind HAProxy a live change to no keys is refused: who has none still meets 401."""
    pid = replica_pid(served)
    served.change_door(api_key_file="")
    body = {"prompt": "a", "max_tokens": 1}
    assert Call(served, "/v1/completions", body, "no-key-of-this-door").reply.status == 401
    assert Call(served, "/v1/completions", body).reply.status == 200
    served.change_door()
    assert replica_pid(served) == pid


def test_hanging_up_does_not_dodge_the_token_budget(served):
    """What was generated for a client that left counts, also where it asked for no stream."""
    budget = 12
    path = Path(served.plan.door.api_key_file)
    key = secrets.token_urlsafe(24)
    small = {"prompt": "a", "max_tokens": 1}

    def ask() -> Call:
        return Call(served, "/v1/completions", small, key)

    path.write_text(f"{served.key}\n{key}\n")
    served.change_door(key_tokens_per_minute=budget)
    try:
        wait_until(lambda: ask().reply.status == 200, 5, "the fresh key")
        body = {"prompt": "once upon a time", "max_tokens": MOST_TOKENS, "ignore_eos": True}
        before = metrics(served)["vllm:generation_tokens_total"]
        hang_up_after(served, body, key, 0.4)
        wait_until(lambda: metrics(served)["vllm:num_requests_running"] == 0, 5, "an idle engine")
        made = metrics(served)["vllm:generation_tokens_total"] - before
        assert 0 < made < MOST_TOKENS
        refused = ask()
        assert refused.reply.status == 429
        assert int(refused.reply.headers["Retry-After"]) > 1
    finally:
        path.write_text(f"{served.key}\n")
        served.change_door()


def test_a_long_prompt_counts_against_the_token_budget(served):
    """The budget is of prompt and answer: one token after a long prompt uses up what a short one leaves."""
    path = Path(served.plan.door.api_key_file)
    key = secrets.token_urlsafe(24)
    path.write_text(f"{served.key}\n{key}\n")
    served.change_door(key_tokens_per_minute=100)
    try:

        def ask(prompt: str) -> Call:
            return Call(served, "/v1/completions", {"prompt": prompt, "max_tokens": 1}, key)

        wait_until(lambda: ask("a").reply.status == 200, 5, "the fresh key")
        assert ask("a").reply.status == 200
        long = ask("once upon a time there was " * 40)
        assert long.reply.status == 200
        assert long.json()["usage"]["completion_tokens"] == 1
        assert ask("a").reply.status == 429
    finally:
        path.write_text(f"{served.key}\n")
        served.change_door()


def hang_up_after(served: Served, body: dict[str, Any], key: str, seconds: float) -> None:
    """Ask for an answer that is not streamed, and leave before it can be there."""
    url = urlsplit(served.url)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=60)
    headers = {"Content-Type": "application/json", "x-api-key": key}
    text = json.dumps({"model": served.model, **body})
    connection.request("POST", f"{url.path}/v1/completions", text, headers)
    time.sleep(seconds)
    connection.close()


def test_deleting_the_application_drains_it(served):
    """A running stream ends whole; whoever still reaches the replica gets 503 and Retry-After."""
    direct = Served(served.plan, served.folder)
    direct.url = (
        f"http://127.0.0.1:{own_port(replica_pid(served))}{served.application['route_prefix']}"
    )
    body = {"prompt": "a", "max_tokens": 1}
    running = stream(served, MOST_TOKENS)
    served.ray.deploy({"applications": []})
    wait_until(lambda: Call(direct, "/v1/completions", body).reply.status != 200, 2, "a refusal")
    refused = Call(direct, "/v1/completions", body)
    assert refused.reply.status == 503
    assert refused.reply.headers["Retry-After"]
    assert tokens_of(running) == MOST_TOKENS
    status = Call(served, "/v1/completions", body).reply.status
    assert status in {404, 503}  # no route any more, or not yet gone


def test_a_stream_beyond_the_drain_limit_is_cut_and_nothing_is_left(served):
    """The drain limit holds: when it is over, the replica and its engine are gone."""
    (override,) = served.config["applications"][0]["deployments"]
    override["graceful_shutdown_timeout_s"] = 3.0
    served.ray.deploy(served.config)
    wait_until(
        lambda: stream(served, 1).reply.status == 200, 120, "the application, deployed once more"
    )
    below = family(replica_pid(served))
    # Far more than can be done within the limit and the time that the family is given below.
    body = {"prompt": "a", "max_tokens": MOST_TOKENS, "ignore_eos": True, "stream": True}
    body |= {"n": 4, "temperature": 1.0}  # greedy sampling takes no n
    running = [Call(served, "/v1/completions", body) for _ in range(16)]
    assert {call.reply.status for call in running} == {200}
    served.ray.deploy({"applications": []})
    wait_until(lambda: all_gone(below), 25, "the end of the whole family")
    for call in running:
        call.close()
