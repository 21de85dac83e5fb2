"""Does the doctor give all that can be read of damaged, odd and hostile inputs, and say what it did not read?"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import random
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rayserve.cli import main
from rayserve.doctor import collect
from rayserve.doctor.lines import shown

OOM = b"ERROR 10-01 12:15:00 [core.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried\n"
BLOCK = tarfile.BLOCKSIZE


def doctor(*words: str | Path, text: bytes = b"") -> Result:
    """What the command answers."""
    return CliRunner().invoke(main, ["doctor", *map(str, words)], input=text)


def read(path: Path) -> tuple[dict[str, bytes], list[str]]:
    """The logs that are read under a path, and why others were not."""
    logs: dict[str, bytes] = {}
    reading = collect.read_all(
        [str(path)],
        lambda name, lines: logs.update({name.rpartition("/")[2]: b"".join(lines)}),
        lambda _: None,
    )
    return logs, [gap.why for gap in reading.gaps]


def member(name: str, data: bytes, kind: bytes = tarfile.REGTYPE) -> bytes:
    """A member of a tar archive: header, data, padding."""
    info = tarfile.TarInfo(name)
    info.size, info.type = len(data), kind
    return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % BLOCK)


def noise() -> bytes:
    """A megabyte of lines that hardly compress."""
    source = random.Random(2)
    return b"".join(b"INFO loaded %064x\n" % source.getrandbits(256) for _ in range(13_000))


# ── what is cut or damaged ────────────────────────────────────────────────────────────────────────
def test_all_that_a_damaged_gzip_file_held_is_read(tmp_path):
    """Of a gzip file that is cut, or whose checksum is wrong, every byte is read, and the gap is told."""
    whole = noise() + OOM + noise()[:50_000]
    packed = gzip.compress(whole)
    (tmp_path / "a").write_bytes(packed[:-8])
    (tmp_path / "b").write_bytes(packed[:-8] + b"12345678")
    logs, gaps = read(tmp_path)
    assert logs == {"a": whole, "b": whole}
    assert ["cut" in gaps[0], "damaged" in gaps[1]] == [True, True]
    assert all(f"after {len(whole)} bytes" in gap for gap in gaps)


def test_a_gzip_file_is_read_up_to_the_damaged_byte(tmp_path):
    """Where the middle is damaged, what stands before it is read as far as the format allows."""
    whole = noise()
    head, tail = gzip.compress(whole), b"\x07" * 2000  # a block of a type that is not there
    stored = len(head) // 2
    (tmp_path / "a").write_bytes(head[:stored] + tail)
    logs, gaps = read(tmp_path)
    pairs = enumerate(zip(logs["a"], whole, strict=False))
    same = next((at for at, (got, had) in pairs if got != had), len(logs["a"]))
    assert same > 0.49 * len(whole)
    assert len(gaps) == 1


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_files_one_after_another_are_one_log(tmp_path, pack):
    """Members that follow each other, and zeros after them, are read without a gap; other bytes are told."""
    (tmp_path / "a").write_bytes(pack(b"one\n") + pack(b"two\n") + bytes(700))
    assert read(tmp_path / "a") == ({"a": b"one\ntwo\n"}, [])
    (tmp_path / "b").write_bytes(pack(b"one\n") + b"other")
    logs, [gap] = read(tmp_path / "b")
    assert logs == {"b": b"one\n"}
    assert gap.startswith("other bytes")


@pytest.mark.parametrize("pack", [bz2.compress, lzma.compress])
def test_a_cut_bzip2_or_xz_file_is_partial(tmp_path, pack):
    """What is cut in another compression is told too."""
    (tmp_path / "a").write_bytes(pack(noise())[:-30])
    assert "cut" in read(tmp_path / "a")[1][0]


def test_a_verdict_after_a_gap_says_that_it_is_partial(tmp_path):
    """Text and JSON name the input and the place; where all was read neither has the word."""
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"all is well\n" * 9)[:-8])
    (tmp_path / "b.log").write_bytes(b"all is well\n")
    text = doctor(tmp_path).stdout
    assert text.startswith("partial: ")
    assert "a.gz: it is cut: its gzip data do not end, after 108 bytes unpacked" in text
    report = json.loads(doctor(tmp_path, "--json").stdout)
    assert report["partial"] == [
        {
            "file": str(tmp_path / "a.gz"),
            "why": "it is cut: its gzip data do not end, after 108 bytes unpacked",
        }
    ]
    assert "partial" not in doctor(tmp_path / "b.log").stdout
    assert "partial" not in json.loads(doctor(tmp_path / "b.log", "--json").stdout)


def test_a_damaged_header_does_not_end_an_archive(tmp_path):
    """A header with a wrong checksum is told, and the members after it are read."""
    broken = bytearray(member("b", b"lost\n"))
    broken[150] ^= 1
    parts = member("a", b"one\n") + bytes(broken) + member("c", OOM) + bytes(2 * BLOCK)
    (tmp_path / "x.tar").write_bytes(parts)
    logs, gaps = read(tmp_path)
    assert logs == {"x.tar:a": b"one\n", "x.tar:c": OOM}
    assert gaps == [f"a header of the archive is damaged, at byte {2 * BLOCK}"]


def test_the_end_of_a_cut_archive_is_read(tmp_path):
    """The last bytes of a member that is cut are read; an archive without its end mark is partial."""
    (tmp_path / "a.tar").write_bytes(member("a", OOM + b"x" * 9000)[:4000])
    (tmp_path / "b.tar").write_bytes(member("b", OOM))
    logs, gaps = read(tmp_path)
    assert logs == {"a.tar:a": (OOM + b"x" * 9000)[: 4000 - BLOCK], "b.tar:b": OOM}
    assert [gap.split(":")[0] for gap in gaps] == ["it is cut", "it is cut"]


# ── what is odd ───────────────────────────────────────────────────────────────────────────────────
def wrapped(times: int) -> bytes:
    """A log that was compressed so often."""
    data = OOM
    for _ in range(times):
        data = gzip.compress(data)
    return data


ODD = {
    "wrapped nine times": wrapped(9),
    "length of a record": member("p", b"99999999999999999999 a=b\n", b"x") + member("q", b""),
    "sparse without a map": member("p", b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n", b"x")
    + member("q", b""),
    "map that is none": member("p", b"25 GNU.sparse.map=0,a,b,1\n", b"x") + member("q", b""),
    "size that is none": member("p", b"12 size=abc\n", b"x") + member("q", b""),
    "five thousand names": member("L", b"abc\0", b"L") * 5000 + member("q", b""),
    "long name": member("L", b"n" * 3_000_000, b"L") + member("q", b""),
}


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_input_does_not_end_the_run(tmp_path, odd):
    """Whatever an archive holds, the logs beside it are read."""
    (tmp_path / "a").write_bytes(ODD[odd])
    (tmp_path / "b.log").write_bytes(OOM)
    answer = doctor(tmp_path)
    assert (answer.exit_code, "oom-runtime" in answer.stdout) == (0, True)


def test_names_of_extended_headers_are_used(tmp_path):
    """Long names of both formats name the member, and a size in such a header counts."""
    for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        with tarfile.open(tmp_path / "a.tar", "w", format=kind) as archive:
            info = tarfile.TarInfo("long" * 60 + "ö")
            info.size = len(OOM)
            archive.addfile(info, io.BytesIO(OOM))
        assert read(tmp_path) == ({f"a.tar:{info.name}": OOM}, [])


def test_a_folder_that_cannot_be_read_is_told(tmp_path, monkeypatch):
    """A folder that is closed makes the verdict partial; links and pipes that are passed over are counted."""
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.log").write_text("all is well\n")
    (tmp_path / "b").symlink_to("a.log")
    (tmp_path / "c").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "d")
    scandir = os.scandir

    def refusing(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    answer = doctor(tmp_path)
    assert f"  {tmp_path}/closed: passed over: Permission denied\n" in answer.stdout
    assert f"{tmp_path}: 2 links passed over\n" in answer.stderr
    assert f"{tmp_path}: 1 special file passed over\n" in answer.stderr


def test_names_are_printed_without_control_characters(tmp_path):
    """Escapes, bells, line ends, direction marks and bytes that are no UTF-8 are written as escapes."""
    odd = "\x1b[31mred\nname\x07\u202e.log"
    (tmp_path / odd).write_bytes(OOM)
    (tmp_path / (odd + ".bin")).write_bytes(b"\0")
    (tmp_path / os.fsdecode(b"\xff.log")).write_bytes(OOM)
    (tmp_path / "x.tar").write_bytes(member(odd, OOM))
    for words in ((tmp_path,), (tmp_path, "--json"), (tmp_path / (odd + "absent"),)):
        answer = doctor(*words)
        output = answer.stdout_bytes.decode("utf-8") + answer.stderr_bytes.decode("utf-8")
        assert "red" in output
        assert not set(output) & {"\x1b", "\x07", "\u202e"}
        assert "red\nname" not in output
    assert "\\udcff.log" in doctor(tmp_path).stdout


# ── no input ──────────────────────────────────────────────────────────────────────────────────────
def test_no_input_is_no_clean_bill(tmp_path):
    """An empty pipe, an empty log, a compressed one, and an empty path end with exit code 2."""
    (tmp_path / "empty.log").write_bytes(b"")
    (tmp_path / "empty.gz").write_bytes(gzip.compress(b""))
    for answer in (doctor(), doctor("-"), doctor(tmp_path), doctor(tmp_path / "empty.log")):
        assert (answer.exit_code, answer.stdout) == (2, "")
    answer = doctor("")
    assert (answer.exit_code, "an empty path" in answer.stderr) == (2, True)


# ── what unpacks for ever ─────────────────────────────────────────────────────────────────────────
def test_unpacking_is_bounded_in_all(tmp_path, monkeypatch):
    """After so many bytes in all no more is unpacked, and the verdict is partial."""
    monkeypatch.setattr(collect, "MOST_UNPACKED_BYTES", 2_000_000)
    for name in "abc":
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(b"x\n" * 600_000))
    logs, gaps = read(tmp_path)
    assert sum(map(len, logs.values())) < 3_000_000
    assert len(gaps) == 2
    assert "more is packed" in gaps[0]


def test_a_long_reading_says_how_far_it_is(tmp_path, monkeypatch):
    """Now and then a line on standard error names the input and the bytes so far."""
    monkeypatch.setattr(collect, "PROGRESS_S", 0.0)
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"\n" * 3 * 2**20))
    answer = doctor(tmp_path / "a.gz")
    assert f"{tmp_path}/a.gz: reading; 2 MiB so far\n" in answer.stderr
    assert "reading" not in answer.stdout


# ── secrets ───────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "text",
    [
        "--api-key HIDEone HIDEtwo --port 8000",
        "['--api-key', 'HIDEone', 'HIDEtwo', '--port', '8000']",
        "--hf-token=HIDEone",
        "--token HIDEone",
        "api_key=HIDEone,port=8000",
        "'api_key': ['HIDEone', 'HIDEtwo'], 'port': 8000",
        '{"api-key" : "HIDEone HIDEtwo"}',
        '{\\"api_key\\": \\"HIDEone\\"}',
        "password='HIDEone HIDEtwo",
        "Authorization: Basic HIDEone=",
        "'Authorization': 'Digest HIDEone, HIDEtwo'",
        "Bearer HIDEone",
        "https://user:HIDEone@host/x",
        "AWS_SECRET_ACCESS_KEY=HIDEone",
        "passwd=HIDEone",
        "password=$HIDEone",
        "secret: HIDEone",
        "X-API-Key: HIDEone",
        "token HIDEone",
        "AuthenticationError: token is HIDEone.",
        "hf_HIDEone",
        "sk-HIDEone",
        "eyJhbGciOi.HIDEone.HIDEtwo",
        "HF_TOKEN=" + "x" * 1590 + "HIDEone",
    ],
)
def test_nothing_of_a_secret_is_shown(text):
    """A key or a password is masked whole, by its form or by the name before it."""
    line = shown(f"ERROR CUDA out of memory {text}")
    assert line.startswith("ERROR CUDA out of memory ")
    assert "(not shown)" in line
    assert not any(part in line for part in ("HIDE", "one", "two"))


@pytest.mark.parametrize(
    "line",
    [
        "Avg generation throughput: 0.0 tokens/s, max_num_batched_tokens=8192, tokenizer='/m'",
        "the token is invalid, and token 128000 is no token ID of this tokenizer",
        "engine at http://10.0.0.1:8000/v1, task-runner, eos_token_id: 2",
    ],
)
def test_lines_about_tokens_stay(line):
    """Where no secret is named, a line is shown as it is."""
    assert shown(line) == line
