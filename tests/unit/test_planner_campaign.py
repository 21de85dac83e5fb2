"""Are the planners compared on the same cases, and their errors counted both ways?"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from benchmarks import planner_hf_mem
from benchmarks.planner_formulas import Answer
from benchmarks.planner_hf_mem import ask, respond
from benchmarks.planner_rivals import OURS, RIVALS, compare, logged_figures, main
from benchmarks.planner_scores import (
    Compared,
    Logged,
    bars,
    campaign_table,
    error_table,
    score,
    shared,
    verdict_table,
)
from rayserve.units import GIB
from tests.unit.rival_questions import (
    LLAMA,
    LLAMA_BYTES,
    REFUSED,
    STARTED,
    config,
    question,
)


def judged(tmp_path, cases, *more):
    """Exit code and report of the benchmark."""
    paths = [tmp_path / name for name in ("cases.json", "configs.json", "out.json")]
    paths[0].write_text(json.dumps(cases))
    paths[1].write_text(json.dumps([{**LLAMA, "checkpoint_total_size_bytes": LLAMA_BYTES}]))
    code = main([str(paths[0]), "--configs", str(paths[1]), "--json", str(paths[2]), *more])
    return code, json.loads(paths[2].read_text())


def test_the_nearest_tool_passes_every_bar(tmp_path, capsys):
    """A start and a refusal: this planner is nearest in each figure, and the table has all tools."""
    code, report = judged(tmp_path, [STARTED, REFUSED], "--verbose")
    shown = capsys.readouterr().out
    assert code == 0, shown
    assert len(report["bars"]) == 6
    assert all(bar["passed"] for bar in report["bars"])
    assert {row["tool"] for row in report["rows"]} == {OURS, *RIVALS}
    assert "worst +0.00 %" in shown
    for tool in RIVALS:
        assert tool in shown


def test_a_tool_that_comes_nearer_fails_the_bar(tmp_path):
    """With logged weights that are the files' bytes, which vLLM pads, the others are nearer: code 1."""
    code, report = judged(
        tmp_path, [{**STARTED, "weights_gib_per_gpu": LLAMA_BYTES / GIB}, REFUSED]
    )
    assert code == 1
    assert [bar["name"] for bar in report["bars"] if not bar["passed"]] == [
        "weights, mean error beside other tools"
    ]


def test_no_case_is_no_success(tmp_path):
    """Without any case that can be asked nothing was measured, and nothing passes."""
    code, report = judged(tmp_path, [{**STARTED, "model": "a/b", "config_key": None}])
    assert code == 1
    assert not any(bar["passed"] for bar in report["bars"])
    assert report["rows"] == [{"id": "started", "left_out": "the model's config is not at hand"}]


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"notes": "cpu offload"}, "offloaded"),
        ({"outcome": "error", "error": "Free memory on device cuda:0 (9.1/79.2 GiB)"}, "process"),
        ({"outcome": "error", "error": "unknown flag"}, "something else"),
        ({"quantization": "bitsandbytes"}, "checkpoint size"),
    ],
)
def test_what_nobody_can_know_is_asked_of_nobody(change, reason):
    """Offload, another process's memory, other errors, unknown formats: left out with the reason."""
    found = compare({**STARTED, **change}, LLAMA)
    assert reason in found.reason
    assert all(answer == Answer() for answer in found.answers.values())


def test_figures_that_a_log_does_not_pin_are_not_compared():
    """One stage's cache over the poorest stage's concurrency is no request; no length, no verdict."""
    assert logged_figures(STARTED).request_gib == 1.0
    assert logged_figures({**STARTED, "pp": 2}).request_gib is None
    assert logged_figures({**STARTED, "kv_cache_gib_per_gpu": -1.4}).kv_gib is None
    assert not logged_figures({**STARTED, "max_model_len": None}).started


@pytest.mark.parametrize("flags", [{"dtype": "float32"}, {"kv_cache_dtype": "fp8"},
                                   {"quantization": "fp8"}, {"url": "x"}])  # fmt: skip
def test_the_campaign_is_what_its_report_covers(flags):
    """Starts with flags that llm-d-planner does not take are not held against its published errors."""
    assert compare(STARTED, LLAMA).campaign
    assert not compare({**STARTED, **flags}, LLAMA).campaign


def compared(name, logged, **answers):
    """A case with weights of 10 and these answers."""
    return Compared(name, logged, answers, campaign=True)


def two_cases():
    """One that both tools answer, and one that is answered by `ours` alone, badly."""
    logged = Logged(weights_gib=10.0, started=True)
    return [
        compared("a", logged, ours=Answer(weights_gib=10.1), other=Answer(weights_gib=12.0)),
        compared("b", logged, ours=Answer(weights_gib=20.0), other=Answer()),
    ]


def test_the_same_cases_are_those_that_all_answer():
    """An answer that the other tool does not have counts on its own, not in the comparison."""
    cases = two_cases()
    assert score(cases, "ours", "weights_gib").mean == pytest.approx(50.5)
    assert [case.id for case in shared(cases, "weights_gib")] == ["a"]
    first = next(iter(bars(cases)))
    assert first.passed
    assert first.cases == 1
    line = next(
        line for line in error_table(cases) if line.startswith("weights") and "ours" in line
    )
    assert line.split()[2:] == ["2", "50.50", "50.50", "100.00", "1", "1.00", "1.00", "1.00"]


def test_wrong_verdicts_are_counted_both_ways():
    """`fits` on a refused start, `cannot fit` on one that ran; a wish to measure is neither."""
    refused = Logged(refused_for_memory=True)
    ran = Logged(started=True)
    cases = [
        compared("a", refused, ours=Answer(fits=False), other=Answer(fits=True)),
        compared("b", refused, ours=Answer(measure=True), other=Answer(fits=None)),
        compared("c", ran, ours=Answer(fits=True), other=Answer(fits=False)),
    ]
    table = verdict_table(cases)
    assert table[1].split() == [
        *("ours", "0", "of", "1", "refused"),
        *("0", "of", "1", "started", "1", "0"),
    ]
    assert table[2].split()[1:9] == ["1", "of", "1", "refused", "1", "of", "1", "started"]
    last = list(bars(cases))[-1]
    assert (last.passed, last.cases) == (True, 2)
    wrong = [*cases, compared("d", refused, ours=Answer(fits=True), other=Answer(fits=True))]
    assert not list(bars(wrong))[-1].passed


def test_published_errors_stand_beside_the_formula():
    """The table of the campaign has the published figure, the formula's and ours; none without cases."""
    table = campaign_table(two_cases(), {"weights_gib": 0.89}, "other")
    assert table[1].split() == ["weights", "1", "0.89", "20.00", "50.50"]
    assert campaign_table([], {"weights_gib": 0.89}, "other") == []


@pytest.mark.parametrize(
    "content", ["{", '[{"id": 1}]', '{"a": 1}', "[3]", json.dumps([{**STARTED, "tp": "x"}])]
)
def test_a_case_file_of_another_kind_is_refused(tmp_path, capsys, content):
    """Broken JSON, and JSON that is no list of cases, end with code 2 and a message."""
    path, configs = tmp_path / "cases.json", tmp_path / "configs.json"
    path.write_text(content)
    configs.write_text(json.dumps([LLAMA]))
    try:
        code = main([str(path), "--configs", str(configs)])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert "error:" in capsys.readouterr().err


class HubOfOne:
    """Stands for hf-mem: reads header and config as it does, and multiplies nothing."""

    class httpx2:  # noqa: N801
        """Its HTTP library."""

        AsyncClient = object

    def __init__(self, asked):
        self.asked = asked

    def run(self, name, *, experimental=False, **_):
        """Bytes of the tensors in the header; no cache for a checkpoint of GPTQ."""
        begin = respond(self.asked, "/x/model.safetensors")
        tensors = json.loads(begin[8 : 8 + int.from_bytes(begin[:8], "little")])
        size = sum(2 * entry["shape"][0] for entry in tensors.values())
        config = json.loads(respond(self.asked, "/x/config.json"))
        if experimental and config.get("quantization_config"):
            raise RuntimeError("not supported")
        return SimpleNamespace(memory=size, kv_cache=GIB)


def test_hf_mem_is_given_the_same_inputs():
    """The header that it reads holds the checkpoint's elements, and the config the model's fields."""
    asked = question()
    assert ask(HubOfOne(asked), asked) == Answer(weights_gib=LLAMA_BYTES / GIB, request_gib=1.0)
    packed = question(config=config(quantization_config={"quant_method": "gptq"}))
    assert ask(HubOfOne(packed), packed).request_gib is None
    assert [entry["path"] for entry in json.loads(respond(asked, "/api/tree/main"))] == [
        "model.safetensors",
        "config.json",
    ]


def test_without_hf_mem_nothing_is_claimed(monkeypatch, capsys):
    """Where the package is not installed the command ends with code 2 and says so."""
    monkeypatch.setitem(sys.modules, "hf_mem.run", None)
    assert planner_hf_mem.main(["cases.json", "--configs", "configs.json"]) == 2
    assert "hf-mem" in capsys.readouterr().err
