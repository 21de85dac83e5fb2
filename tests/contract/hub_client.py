"""A client of a hub on loopback, a small model there, and a spec that names it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from rayserve.errors import RayserveError, Where
from rayserve.hub import Hub
from tests.bad_specs import ROOT
from tests.contract.hub_server import HubServer, safetensors

ID = "acme/tiny"
HERE = Where("cluster.yml", 9, "model.hf_id")
CONFIG = (ROOT / "inventories" / "demo" / "model" / "config.json").read_bytes()
ODD = json.dumps(json.loads(CONFIG) | {"quantization_config": {"quant_method": "torchao"}}).encode()
"""In a format that the planner does not know: only the headers say how large it is."""
TOKEN = "hf_neverShowThisToken"
SPEC = """\
rayserve_cluster:
  name: hub
  profile: local
  node_pools: [{name: gpu, hosts: 1, gpu: A100-80GB-SXM, gpus_per_host: 8}]
  model: {hf_id: acme/tiny, served_name: chat%s}
  parallelism: {tensor: 1}
  endpoint: {ingress: proxy}
"""


@dataclass
class Client:
    """A Hub with its own cache, and what it said."""

    cache: Path
    said: list[str]

    def open(self, server: HubServer | str) -> Hub:
        """A client of this server."""
        url = server if isinstance(server, str) else server.url
        return Hub(self.said.append, endpoint=url, cache=self.cache)


def cached_files(cache: Path) -> list[str]:
    """Names of the files in a cache, but for locks and marks."""
    if not cache.exists():
        return []
    return sorted(
        path.name
        for path in cache.rglob("*")
        if path.is_file() and ".locks" not in path.parts and path.name != "CACHEDIR.TAG"
    )


def refused(client: Client, server: HubServer | str, revision: str = "") -> RayserveError:
    """The error that an id gives; nothing of a file is left in the cache."""
    with pytest.raises(RayserveError) as caught:
        client.open(server).snapshot(ID, revision, HERE)
    left = [name for name in cached_files(client.cache) if name not in {"main", "config.json"}]
    assert left == []
    assert caught.value.do
    assert TOKEN not in caught.value.message()
    return caught.value


# ── weights ─────────────────────────────────────────────────────────────────────────────────────
def shards(count: int, *, rows: int = 1) -> dict[str, bytes]:
    """A checkpoint of `count` files with `rows` small tensors each, and its index."""
    files, places = {}, {}
    for number in range(count):
        name = f"model-{number:05}-of-{count:05}.safetensors"
        tensors = {f"layers.{number}.{row}": ("BF16", [4], 8) for row in range(rows)}
        files[name] = safetensors(**tensors, **{f"scale.{number}": ("F32", [1], 4)})
        places |= dict.fromkeys([*tensors, f"scale.{number}"], name)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    return files | {"model.safetensors.index.json": json.dumps(index).encode()}


# ── the command ─────────────────────────────────────────────────────────────────────────────────
def environment(hub: HubServer, home: Path, **more: str) -> dict[str, str]:
    """The environment of a plan that asks this hub."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return kept | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home)} | more


def plan(folder: Path, env: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    """Run `rayserve plan` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "rayserve.cli", "plan", str(folder), *args],
        capture_output=True, text=True, cwd=ROOT, env=env, check=False, timeout=120,
    )  # fmt: skip


def spec(folder: Path, more: str = "") -> Path:
    """A cluster.yml of the id, in a folder."""
    folder.mkdir(exist_ok=True)
    (folder / "cluster.yml").write_text(SPEC % more)
    return folder
