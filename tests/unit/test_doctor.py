"""Does the doctor name the first cause, and nothing where nothing failed?

tests/cases/doctor holds lines of public reports (each with its address), wordings of many versions, and lines
of real starts of the engine in which nothing failed.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import re
import tarfile
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from benchmarks.doctor import filler, judge
from rayserve.cli import main
from rayserve.doctor import collect, diagnosis, seen
from rayserve.doctor.diagnosis import Diagnosis
from rayserve.doctor.lines import read_line, shown
from rayserve.doctor.report import render
from tests.bad_specs import ROOT
from tests.unit.diagnosed import diagnose, tags

CASES = ROOT / "tests" / "cases" / "doctor"
REPORTS = json.loads((CASES / "reports.json").read_text(encoding="utf-8"))
WORDINGS = yaml.safe_load((CASES / "wordings.yml").read_text(encoding="utf-8"))
HEALTHY = (CASES / "healthy.txt").read_text(encoding="utf-8").splitlines()
AROUND = list(filler(60_000))


# ── wordings ──────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("case", REPORTS, ids=lambda case: case["id"])
def test_a_reported_line_names_its_cause(case):
    """Each line of a public report gives the report's cause, alone and among wrapper errors."""
    assert judge(case, []) is None
    assert judge(case, AROUND) is None


@pytest.mark.parametrize("tag, line", WORDINGS, ids=lambda value: value[:40])
def test_a_wording_of_some_version_names_its_cause(tag, line):
    """Each wording gives its cause first, also with a prefix of Ray, colours and journald's time before it."""
    assert tags(line)[:1] == [tag]
    dressed = "\n".join(
        f"\x1b[36m(ServeReplica:app:Engine pid=9, ip=10.0.0.1)\x1b[0m ERROR 10-01 12:00:00 [a.py:7] {one}"
        for one in line.split("\n")
    )
    assert tags(dressed)[:1] == [tag]
    assert tags("\n".join(f"Oct  1 12:00:00 h1 ray[12]: {one}" for one in line.split("\n")))[
        :1
    ] == [tag]


def test_healthy_lines_give_no_finding():
    """No excerpt of ten lines, and not the whole, of starts in which nothing failed names a cause."""
    found = {
        begin: tags("\n".join(HEALTHY[begin : begin + 10])) for begin in range(len(HEALTHY) - 9)
    }
    assert len(found) > 100
    assert {begin: some for begin, some in found.items() if some} == {}
    assert diagnose("\n".join(HEALTHY)).word == "nothing"


# ── which cause is first ──────────────────────────────────────────────────────────────────────────
OOM = "ERROR 10-01 12:{:02d}:00 [core.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried"
HELD = "ERROR 10-01 12:{:02d}:00 [core.py:1] ValueError: Free memory on device (1/79 GiB) on startup is less than desired GPU memory utilization"
XID = "2026-10-01T12:{:02d}:00+00:00 h1 kernel: NVRM: Xid (PCI:0000:4e:00): 79, GPU has fallen off the bus."
DEAD = "ERROR 10-01 12:30:00 [a.py:1] EngineDeadError: EngineCore encountered an issue."


def test_the_first_cause_in_time_wins_over_files():
    """What failed first is named first, whatever the order in which logs are read."""
    assert tags(HELD.format(20), OOM.format(10)) == ["oom-runtime", "zombie-gpu-mem"]
    assert tags(OOM.format(20), HELD.format(10)) == ["zombie-gpu-mem", "oom-runtime"]


@pytest.mark.parametrize("minute, first", [(5, "gpu-lost"), (25, "gpu-lost"), (40, "oom-runtime")])
def test_a_kernel_fault_outranks_software_within_ten_minutes(minute, first):
    """A lost GPU is the cause of what failed ten minutes before or after, and not of what failed later."""
    assert tags(OOM.format(15), XID.format(minute))[0] == first


def test_a_kernel_fault_without_a_clock_outranks_software():
    """Where the kernel log counts seconds since the boot, the fault is taken for the cause."""
    assert tags(OOM.format(15), "[  812.1] NVRM: Xid (PCI:0000:4e:00): 79, lost")[0] == "gpu-lost"


def test_a_traceback_has_the_time_of_the_line_before_it():
    """A line without a time stands where the last line with one stood."""
    late = "INFO 10-01 12:50:00 [a.py:1] step\nTraceback (most recent call last):\nRuntimeError: CUDA error: out of memory"
    assert tags(late, HELD.format(40)) == ["zombie-gpu-mem", "oom-runtime"]
    assert tags(late, HELD.format(55)) == ["oom-runtime", "zombie-gpu-mem"]


def test_an_effect_comes_after_its_cause():
    """A collective that never came back is named after what broke a rank, though it was logged before."""
    hang = "[E1001 11:59:00 ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)"
    assert tags(f"{hang}\n{OOM.format(15)}") == ["oom-runtime", "nccl-hang"]


def test_an_effect_does_not_hide_an_exception_that_nothing_explains():
    """That the engine died says less than what it died of; a cause needs no such line."""
    odd = "ERROR 10-01 12:14:00 [core.py:1] RuntimeError: could not create a primitive"
    died = (
        "ERROR 10-01 12:15:00 [a.py:1] the engine is dead with 8 sequences pending; no new request"
    )
    verdict = diagnose(f"{odd}\n{died}\n{DEAD}")
    assert [cause.tag for cause in verdict.causes] == ["engine-dead"]
    assert verdict.first_error.line == 1
    assert "could not create a primitive" in render(verdict, 1)
    assert diagnose(f"{odd}\n{OOM.format(15)}").first_error is None


def test_wrappers_never_count_when_something_better_is_there():
    """A wrapper is left out as soon as one line says more."""
    assert tags(f"{DEAD}\n{OOM.format(40)}\n{DEAD}") == ["oom-runtime"]


def test_unknown_shows_the_first_error():
    """Where only wrappers are known, the verdict is unknown, and the first other error is shown."""
    verdict = diagnose(
        f"Traceback (most recent call last):\n  File 'a.py'\nZeroDivisionError: division by zero\n{DEAD}\nKeyError: 'x'"
    )
    assert verdict.word == "unknown"
    assert [cause.tag for cause in verdict.causes] == ["root-cause-buried"]
    assert verdict.first_error is not None
    assert (verdict.first_error.line, verdict.first_error.text) == (
        3,
        "ZeroDivisionError: division by zero",
    )
    assert verdict.causes[0].evidence[0] == verdict.first_error


def test_an_exception_of_an_unknown_kind_is_unknown():
    """An exception that no signature explains is told, without a cause; a warning of one is not."""
    verdict = diagnose("acme.errors.FluxError: capacitor")
    assert (verdict.word, verdict.causes) == ("unknown", ())
    assert diagnose("WARNING 10-01 12:00:00 [a.py:1] ImportError: no triton").word == "nothing"


# ── what does not count ───────────────────────────────────────────────────────────────────────────
WAITS = "INFO 10-01 12:00:00 [ray_utils.py:1] Waiting for creating a placement group of specs for 20 seconds."
WORKS = 'INFO: 10.0.0.1:9 - "POST /v1/chat/completions HTTP/1.1" 200 OK'


def test_a_wait_that_ended_is_no_cause():
    """A placement that was waited for is no cause where the engine answered later; unless something failed."""
    assert tags(WAITS) == ["pg-pending"]
    assert tags(f"{WAITS}\n{WORKS}") == []
    assert tags(f"{WORKS}\n{WAITS}") == ["pg-pending"]
    assert tags(f"{WAITS}\n{WORKS}\n{DEAD}") == ["pg-pending"]


def test_a_moment_without_tokens_is_no_hang():
    """Requests that run without a token are a hang after three lines of statistics, and not where tokens follow."""
    line = "Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: {} tokens/s, Running: 2 reqs, Waiting: 0 reqs"
    assert tags("\n".join([line.format("0.0")] * 2)) == []
    assert tags("\n".join([line.format("0.0")] * 3)) == ["health-200-hang"]
    assert tags("\n".join([*[line.format("0.0")] * 3, line.format("12.5")])) == []


@pytest.mark.parametrize(
    "line",
    [
        "INFO 10-01 12:00:00 [logger.py:4] Received request cmpl-1: prompt: 'CUDA out of memory', params: x",
        "INFO 10-01 12:00:00 [core.py:1] Initializing a V1 LLM engine (v0.32.0) with config: trust_remote_code=True, address already in use",
        "Raylet is terminated. Possible reasons include: (1) SIGKILL by the OOM killer, (2) SIGSEGV, SIGBUS",
        "INFO 10-01 12:00:00 [core.py:9] Available KV cache memory: 16.20 GiB, Maximum concurrency for 4,096 tokens: 32x",
        "NVRM: Xid (PCI:0000:4e:00): 43, pid=9, name=python3, Ch 00000008",
        "torch.compile takes 42.31 s in total",
        "INFO prompt: why do I get CUDA out of memory?",
        "INFO 10-01 12:00:00 [x.py:4] prompt: RuntimeError: CUDA error: out of memory, why?",
        "user: my log says CUDA out of memory, help",
        "why do I get CUDA out of memory?",
        "my log says CUDA out of memory, help",
        '{"role": "user", "content": "RuntimeError: CUDA out of memory. Tried to allocate 2 GiB"}',
        "INFO 10-01 12:00:00 [x.py:4] Lowering max_num_seqs to avoid CUDA out of memory",
        "WARNING 10-01 12:00:00 [x.py:4] Set max_num_seqs lower to avoid CUDA out of memory",
        "INFO 10-01 12:00:00 [x.py:4] Free memory on device is less than desired GPU memory utilization",
    ],
)
def test_what_only_quotes_or_guesses_is_no_finding(line):
    """Prompts, settings, guesses of a program and usual lines give no finding."""
    assert tags(line) == []


@pytest.mark.parametrize(
    "line",
    [
        "ERROR 10-01 12:00:00 [core.py:1] CUDA out of memory",
        "INFO 10-01 12:00:00 [core.py:1] worker died: torch.OutOfMemoryError: CUDA out of memory.",
        "RuntimeError: CUDA error: out of memory",
        "CUDA out of memory. Tried to allocate 2.00 GiB. Try max_split_size_mb to avoid fragmentation",
        "cudaMalloc failed: out of memory; torch.cuda.OutOfMemoryError",
        "RuntimeError: prompt too long. CUDA out of memory. Tried to allocate 20.00 MiB",
    ],
)
def test_what_has_the_form_of_an_error_is_a_finding(line):
    """A level, an exception's class or PyTorch's own words make a line about memory a cause."""
    assert tags(line) == ["oom-runtime"]


def test_numbers_decide_in_lines_of_one_shape():
    """Two lines that differ in a number only are judged each by its own number."""
    line = "NVRM: Xid (PCI:0000:4e:00): {}, pid=12, name=x"
    assert tags("\n".join(line.format(code) for code in (43, 45, 79))) == ["gpu-lost"]


# ── lines ─────────────────────────────────────────────────────────────────────────────────────────
def test_a_message_that_was_wrapped_is_found():
    """A message that was cut over two lines, each with its prefix, is one."""
    log = "NVRM: Loading of module with\nNVRM: unavailable key is rejected"
    assert tags(log) == ["dkms-kernel"]
    log = "(a pid=1) ERROR 10-01 12:00:00 [a.py:1] Total number of attention heads (52)\n(a pid=1) ERROR 10-01 12:00:00 [a.py:1] must be divisible by tensor parallel size (8)."
    assert tags(log) == ["tp-divisibility"]


def test_colours_that_a_log_has_escaped_are_taken_out():
    """What syslog, a terminal or JSON makes of colours does not hide who wrote a line."""
    for escape in ("\x1b", "#033", "^[", "\\u001b"):
        line = read_line(f"{escape}[33m(raylet){escape}[0m Local disk is full".encode())
        assert (line.process, line.message) == ("raylet", "Local disk is full")


def test_a_line_that_is_a_json_object_is_read():
    """The message, level and time of a JSON line count; what is no JSON is a line."""
    record = {
        "levelname": "ERROR",
        "asctime": "2026-10-01 12:00:07",
        "message": "OSError: Too many open files",
    }
    assert tags(json.dumps(record)) == ["ulimit"]
    assert read_line(json.dumps(record).encode()).time_s == read_line(b"10-01 12:00:07 x").time_s
    assert tags("{broken Too many open files") == ["ulimit"]
    assert tags("[" * 50_000) == []


@pytest.mark.parametrize(
    "line",
    [
        "2026-10-01T12:00:07.5Z x",
        "2026-10-01 12:00:07,123 x",
        "(a pid=1) ERROR 10-01 12:00:07 [a] x",
        "Oct  1 12:00:07 h x",
        "[Thu Oct  1 12:00:07 2026] x",
    ],
)
def test_times_of_all_kinds_of_lines_agree(line):
    """The same moment is the same number in each format."""
    assert read_line(line.encode()).time_s == ((244 + 30) * 24 + 12) * 3600 + 7


def test_evidence_is_bounded_and_without_keys():
    """A line is shown in at most 400 characters, without control characters, tokens and keys."""
    text = shown(
        "\x07Bearer abcdefghijkl hf_AbCdEfGhIjKlMnOp api_key=verysecretvalue " + "x" * 9000
    )
    assert len(text) == 400
    assert not re.search(r"\x07|efghijkl|GhIjKl|secretvalue", text)


def test_memory_is_bounded(monkeypatch):
    """Shapes of lines are forgotten when there are too many; the verdict stays."""
    monkeypatch.setattr(diagnosis, "MOST_SHAPES", 10)
    reader = Diagnosis()
    words = ("".join(some) for some in itertools.product("ghijklmn", repeat=4))
    reader.read("a", (f"{word} Too many open files\n".encode() for word in words))
    assert len(reader._shapes) <= 10
    cause = reader.verdict().causes[0]
    assert (cause.count, len(cause.evidence)) == (8**4, seen.MOST_EVIDENCE)


# ── files ─────────────────────────────────────────────────────────────────────────────────────────
def read(*paths: Path) -> tuple[dict[str, list[bytes]], list[str]]:
    """The logs that are read, and what was said of others."""
    logs: dict[str, list[bytes]] = {}
    said: list[str] = []
    collect.read_all(
        [str(path) for path in paths],
        lambda name, lines: logs.update({name: list(lines)}),
        said.append,
    )
    return logs, said


def test_rotated_logs_come_oldest_first(tmp_path):
    """Numbers count backwards, dates forwards, and the log without either is the newest."""
    names = [
        "a.log",
        "a.log.1",
        "a.log.2.gz",
        "a.log.10",
        "b.log-20260101",
        "b.log-20260102",
        "b.log",
    ]
    for name in names:
        (tmp_path / name).write_text("x\n")
    logs, _ = read(tmp_path)
    order = [Path(name).name for name in logs]
    assert order == [
        "a.log.10",
        "a.log.2.gz",
        "a.log.1",
        "a.log",
        "b.log-20260101",
        "b.log-20260102",
        "b.log",
    ]


def test_archives_and_compressed_files_are_read_by_their_content(tmp_path):
    """A compressed archive with a compressed log in it is read, whatever its name."""
    packed = gzip.compress(b"one\ntwo\n")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        info = tarfile.TarInfo("logs/a.log.gz")
        info.size = len(packed)
        archive.addfile(info, io.BytesIO(packed))
    (tmp_path / "bundle").write_bytes(buffer.getvalue())
    logs, said = read(tmp_path / "bundle")
    assert list(logs.values()) == [[b"one\n", b"two\n"]]
    assert next(iter(logs)).endswith("bundle:logs/a.log.gz")
    assert said == []


def test_what_is_broken_or_no_text_is_said(tmp_path):
    """A cut archive is read as far as it goes, and a binary file passed over; both are told."""
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"a line\n" * 90_000)[:-40])
    (tmp_path / "program").write_bytes(b"\x7fELF\x00\x00")
    (tmp_path / "loop").symlink_to(tmp_path)
    logs, said = read(tmp_path)
    assert [Path(name).name for name in logs] == ["cut.gz"]
    told = {line.split(":")[0].rpartition("/")[2] for line in said}
    assert told == {"cut.gz", "program", tmp_path.name}


def test_a_line_without_end_is_cut(tmp_path):
    """Of a line of a megabyte its beginning is read, and the next line is line two."""
    (tmp_path / "a").write_bytes(b"x" * 1_000_000 + b"\nsecond\n")
    [lines] = read(tmp_path / "a")[0].values()
    assert [len(line) for line in lines] == [32 * 1024, 7]


# ── the command ───────────────────────────────────────────────────────────────────────────────────
def test_json_has_the_keys_that_programs_know(tmp_path):
    """The object has format, verdict and causes; a cause its six keys, and evidence its place."""
    (tmp_path / "a.log").write_text("fine\nOSError: [Errno 24] Too many open files\n")
    answer = CliRunner().invoke(main, ["doctor", str(tmp_path), "--json"])
    assert answer.exit_code == 0
    report = json.loads(answer.output)
    assert list(report) == ["format", "verdict", "causes"]
    assert (report["format"], report["verdict"]) == (1, "found")
    [cause] = report["causes"]
    assert list(cause) == ["tag", "title", "confidence", "evidence", "fix", "runbook"]
    assert cause["evidence"] == [
        {
            "file": str(tmp_path / "a.log"),
            "line": 2,
            "text": "OSError: [Errno 24] Too many open files",
        }
    ]
    assert cause["runbook"] == "docs/runbooks/host-limits.md"


def test_text_shows_cause_place_fix_and_page():
    """Standard input is read where no path is given; the answer has cause, line, fix and runbook."""
    answer = CliRunner().invoke(main, ["doctor"], input="fine\nOSError: Too many open files\n")
    assert answer.exit_code == 0
    assert "(ulimit, high confidence)" in answer.output
    assert "<stdin>:2: OSError: Too many open files" in answer.output
    assert "do:  set LimitNOFILE" in answer.output
    assert "see: docs/runbooks/host-limits.md" in answer.output


def test_a_log_without_failure_says_so():
    """Nothing found is an answer, with exit code 0."""
    answer = CliRunner().invoke(main, ["doctor"], input="all is well\n")
    assert (answer.exit_code, answer.output.split(":")[0]) == (0, "nothing found")


@pytest.mark.parametrize("name", ["absent", "empty", "a\x00b"])
def test_nothing_to_read_is_wrong_input(tmp_path, name):
    """A path that is not there, or a folder without logs, ends with exit code 2."""
    (tmp_path / "empty").mkdir()
    assert CliRunner().invoke(main, ["doctor", str(tmp_path / name)]).exit_code == 2


def test_one_log_tells_and_two_tell():
    """The answer without a cause is a sentence for one log as for several."""
    verdict = diagnose("Traceback (most recent call last):\nodd.OddError: it broke")
    assert "1 log tells that" in render(verdict, 1)
    assert "2 logs tell that" in render(verdict, 2)
