"""Which hostile inputs does the planner's command line meet? Each is built in a folder of its own.

The table of tests/cases/hostile_configs (damaged config.json, index and safetensors headers), and what
no table can hold: pipes, devices, loops of links, gigabytes, models that are none.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rayserve.units import GIB

TABLES = Path(__file__).resolve().parents[1] / "tests" / "cases" / "hostile_configs"
SPEC = """\
rayserve_cluster:
  name: hostile
  node_pools: [{name: gpu, hosts: 1, gpu: A100-80GB-SXM, gpus_per_host: 8}]
  model: {path: /nowhere, served_name: chat, config: model/config.json}
  limits: {max_model_len: 4096}
  endpoint: {host: 127.0.0.1, api_key_file: /etc/rayserve/api_keys}
"""
UNKNOWN = "ArceeForCausalLM"
"""Served by the pinned vLLM, and not laid out by the planner."""


@dataclass(frozen=True)
class Hostile:
    """One input, how it is made, and what the message must say."""

    name: str
    say: str
    build: Callable[[Path], None]
    """Makes the files, in a folder that has a sound cluster.yml and model/config.json."""
    codes: tuple[int, ...] = (2,)


def cases() -> list[Hostile]:
    """All of them."""
    return [*_tables(), *_files(), *_models(), *_heavy(), *_hosts(), *_others()]


def base_config() -> dict[str, Any]:
    """The config.json that the cases damage."""
    return dict(json.loads(_load("configs.yml")["base"]))


def prepare(folder: Path) -> None:
    """A sound spec and config.json."""
    (folder / "model").mkdir(parents=True)
    (folder / "cluster.yml").write_text(SPEC)
    _config(folder).write_text(_load("configs.yml")["base"])


def safetensors(rows: object, data: int = 0, length: int | None = None) -> bytes:
    """A file with this header; `length` overrides what its first 8 bytes say."""
    header = json.dumps(rows).encode()
    size = len(header) if length is None else length
    return size.to_bytes(8, "little") + header + bytes(data)


def _config(folder: Path) -> Path:
    return folder / "model" / "config.json"


@functools.cache
def _load(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((TABLES / name).read_text("utf-8")))


# ── the tables ────────────────────────────────────────────────────────────────────────────────────
def _tables() -> Iterator[Hostile]:
    table = _load("configs.yml")
    for row in table["cases"]:
        data = config_bytes(row, table["base"])
        yield Hostile(f"config: {row['name']}", row["expect"], _writes("config.json", data))
    tensors = _load("tensors.yml")
    good = safetensors({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, 1)
    for row in tensors["index"]:
        text = row.get("text") or json.dumps(row["json"])
        beside = {"model.safetensors.index.json": text.encode(), "1.safetensors": good}
        yield Hostile(f"index: {row['name']}", row["expect"], _unknown(beside))
    for row in tensors["header"]:
        made = bytes.fromhex(row["hex"]) if "hex" in row else _header(row)
        yield Hostile(
            f"header: {row['name']}", row["expect"], _unknown({"model.safetensors": made})
        )


def config_bytes(row: dict[str, Any], base: str) -> bytes:
    """The file of a row in configs.yml."""
    if "hex" in row:
        return bytes.fromhex(row["hex"])
    text = row.get("text", base)
    if "swap" in row:
        text = text.replace(*row["swap"])
    if "set" in row:
        data = {**json.loads(text), **row["set"]}
        text = json.dumps({key: value for key, value in data.items() if value is not None})
    return str(text).encode()


def _header(row: dict[str, Any]) -> bytes:
    return safetensors(row["rows"], row.get("data", 0), row.get("length"))


def _writes(name: str, data: bytes) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        (folder / "model" / name).write_bytes(data)

    return build


def _sets(**changes: Any) -> Callable[[Path], None]:
    data = {key: value for key, value in {**base_config(), **changes}.items() if value is not None}
    return _writes("config.json", json.dumps(data).encode())


def _unknown(files: dict[str, bytes]) -> Callable[[Path], None]:
    """A model whose size only its files tell."""

    def build(folder: Path) -> None:
        _sets(architectures=[UNKNOWN])(folder)
        for name, data in files.items():
            (folder / "model" / name).write_bytes(data)

    return build


# ── files that are none ───────────────────────────────────────────────────────────────────────────
def _files() -> Iterator[Hostile]:
    for name, say, make in (
        ("a folder", "config.json: a folder", lambda path: path.mkdir()),
        ("a pipe", "config.json: a pipe", os.mkfifo),
        ("/dev/zero", "config.json: a device", lambda path: path.symlink_to("/dev/zero")),
        ("a loop of links", "symbolic links", lambda path: path.symlink_to(path.name)),
        ("a link to nothing", "which is not there", lambda path: path.symlink_to("gone.json")),
        ("no file", "no file at", lambda path: path.unlink(missing_ok=True)),
        ("a file nobody may read", "a file that can be read", _unreadable),
        ("a gigabyte of nothing", "1024 MiB", lambda path: _sparse(path, GIB)),
        ("a terabyte of nothing", "1048576 MiB", lambda path: _sparse(path, 1024 * GIB)),
    ):
        yield Hostile(f"config.json is {name}", say, _replaces("model/config.json", make))
    yield Hostile("spec is a pipe", "an inventory", _replaces("cluster.yml", os.mkfifo))
    yield Hostile(
        "spec is a gigabyte", "at most", _replaces("cluster.yml", lambda path: _sparse(path, GIB))
    )
    yield Hostile("spec in UTF-16", "text in UTF-8", _spec_bytes(SPEC.encode("utf-16")))
    yield Hostile("spec with a lone NUL", "YAML", _spec_bytes(b"a: \0"))
    long = SPEC.replace("model/config.json", "x" * 5000)
    yield Hostile("config's name is too long", "name too long", _spec_bytes(long.encode()))
    yield Hostile(
        "plan on disk is a gigabyte",
        "what is to be replaced",
        lambda folder: _sparse(folder / "plan.yml", GIB),
        codes=(4,),
    )
    for name, file in (("a pipe", os.mkfifo), ("a folder", lambda path: path.mkdir())):

        def build(folder: Path, file: Callable[[Path], None] = file) -> None:
            _sets(architectures=[UNKNOWN])(folder)
            file(folder / "model" / "model.safetensors")

        yield Hostile(f"weights are {name}", f"found: {name}", build)


def _replaces(name: str, make: Callable[[Path], None]) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return build


def _spec_bytes(data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / "cluster.yml").write_bytes(data) and None  # type: ignore[func-returns-value]


def _unreadable(path: Path) -> None:
    if os.geteuid() == 0:  # root reads everything but what the kernel itself refuses
        path.symlink_to("/proc/self/mem")
    else:
        path.touch(mode=0)


def _sparse(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


# ── models that are none, or not served ───────────────────────────────────────────────────────────
def _models() -> Iterator[Hostile]:
    for name, say in (
        ("BertModel", "vectors"),
        ("Qwen3ForMadeUp", "serves as a model that writes text"),
        ("LlamaForCasualLM", "LlamaForCausalLM"),
        ("InternLMForCausalLM", "the last to serve"),
        ("BartForConditionalGeneration", "plugin"),
        ("EagleLlamaForCausalLM", "a draft model"),
        ("CohereAsrForConditionalGeneration", "transcribes"),
        ("JinaVLForRanking", "classifies"),
    ):
        yield Hostile(f"architecture {name}", say, _sets(architectures=[name]))
    yield Hostile("no architectures", "no `architectures`", _sets(architectures=None))
    yield Hostile("an empty list of architectures", "no `architectures`", _sets(architectures=[]))
    yield Hostile("a name of a megabyte", "writes text", _sets(architectures=["x" * 2**20]))
    unet = b'{"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.30.0"}'
    yield Hostile("an image model's network", "pipeline", _writes("config.json", unet))
    yield Hostile("unknown architecture, no files", "checkpoint_bytes", _unknown({}))
    wrong = SPEC.replace(
        "config: model/config.json", "config: model/config.json, checkpoint_bytes: 7"
    )
    row = {"a": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}}

    def differs(folder: Path) -> None:
        _unknown({"model.safetensors": safetensors(row, 8)})(folder)
        (folder / "cluster.yml").write_text(wrong)

    yield Hostile("sum that the files deny", "write checkpoint_bytes: 8", differs)


# ── what costs ────────────────────────────────────────────────────────────────────────────────────
def _heavy() -> Iterator[Hostile]:
    most = 4 * 2**20
    for name, data in (
        ("brackets", b"[" * most),
        ("braces", b'{"a":' * (most // 5)),
        ("digits", b'{"a": ' + b"9" * (most - 7) + b"}"),
        ("objects", b'{"a": [' + b"{}," * (most // 3 - 10) + b"{}]}"),
        ("floats", b'{"a": [' + b"1.5," * (most // 4 - 10) + b"1.5]}"),
    ):
        yield Hostile(f"four megabytes of {name}", "", _writes("config.json", data))
    keys = ",".join(f'"{n}":1' for n in range(330_000))
    yield Hostile("a third of a million keys", "", _writes("config.json", f"{{{keys}}}".encode()))
    for text in (
        "(a+)+$",
        "(.*)*x",
        ".*.*.*.*.*.*x",
        "(x|xx){9,}y",
        ".*[a-z].*[a-z].*[a-z].*!",
        "a" * 600,
    ):
        groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}}
        quant = {
            "quant_method": "compressed-tensors",
            "config_groups": groups,
            "ignore": [f"re:{text}"],
        }
        yield Hostile(f"expression {text[:16]}", "quick to match", _sets(quantization_config=quant))
    names = {"quant_method": "awq", "bits": 4, "group_size": 128}
    names["modules_to_not_convert"] = [f"m{n}" for n in range(200_000)]  # type: ignore[assignment]
    yield Hostile("200 000 names", "at most 7812 names", _sets(quantization_config=names))
    many = {
        f"t{n}": {"dtype": "U8", "shape": [1], "data_offsets": [n, n + 1]} for n in range(110_000)
    }
    many["t0"]["dtype"] = "??"
    yield Hostile(
        "110 000 tensors, one wrong",
        "a known dtype",
        _unknown({"model.safetensors": safetensors(many, 110_000)}),
    )


# ── hosts ─────────────────────────────────────────────────────────────────────────────────────────
def _hosts() -> Iterator[Hostile]:
    offload = "  kv_offload: {cpu_gib: 512}\n"
    for name, pool, add, say in (
        ("GPUs in slices", "mig: true", "", "nvidia-smi -mig 0"),
        ("a container's /dev/shm", "shm_gib: 0.0625", "", "--shm-size"),
        ("offload beyond memory", "memory_gib: 256", offload, "write cpu_gib: 248"),
        ("offload beyond /dev/shm", "shm_gib: 128", offload, "write cpu_gib: 127"),
        ("negative memory", "memory_gib: -1", "", "memory_gib"),
        ("memory as text", "memory_gib: 2TB", "", "memory_gib"),
    ):
        text = SPEC.replace("gpus_per_host: 8", f"gpus_per_host: 8, {pool}") + add
        yield Hostile(f"host: {name}", say, _spec_bytes(text.encode()))


def _others() -> Iterator[Hostile]:
    draft = (
        f"  speculative: {{method: draft_model, model: a/b, revision: {'ab' * 20}, "
        "config: draft.json, num_tokens: 2}\n"
    )

    def build(folder: Path) -> None:
        (folder / "cluster.yml").write_text(SPEC + draft)
        os.mkfifo(folder / "draft.json")

    yield Hostile("config of the draft model is a pipe", "draft.json: a pipe", build)
    text = SPEC + "  chat: {template_file: TEMPLATE}\n"

    def large(folder: Path) -> None:
        _sparse(folder / "chat.jinja", GIB)
        path = str(folder / "chat.jinja")
        (folder / "cluster.yml").write_text(text.replace("TEMPLATE", path))

    yield Hostile("chat template of a gigabyte", "1024 MiB", large)
