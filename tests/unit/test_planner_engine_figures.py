"""Does the engine benchmark compute, read and judge right, before an engine is started?"""

from __future__ import annotations

import json
import sys
import time

import psutil
import pytest

from benchmarks import planner_engine
from benchmarks.planner_engine import Figures, Started, bars, main, planned, read_log, start, table
from benchmarks.planner_engine_models import MODELS

TINY = {model.name: model for model in MODELS}
LINE = (
    "INFO [kv_cache_utils.py:2327] CPU KV cache size: {:,} tokens, "
    "Maximum concurrency for {:,} tokens per request: {}x\n"
)


def test_every_kind_of_cache_is_among_the_models():
    """The demo's model and at least five others, each of another architecture."""
    names = [model.config["architectures"][0] for model in MODELS]
    assert sum(model.made for model in MODELS) == 1
    assert len(names) >= 6
    assert {"Deepseek", "Gemma3", "Qwen3Moe", "Llama"} <= {
        kind
        for name in names
        for kind in ("Deepseek", "Gemma3", "Qwen3Moe", "Llama")
        if kind in name
    }
    assert sum(bool(model.config["tie_word_embeddings"]) for model in MODELS) >= 2


@pytest.mark.parametrize(
    "name, block_bytes, blocks_per_request",
    [
        # 128 tokens x 2 heads x (32 + 32) x 2 bytes x 4 layers; ceil(3001 / 128)
        ("gqa", 131_072, 24),
        # 16 tokens x 576 x 2 bytes x 4 layers: rank 1 of any number holds it whole; ceil(5003 / 16)
        ("mla", 73_728, 313),
        # two layers a group, of 128 x 2 x 64 x 2 bytes; one group keeps all 8000 tokens, six a window:
        # ceil(8000 / 128) + 6 x (ceil((700 - 1 + 300) / 128) + 1)
        ("hybrid", 65_536, 63 + 6 * 9),
        # 128 x 4 x 128 x 2 x 4; ceil(2049 / 128)
        ("moe", 524_288, 17),
        # one byte an element: 128 x 2 x 128 x 4; ceil(4097 / 128)
        ("tied", 131_072, 33),
    ],
)
def test_the_planners_figures_are_those_of_a_sum_by_hand(name, block_bytes, blocks_per_request):
    """Tokens are int(concurrency x length), and concurrency is blocks over blocks of a request."""
    model = TINY[name]
    concurrency = model.kv_bytes // block_bytes / blocks_per_request
    assert planned(model) == Figures(int(concurrency * model.max_model_len), f"{concurrency:.2f}")


def test_the_logs_figures_are_read_for_the_right_length():
    """A line for another length is not taken, and a log without one gives nothing."""
    log = LINE.format(1, 2, "0.50") + LINE.format(95_281, 3001, "31.75")
    assert read_log(log, 3001) == Figures(95_281, "31.75")
    assert read_log(log, 3002) is None
    assert read_log("", 1) is None


def outcome(printed, error=""):
    """A start that the planner expected 10 tokens of."""
    return Started("gqa", "GQA", Figures(10, "1.00"), printed, 1.0, error)


def test_a_figure_that_differs_misses_the_bar():
    """Equal passes; another concurrency, or no figure, does not, and the table says which."""
    same, other, failed = (
        outcome(Figures(10, "1.00")),
        outcome(Figures(10, "1.01")),
        outcome(None, "ValueError: no"),
    )
    assert bars([same])[0].passed
    assert not bars([same, other])[0].passed
    assert not bars([])[0].passed
    lines = table([same, other, failed])
    assert [line.split()[-1] for line in lines[1:4]] == ["equal", "DIFFERS", "START"]
    assert lines[4] == "gqa: ValueError: no"


def test_a_start_is_read_from_its_log(tmp_path, monkeypatch):
    """What the engine prints is compared; the config that it is given is the model's."""
    model = TINY["gqa"]
    line = LINE.format(95_281, 3001, "31.75")
    monkeypatch.setattr(
        planner_engine, "command", lambda folder, model: [sys.executable, "-c", f"print({line!r})"]
    )
    found = start(model, tmp_path)
    assert found.equal
    assert json.loads((tmp_path / "gqa" / "config.json").read_text()) == dict(model.config)


def test_an_engine_that_fails_is_quoted(tmp_path, monkeypatch):
    """The last error of the log stands in the row."""
    code = "raise NotImplementedError('no such cache')"
    monkeypatch.setattr(
        planner_engine, "command", lambda folder, model: [sys.executable, "-c", code]
    )
    found = start(TINY["gqa"], tmp_path)
    assert not found.equal
    assert found.error == "NotImplementedError: no such cache"


def test_an_engine_that_hangs_is_ended_with_its_children(tmp_path, monkeypatch):
    """After the limit the process and what it started are gone."""
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    monkeypatch.setattr(planner_engine, "START_LIMIT_S", 2.0)
    monkeypatch.setattr(
        planner_engine, "command", lambda folder, model: [sys.executable, "-c", code]
    )
    found = start(TINY["gqa"], tmp_path)
    assert found.printed is None
    pid = int((tmp_path / "gqa.log").read_text())
    deadline = time.monotonic() + 5
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_name_that_is_no_model_is_refused(capsys):
    """The message lists the names that there are."""
    with pytest.raises(SystemExit) as ended:
        main(["gqqa"])
    assert ended.value.code == 2
    assert "hybrid" in capsys.readouterr().err
