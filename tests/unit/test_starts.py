"""Is a line of the start ledger read as it was written, and a bad one never believed?"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve.plan import NamedValue
from rayserve.planner.memory.budget import requested_bytes
from rayserve.starts import (
    MOST_LINE_BYTES,
    MOST_STARTS,
    Start,
    identity,
    newest,
    read_starts,
    settings_sha256,
    starts_text,
)
from tests.golden_specs import GOLDEN, plan_of
from tests.start_lines import GIB, ledger_of, lines, rank_memory, start_line

PLAN = plan_of(GOLDEN / "one-host-w4a16.yml")
CPU = plan_of(GOLDEN / "cpu-eight-ranks.yml")


def changed(**engine_args):
    """The replica with other engine arguments."""
    items = [item for item in PLAN.replica.engine_args if item.name not in engine_args]
    items += [NamedValue(name=name, value=value) for name, value in engine_args.items()]
    return PLAN.replica.model_copy(update={"engine_args": items})


def test_a_line_survives_being_kept():
    """What a replica writes is read, written in one order, and read again as the same start."""
    (start,) = ledger_of(start_line(PLAN)).starts
    assert start.cut == (8, 1)
    assert start.memory[7].device_name == "NVIDIA A100-SXM4-80GB"
    assert read_starts(starts_text([start]).encode()).starts == (start,)


def test_a_line_of_the_cpu_engine_is_read():
    """Its workers measure no memory, and name no device."""
    (start,) = ledger_of(start_line(CPU)).starts
    assert start.device == "cpu"
    assert start.memory[0].total_bytes is None


def test_a_line_has_no_environment_and_no_arguments():
    """They are hashed: what people put into `env` does not leave the host with the ledger."""
    secret = NamedValue(name="NCCL_SOCKET_IFNAME", value="do-not-tell")
    replica = PLAN.replica.model_copy(update={"env": [*PLAN.replica.env, secret]})
    text = json.dumps(start_line(replica))
    assert "do-not-tell" not in text
    assert "NCCL" not in text
    assert "api_key" not in text
    assert settings_sha256(replica) != settings_sha256(PLAN.replica)


@pytest.mark.parametrize(
    "name, value, same",
    [
        ("seed", 7, True),
        ("gpu_memory_utilization", 0.5, True),
        ("max_num_seqs", 8, True),
        ("enforce_eager", True, False),
        ("kv_cache_dtype", "fp8", False),
        ("enable_expert_parallel", True, False),
    ],
)
def test_settings_that_change_memory_are_told_apart(name, value, same):
    """The limits stand in the line and the seed does nothing; whatever else differs counts."""
    assert (settings_sha256(changed(**{name: value})) == settings_sha256(PLAN.replica)) is same


def test_unknown_keys_are_not_kept():
    """A line of a later rayserve is read; what is written beside the spec is known."""
    line = start_line(PLAN, later={"a": 1})
    line["memory"][0]["note"] = "x"
    (start,) = ledger_of(line).starts
    assert "later" not in start.text()
    assert "note" not in start.text()


def without(name):
    """The line without a key."""
    line = start_line(PLAN)
    del line[name]
    return line


def one_rank(**terms):
    """The line with a changed first rank."""
    line = start_line(PLAN)
    line["memory"][0] = {**line["memory"][0], **terms}
    return line


TOTAL = int(79.25 * GIB)
BAD = {
    "an old line": ({"revision": "x", "memory": [], "engine": {}}, "`schema` is not 2"),
    "a later format": (start_line(PLAN, schema=3), "`schema` is not 2"),
    "a text as schema": (start_line(PLAN, schema="2"), "`schema` is not 2"),
    "no config digest": (without("model_config_sha256"), "model_config_sha256"),
    "an empty digest": (start_line(PLAN, model_config_sha256=""), "model_config_sha256"),
    "no engine": (without("engine"), "engine"),
    "a list": ([1, 2], "should be an object"),
    "negative weights": (one_rank(weights_bytes=-1), "memory.0.weights_bytes"),
    "no weights at all": (one_rank(weights_bytes=0), "memory.0.weights_bytes"),
    "weights as text": (one_rank(weights_bytes="25"), "memory.0.weights_bytes"),
    "weights as a fraction": (one_rank(weights_bytes=25.5), "memory.0.weights_bytes"),
    "weights as true": (one_rank(weights_bytes=True), "memory.0.weights_bytes"),
    "weights beyond any machine": (one_rank(weights_bytes=2**70), "memory.0.weights_bytes"),
    "more than the GPU": (one_rank(weights_bytes=TOTAL + 1), "more than the whole GPU"),
    "weights above what is consumed": (one_rank(weights_bytes=28 * GIB), "more weights than"),
    "a sum that is not vLLM's": (one_rank(kv_bytes=10 * GIB), "is not the KV cache"),
    "a GPU without a total": (one_rank(total_bytes=None), "total_bytes"),
    "escape codes as a device": (one_rank(device_name="\x1b[31mA100"), "device_name"),
    "seven of eight ranks": (
        start_line(PLAN, memory=[rank_memory(rank) for rank in range(7)]),
        "not that of 8 ranks",
    ),
    "a rank twice": (start_line(PLAN, memory=[rank_memory(0)] * 8), "not that of 8 ranks"),
    "no ranks": (start_line(PLAN, memory=[]), "not that of 8 ranks"),
    "no step": (start_line(PLAN, max_num_batched_tokens=0), "max_num_batched_tokens"),
    "a huge cut": (start_line(PLAN, tensor_parallel_size=1, memory=[], pipeline_parallel_size=1)
                   | {"engine": {**start_line(PLAN)["engine"], "tensor_parallel_size": 10**9}},
                   "tensor_parallel_size"),
    "a negative phase": (start_line(PLAN, phases_s={"engine": -1.0}), "phases_s"),
    "a phase beyond the start": (start_line(PLAN, phases_s={"engine": 300.0}), "longer than the"),
    "a hostile phase name": (start_line(PLAN, phases_s={"\x1b[2J": 1.0}), "phases_s"),
    "no time": (start_line(PLAN, started_at=0), "started_at"),
    "another device": (start_line(PLAN, device="tpu"), "device"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_line_that_cannot_be_believed_is_ignored(case):
    """It is no start, its fault is named, and the sound line behind it still counts."""
    line, fault = BAD[case]
    found = read_starts(lines(line, start_line(PLAN)))
    assert len(found.starts) == 1
    assert len(found.faults) == 1
    assert found.faults[0].startswith("line 1: ")
    assert fault in found.faults[0]
    assert found.faults[0].isprintable()
    assert len(found.faults[0]) < 300


GOOD = json.dumps(start_line(PLAN))
RAW = {
    "cut short": (GOOD[: len(GOOD) // 2].encode(), "not JSON"),
    "NaN": (GOOD.replace('"total_s": 200.0', '"total_s": NaN').encode(), "total_s"),
    "infinity": (GOOD.replace('"total_s": 200.0', '"total_s": Infinity').encode(), "total_s"),
    "a number without end": (GOOD.replace("200.0", "9" * 5000).encode(), ""),
    "no text": (b"\x00\xff\xfe", "not JSON"),
    "deep": (b"[" * 100_000, ""),
    "a lone surrogate": (GOOD.replace('"model": "', '"model": "\\ud800').encode(), ""),
    "long": (b'"' + b"x" * MOST_LINE_BYTES + b'"', "longer than any start"),
}


@pytest.mark.parametrize("case", RAW)
def test_a_damaged_line_is_ignored(case):
    """Neither a crash in the middle of a write nor a hostile file is evidence, or an error."""
    raw, fault = RAW[case]
    found = read_starts(raw + b"\n" + GOOD.encode())
    assert len(found.starts) == 1
    assert fault in found.faults[0]
    assert len(found.faults) == 1


@given(st.binary(max_size=300))
def test_any_bytes_are_read(data):
    """No content of a file raises, and random bytes are no start."""
    assert read_starts(data).starts == ()


def test_the_newest_starts_are_kept_once():
    """Copies of a line count once, the order of files does not matter, and old ones go."""
    records = [start_line(PLAN, started_at=1e9 + number) for number in range(MOST_STARTS + 5)]
    starts = ledger_of(*records).starts
    assert len(starts) == MOST_STARTS
    assert starts[0].started_at == 1e9 + 5
    assert newest([*reversed(starts), *starts]) == starts


def test_identity_names_the_config_that_the_plan_has():
    """The digest is that of config.json in the plan, and no other file's."""
    found = identity(PLAN.replica)
    (content,) = PLAN.replica.content
    assert found["model_config_sha256"] == content.value
    assert found["device"] == "cuda"


def test_a_rank_that_reports_less_is_sound():
    """With a KV cache of fixed size vLLM profiles nothing: there are weights and no more."""
    line = start_line(PLAN)
    keep = {"rank", "device_name", "total_bytes", "weights_bytes", "requested_bytes"}
    line["memory"] = [
        {name: value for name, value in rank.items() if name in keep} for rank in line["memory"]
    ]
    (start,) = ledger_of(line).starts
    assert isinstance(start, Start)
    assert start.memory[0].requested_bytes == requested_bytes(TOTAL, 0.92)
