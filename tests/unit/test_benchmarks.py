"""Are the benchmarks' tables and loads what they claim, before a server is started for them?"""

from __future__ import annotations

import json
import select
import subprocess
from pathlib import Path

import pytest

from benchmarks import (
    bad_bodies,
    bad_sockets,
    false_kills,
    hostile_files,
    overhead,
    planner_hostile,
    stacks,
)
from benchmarks.child import Child
from benchmarks.load import OUTPUT_TOKENS, PROMPT_WORDS, prompts, request_body
from benchmarks.soak import CUT_SHARE, jobs
from benchmarks.stacks import Stack, server_flags
from benchmarks.wire import Reply
from rayserve.bench import Round
from tests.bad_requests import load

CASES = load()
ROOT = Path(__file__).parents[2]


def test_the_table_of_bad_requests_is_large_and_its_names_differ():
    """At least 60 requests, each with a name of its own."""
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_bad_request_can_be_sent(case):
    """What a case names exists, and its body differs from the good one unless the mistake lies elsewhere."""
    assert not case.make or case.make in bad_bodies.BODIES
    assert not case.socket or case.socket in bad_sockets.CONVERSATIONS
    elsewhere = case.to not in ("chat", "completion", "responses", "messages", "tokenize")
    elsewhere = elsewhere or case.make or case.socket or case.headers or case.key != "right"
    assert elsewhere or case.body() != case.good()


def test_a_key_is_put_where_the_case_says():
    """The placeholder is replaced in paths and headers, and other cases send the right key."""
    by_name = {case.name: case for case in CASES}
    assert by_name["key in the query"].path_for("k1") == "/v1/models?api_key=k1"
    headers = by_name["key in a header that nobody reads"].headers_for("k1")
    assert headers["X-Auth-Token"] == "k1"
    assert "Authorization" not in headers
    assert by_name["max_tokens 0"].headers_for("k1")["Authorization"] == "Bearer k1"


@pytest.mark.parametrize(
    "shape, body, message",
    [
        ("openai", '{"error":{"message":"m","type":"t","param":null,"code":400}}', "m"),
        ("openai", '{"error":{"message":"m","type":"t","param":null,"code":500}}', None),
        ("openai", '{"detail":"m"}', None),
        ("openai", "<html>", None),
        ("anthropic", '{"type":"error","error":{"type":"t","message":"m"}}', "m"),
        ("anthropic", '{"error":{"type":"t","message":"m"}}', None),
    ],
)
def test_error_shapes(shape, body, message):
    """Only an error body of the right dialect and code counts as one."""
    assert Reply(400, body, {}).error(shape) == message


def test_prompts_are_the_same_for_the_same_seed_only():
    """All stacks get the same load, and no round repeats another one's prompts."""
    assert prompts(4, "a") == prompts(4, "a")
    assert not set(prompts(4, "a")) & set(prompts(4, "b"))
    assert all(len(prompt.split()) == PROMPT_WORDS for prompt in prompts(4, "a"))


def test_a_request_fixes_its_number_of_tokens():
    """A load of equal answers: greedy, and no early end."""
    body = request_body("m", "p")
    assert (body["max_tokens"], body["ignore_eos"], body["temperature"]) == (OUTPUT_TOKENS, True, 0)


def test_exactly_a_tenth_of_the_soak_is_cut():
    """The cut jobs are a fixed share, at places within the answer."""
    work = jobs(1000, seed=2)
    cut = [job.cut_after for job in work if job.cut_after >= 0]
    assert len(cut) == 1000 * CUT_SHARE
    assert 0 in cut
    assert max(cut) < OUTPUT_TOKENS - 1
    assert len(set(cut)) > 20


def test_arguments_become_flags_of_vllms_server():
    """Switches, lists and mappings are written as vLLM's parser reads them."""
    flags = server_flags(
        {"enforce_eager": True, "trust_remote_code": False, "seed": 0, "disable_log_stats": False, "a_list": ["x", "y"],
         "override_generation_config": {"top_k": 4}}
    )  # fmt: skip
    assert flags == [
        "--enforce-eager", "--no-trust-remote-code", "--seed", "0", "--a-list", "x", "y",
        "--override-generation-config", '{"top_k": 4}',
    ]  # fmt: skip


@pytest.mark.parametrize(
    "dead, script",
    [
        (False, "trap 'sleep 60 & exit' INT; echo begun; sleep 60 & wait"),
        (True, "echo begun; sleep 60 &"),
    ],
)
def test_no_process_of_a_server_outlives_it(tmp_path, monkeypatch, dead, script):
    """A child begun while an interrupted server ends, or left by a dead one, is ended too."""
    monkeypatch.setattr(stacks, "CHILDREN_LIMIT_S", 0.1)
    server = subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, process_group=0)
    assert server.stdout is not None
    with server.stdout as pipe:
        pipe.readline()
        if dead:
            server.wait(5)
        Stack("vllm", plan=None, folder=tmp_path, process=server).stop()
        ended, _, _ = select.select([pipe], [], [], 5)
    assert ended, "the pipe ends with the last process that holds it"


@pytest.mark.parametrize(
    "arguments, complete",
    [
        ([], True),
        (["--rounds", "6"], True),
        (["--rounds", "4"], False),
        (["--start-rounds", "0"], False),
        (["--stacks", "vllm", "rayserve"], False),
        (["--concurrency", "1", "8"], False),
    ],
)
def test_only_a_whole_comparison_becomes_the_result(arguments, complete):
    """A run that leaves something out never replaces build/bench/overhead.json."""
    assert overhead.is_complete(overhead.options(arguments)) is complete


def test_the_report_has_a_row_for_each_stack_and_concurrency():
    """The result file carries the agreed keys, the bars and every round."""
    rounds = [
        Round(stack, concurrency, 900.0, 20.0, 30.0, 4.0, 5.0, 1.0, 8)
        for stack in overhead.COMMANDS
        for concurrency in (1, 8, 32)
        for _ in range(5)
    ]
    times = {"vllm": [40.0, 41.0], "rayserve": [44.0, 45.0]}
    reads = dict.fromkeys(overhead.COMMANDS, 1.0)
    report, verdicts = overhead._report(rounds, reads, {"cold": times, "second": times})
    json.dumps(report)
    keys = {"stack", "concurrency", "tokens_per_s", "ttft_p50_ms", "tpot_p50_ms", "rounds"}
    assert all((keys | {"events_per_token"}) <= row.keys() for row in report["rows"])
    assert [(row["stack"], row["concurrency"], row["rounds"]) for row in report["rows"]][:2] == [
        ("vllm", 1, 5),
        ("vllm", 8, 5),
    ]
    assert len(report["rows"]) == 9
    failed = [verdict.name for verdict in verdicts if not verdict.passed]
    assert failed == ["tokens/s at 32 against ray.serve.llm"]
    assert any("cold start" in verdict.name for verdict in verdicts)


# ── the planner's hostile inputs ──────────────────────────────────────────────────────────────────
def test_the_hostile_inputs_are_many_and_their_names_differ():
    """At least as many as the benchmark wants, each with a name of its own."""
    names = [case.name for case in hostile_files.cases()]
    assert len(names) >= planner_hostile.CASES_MIN
    assert len(set(names)) == len(names)


REFUSED = {"error": "SpecError", "needed": "a `b` of 3", "found": "c", "do": "d", "path": "e"}


@pytest.mark.parametrize(
    "change, fault",
    [
        ({}, ""),
        ({"code": 0}, "exit code 0"),
        ({"err": "Traceback (most recent call last)"}, "a traceback"),
        ({"cpu_s": 3.0}, "of processor"),
        ({"peak_mib": 300.0}, "300 MiB"),
        ({"out": json.dumps({**REFUSED, "do": ""})}, "no do"),
        ({"out": json.dumps({**REFUSED, "path": ""})}, "no path"),
        ({"out": json.dumps({**REFUSED, "found": "c" * 2000})}, "a message of"),
        ({"out": json.dumps({**REFUSED, "found": "z"})}, "no 'found: c'"),
        ({"out": "wrote plan.yml"}, "no needed"),
    ],
)
def test_an_input_fails_for_each_thing_that_is_promised(monkeypatch, change, fault):
    """Exit code, message, time and memory are each judged."""
    whole = {"code": 2, "out": json.dumps(REFUSED), "err": "", "wall_s": 1.0, "cpu_s": 1.0,
             "peak_mib": 50.0}  # fmt: skip
    child = Child(**{**whole, **change})
    monkeypatch.setattr(planner_hostile, "rayserve", lambda *_, **__: child)
    case = hostile_files.Hostile("x", "found: c", lambda folder: None)
    found = planner_hostile.run_case(case).fault
    assert fault in found
    assert bool(found) is bool(fault)


def test_the_same_error_counts_once():
    """Names and numbers of an input do not make another error."""
    assert planner_hostile._plain("`a` of 3") == planner_hostile._plain("`b` of 77")


def test_make_clean_leaves_what_was_measured(tmp_path):
    """Everything built goes, but for the runs of the benchmarks, which nothing can make again."""
    run = tmp_path / "build" / "bench" / "runs" / "overhead-1.json"
    built = [tmp_path / "build" / name for name in ("bench/last.json", "bench/runs.old/x", "a/b/c")]
    for file in (run, *built, tmp_path / "dist" / "x.whl"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    for name in ("rayserve", "tests", "scripts", "benchmarks"):
        (tmp_path / name / "__pycache__").mkdir(parents=True)
    command = ["make", "-f", str(ROOT / "Makefile"), "clean"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=30)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [run]
    assert not list(tmp_path.rglob("__pycache__"))


def test_the_trial_of_false_kills_is_written_and_judged():
    """Half an hour of load ends in a file; an answer that is neither whole nor a full queue's fails it."""
    seen = false_kills.Seen(least_waiting=3, served_after_pause=True)
    seen.answers.update({"200": 2, "429": 1})
    report = json.loads(json.dumps(false_kills.as_report(seen)))
    assert report["answers"] == {"200": 2, "429": 1}
    assert report["passed"]
    seen.answers["503"] += 1
    assert not false_kills.as_report(seen)["passed"]
