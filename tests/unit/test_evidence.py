"""Is a replica's evidence written whole, small, without prompts, whatever does not answer?"""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
import time

import psutil
import pytest

from rayserve.health.facts import evidence
from rayserve.health.facts.run import Output
from rayserve.health.readings.ranks import Sight

LOG = """\
\x1b[0;36m(EngineCore pid=4711)\x1b[0;0m INFO 11-30 17:00:00 [core.py:1] ready
\x1b[0;36m(Worker_TP1 pid=4802)\x1b[0;0m INFO 11-30 17:00:01 [worker.py:1] step 7
(Worker_TP1 pid=4802) INFO Received request x: prompt: 'tell me of my debts', params: 1
a line of the replica's own, api_key=sk-abcdefgh
"""


def answers(text: str = "", ending: str = ""):
    """A runner whose commands all end so."""
    return lambda _command, _timeout_s: Output(text, ending)


def members_of(*children, title):
    """Children as members, once each has the title that it gives itself."""
    processes = [psutil.Process(child.pid) for child in children]
    while not all(" ".join(one.cmdline()).startswith(title) for one in processes):
        time.sleep(0.01)
    return evidence.members(processes)


def stop(process):
    """Stop a child, and wait until the kernel has."""
    process.suspend()
    os.waitpid(process.pid, os.WUNTRACED)


def members(path):
    """The files of a bundle by name, without its folder."""
    with tarfile.open(path) as tar:
        return {
            entry.name.partition("/")[2]: tar.extractfile(entry).read().decode() for entry in tar
        }


def test_the_last_lines_are_kept_for_each_rank_without_prompts_and_keys(tmp_path):
    """One log of all ranks comes apart by rank; what a client wrote or who it is stays out."""
    path = tmp_path / "worker.out"
    path.write_text(LOG)
    ranks = evidence.last_lines(path)
    assert set(ranks) == {"EngineCore", "Worker_TP1", "replica"}
    assert len(ranks["Worker_TP1"]) == 2
    text = "".join(line for lines in ranks.values() for line in lines)
    assert "debts" not in text
    assert "abcdefgh" not in text
    assert "\x1b" not in text


@pytest.mark.parametrize(
    "line",
    [
        "Received request x: prompt: 'debts', params: 1",
        "engine_prompt='debts'",
        "Received prompt 'debts of mine'",
        "multi_modal_prompt: debts",
        '{"messages": [{"role": "user", "content": "debts"}]}',
        "{'role': 'user', 'content': 'debts'}",
        "ValidationError: 1 for X [type=int, input_value='debts', input_type=str]",
        'Failed on body {"input": "debts"}',
        "Generated text: debts",
        "Generated response x (streaming delta): output: 'debts', output_token_ids: None",
    ],
)
def test_what_a_client_sent_is_left_out(line):
    """Prompts as vLLM, pydantic and request bodies print them."""
    assert "debts" not in evidence.without_prompt(line)


def test_the_engines_own_figures_stay():
    """A word such as prompt in a line of statistics hides nothing of it."""
    line = "Engine 000: Avg prompt throughput: 0.0 tokens/s, Running: 1 reqs, Waiting: 0 reqs"
    assert evidence.without_prompt(line) == line


def test_the_rest_of_a_line_that_was_cut_is_left_out(tmp_path, monkeypatch):
    """Where the end of a log begins within a prompt, the word before it is gone."""
    monkeypatch.setattr(evidence, "MOST_LOG", 40)
    path = tmp_path / "worker.out"
    path.write_text("prompt: 'tell me of my many old debts'\n" + "a line\n")
    assert evidence.last_lines(path) == {"replica": ["a line\n"]}
    path.write_text("prompt: 'tell me of " + "my many old debts" * 9)
    assert "debts" not in "".join(evidence.last_lines(path)["replica"])


def test_a_metric_that_fails_costs_the_metrics_alone(tmp_path):
    """The other parts are written all the same."""

    def broken():
        raise RuntimeError("dictionary changed size during iteration")

    path, _ = evidence.bundle(tmp_path, {}, [], logs=[], metrics=broken)
    assert "not read: RuntimeError" in members(path)["metrics.txt"]


def test_what_others_put_into_the_folder_stays_and_no_link_is_followed(tmp_path):
    """Only bundles are dropped; a link in a draft's place ends the writing, not its target."""
    (tmp_path / "mine.tar.gz").touch()
    target = tmp_path / "target"
    (tmp_path / ".20300101T000000Z-a.part").symlink_to(target)
    with pytest.raises(FileExistsError):
        evidence.write_bundle(tmp_path, "20300101T000000Z-a", {}, {}, now_s=0)
    assert not target.exists()
    for number in range(evidence.MOST_BUNDLES + 3):
        evidence.write_bundle(tmp_path, f"203001{number + 10}T000000Z-a", {}, {}, now_s=0)
    assert (tmp_path / "mine.tar.gz").exists()


def test_a_line_of_one_long_word_costs_no_more_than_its_length(tmp_path):
    """The replica's own loop stands still while a line is looked at."""
    path = tmp_path / "worker.out"
    path.write_text("x" * 2**20 + "\n" + "prompt" * 2**18 + "\n")
    began = time.monotonic()
    evidence.last_lines(path)
    assert time.monotonic() - began < 2


def test_the_second_writer_of_one_name_leaves_the_first_alone(tmp_path):
    """Its error is its own: the draft that stands there is another's."""
    draft = tmp_path / ".20300101T000000Z-a.part"
    draft.touch()
    with pytest.raises(FileExistsError):
        evidence.write_bundle(tmp_path, "20300101T000000Z-a", {}, {}, now_s=0)
    assert draft.exists()


def test_an_entry_that_cannot_be_dropped_keeps_no_other(tmp_path):
    """A folder that is named as a bundle stays, the bundles beside it go."""
    (tmp_path / "20250101T000000Z-a.tar.gz").mkdir()
    for number in range(evidence.MOST_BUNDLES + 3):
        evidence.write_bundle(tmp_path, f"203001{number + 10}T000000Z-a", {}, {}, now_s=0)
    assert len(list(tmp_path.glob("2030*"))) <= evidence.MOST_BUNDLES


def test_a_log_of_a_gigabyte_costs_its_end_alone(tmp_path):
    """Only the end is read, and of it so many lines a rank."""
    path = tmp_path / "worker.out"
    with path.open("wb") as file:
        file.seek(2**30)
        for number in range(1000):
            file.write(f"\n(EngineCore pid=1) line {number}".encode())
    lines = evidence.last_lines(path)["EngineCore"]
    assert len(lines) == evidence.MOST_LINES
    assert lines[-1].endswith("line 999\n")


def test_requests_do_not_push_out_what_the_engine_said(tmp_path):
    """Serve writes a line for each request, and /metrics is asked all day."""
    access = "INFO 2026-11-30 21:17:13,205 bench_Engine dokx87n5 04bf3e89 -- POST /fdd539a5 200 183.6ms\n"
    path = tmp_path / "worker.out"
    path.write_text("the engine hangs\n" + access * 1000)
    assert evidence.last_lines(path) == {"replica": ["the engine hangs\n"]}


def test_a_log_that_is_gone_says_so(tmp_path):
    """A missing file is a line in the bundle, not an end of it."""
    assert "No such file" in evidence.last_lines(tmp_path / "none")["replica"][0]


def test_what_does_not_answer_is_named_in_its_place():
    """Without dmesg, nvidia-smi and py-spy there are still all the parts."""
    parts = evidence.collect(
        [Sight("VLLM::Worker_TP0", 7, "T")],
        logs=[],
        metrics=lambda: "vllm:x 1\n",
        run=answers(ending="no answer within 4 s"),
    )
    assert parts["kernel.txt"].startswith("not read: no answer within 4 s")
    assert parts["gpu.txt"].startswith("not read:")
    assert "no stack" in parts["stacks/7.txt"]
    assert "7\tT\tVLLM::Worker_TP0" in parts["processes.txt"]
    assert parts["metrics.txt"] == "vllm:x 1\n"


def test_a_bundle_is_one_small_file_for_this_user_alone(tmp_path):
    """Of a part too long the end is kept; nothing else is left beside the file."""
    parts = {"kernel.txt": "x" * 2 * evidence.MOST_PART + "end"}
    path = evidence.write_bundle(tmp_path / "new", "a", {"state": "hung"}, parts, now_s=1e9)
    assert [entry.name for entry in (tmp_path / "new").iterdir()] == [path.name]
    assert path.stat().st_mode & 0o777 == 0o600
    inside = members(path)
    assert json.loads(inside["verdict.json"]) == {"state": "hung"}
    assert len(inside["kernel.txt"]) == evidence.MOST_PART
    assert inside["kernel.txt"].endswith("end")


def test_a_bundle_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    """A full disk ends it with an error, and the half-written draft goes."""
    monkeypatch.setattr(tarfile.TarFile, "addfile", _full_disk)
    with pytest.raises(OSError, match="No space left"):
        evidence.write_bundle(tmp_path, "a", {}, {}, now_s=0)
    assert list(tmp_path.iterdir()) == []


def _full_disk(*_args, **_rest):
    raise OSError(28, "No space left on device")


def test_only_the_newest_bundles_stay(tmp_path):
    """A replica that fails every hour does not fill the disk."""
    for number in range(evidence.MOST_BUNDLES + 3):
        name = f"203001{number + 10}T000000Z-a"
        path = evidence.write_bundle(tmp_path, name, {}, {}, now_s=number)
        os.utime(path, (-number, -number))  # a clock that was set tells nothing
    names = sorted(entry.name for entry in tmp_path.iterdir())
    assert len(names) == evidence.MOST_BUNDLES
    assert names[0] == "20300113T000000Z-a.tar.gz"


def test_a_stopped_process_is_seen_as_stopped_and_one_that_is_gone_as_gone():
    """Real processes: the kernel's letter, and the title that one had while it ran."""
    stopped = subprocess.Popen(["sleep", "60"])
    gone = subprocess.Popen(["sleep", "61"])
    engine = members_of(stopped, gone, title="sleep 6")
    gone.kill()
    gone.wait()
    try:
        stop(engine[0].process)
        sights = evidence.read_sights(engine, run=answers(ending="exit code 1"))
        assert [(sight.name, sight.state) for sight in sights] == [
            ("sleep 60", "T"),
            ("sleep 61", ""),
        ]
    finally:
        stopped.kill()
        stopped.wait()


def test_the_bundle_names_the_silent_rank(tmp_path):
    """From real processes to the file: the stopped one stands in verdict.json."""
    with subprocess.Popen(["bash", "-c", "exec -a VLLM::Worker_TP1 sleep 60"]) as child:
        (member,) = members_of(child, title="VLLM::Worker_TP1")
        stop(member.process)
        try:
            path, silent = evidence.bundle(
                tmp_path,
                {"state": "hung", "revision": "abc"},
                [member],
                logs=[],
                metrics=str,
            )
        finally:
            child.kill()
    assert [rank.pid for rank in silent] == [child.pid]
    verdict = json.loads(members(path)["verdict.json"])
    assert "is stopped by a signal" in verdict["silent"][0]
    assert "-abc" in path.name
