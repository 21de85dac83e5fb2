"""Does hf-mem itself answer what `planner_formulas.hf_mem` says that it answers?

    python -m benchmarks.planner_hf_mem CASES.json [CASES.json ...] --configs MODEL_CONFIGS.json

hf-mem reads config.json and the headers of a checkpoint from a hub. Here it is given the same inputs
as the formula, by a transport that answers its requests from memory; nothing leaves the machine.
hf-mem is not among this project's locks: install it beside them, or put it on PYTHONPATH. Exit code 1:
an answer differs; 2: hf-mem is not there.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import struct
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.planner_bars import UNUSABLE, read_json
from benchmarks.planner_cases import find_record
from benchmarks.planner_checkpoint import Checkpoint
from benchmarks.planner_formulas import GIB, Answer, Question, hf_mem
from benchmarks.planner_rivals import case_question, compare

NAME = "local/model"
FILES = [{"path": "model.safetensors", "type": "file"}, {"path": "config.json", "type": "file"}]


def header(checkpoint: Checkpoint) -> bytes:
    """The beginning of a safetensors file with one tensor of each storage type."""
    tensors = {
        storage: {"dtype": storage, "shape": [count], "data_offsets": [0, 0]}
        for storage, count in checkpoint.elements
    }
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


def respond(question: Question, path: str) -> bytes:
    """What a hub would answer.

    Raises:
        KeyError: hf-mem asked for something that it does not need.
    """
    if "/tree/" in path:
        return json.dumps(FILES).encode()
    name = path.rpartition("/")[2]
    config = {key: value for key, value in question.config.items() if value is not None}
    config.setdefault("torch_dtype", "bfloat16")
    contents = {
        "model.safetensors": header(question.checkpoint),
        "config.json": json.dumps(config).encode(),
    }
    return contents[name]


def ask(package: Any, question: Question) -> Answer:
    """The installed hf-mem's answer, read as the formula is: for one GPU."""
    web = package.httpx2
    client = web.AsyncClient

    def transport(request: Any) -> Any:
        return web.Response(200, content=respond(question, request.url.path))

    def offline(**_: object) -> Any:
        return client(transport=web.MockTransport(transport))

    options = {"max_model_len": question.max_model_len, "kv_cache_dtype": question.kv_cache_dtype}
    with mock.patch.object(web, "AsyncClient", offline), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = package.run(NAME)
        weights = plain.memory / question.ranks / GIB
        with contextlib.suppress(RuntimeError):  # what it does not take
            found = package.run(NAME, experimental=True, **options)
            return Answer(weights_gib=weights, request_gib=found.kv_cache / question.ranks / GIB)
    return Answer(weights_gib=weights)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare on every case; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", type=Path, nargs="+")
    parser.add_argument("--configs", type=Path, required=True)
    chosen = parser.parse_args(arguments)
    try:
        package = importlib.import_module("hf_mem.run")
    except ImportError as error:
        print(f"error: an installed hf-mem\n  found: {error}", file=sys.stderr)
        return UNUSABLE
    records = read_json(chosen.configs)
    asked = differing = 0
    for case in [case for path in chosen.cases for case in read_json(path)]:
        record = find_record(case, records)
        if record is None or compare(case, record).reason:
            continue
        question = case_question(case, record)
        theirs, formula = ask(package, question), hf_mem(question)
        asked += 1
        for name in ("weights_gib", "request_gib"):
            if getattr(theirs, name) != getattr(formula, name):
                differing += 1
                print(f"{case['id']}  {name}: {getattr(theirs, name)}, {getattr(formula, name)}")
    version = importlib.import_module("hf_mem._version").__version__
    print(f"hf-mem {version}: {asked} cases, {differing} answers differ from the formula")
    return 1 if differing or not asked else 0


if __name__ == "__main__":
    sys.exit(main())
