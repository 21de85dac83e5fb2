"""Does a real engine print the KV tokens and the concurrency that the planner computes?

    python -m benchmarks.planner_engine [NAME ...] [--json OUT.json]

The demo's model and tiny models of every kind of KV cache (grouped heads, latent attention, sliding
windows beside full attention, experts, tied embeddings, recurrent states) are started one after the
other on the installed vLLM's CPU engine, each with a fixed size of its cache. vLLM's log line

    CPU KV cache size: 95,250 tokens, Maximum concurrency for 3,000 tokens per request: 31.75x

must be the planner's, digit for digit. The planner is told what vLLM's CPU platform decides by itself
(`cpu_settings`); everything else is the path that a plan for GPUs takes. About 15 s a start. Exit code
1: a figure differs or an engine did not start; 2: no vLLM is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.planner_bars import UNUSABLE, Bar, bar_lines, columns, write_part
from benchmarks.planner_engine_models import MODELS, TinyModel
from rayserve.demo.model import make_model
from rayserve.errors import Where
from rayserve.planner.kv.cache import CacheSettings, cache_capacity, cache_layout
from rayserve.planner.kv.caches import layer_caches
from rayserve.planner.weights.architecture import Architecture, read_architecture
from rayserve.planner.weights.modules import MLA

ROOT = Path(__file__).resolve().parents[1]
START_LIMIT_S = 180.0
CPU_BLOCK_TOKENS, CPU_KERNEL_TOKENS = 128, 32
"""CpuPlatform.check_and_update_config (vllm/platforms/cpu.py:293) and
CPUAttentionBackend.get_supported_kernel_block_sizes (v1/attention/backends/cpu_attn.py:66)."""
CPU_MLA_BLOCK_TOKENS = 16
"""The one block that the CPU's MLA kernel knows (cpu.py:280)."""
LEAST_STEP_TOKENS = 2048
"""SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS, the least step of MLA on a CPU (cpu.py:527)."""
PRINTED = re.compile(
    r"KV cache size: ([\d,]+) tokens, "
    r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x"
)
ERROR_LINE = re.compile(r"\b([A-Z]\w*(?:Error|Exception): .*)")


@dataclass(frozen=True)
class Figures:
    """What vLLM prints of its cache."""

    tokens: int
    concurrency: str
    """With two digits."""


@dataclass(frozen=True)
class Started:
    """One start beside the planner's figures."""

    name: str
    kind: str
    planned: Figures
    printed: Figures | None
    """None: the engine did not start."""
    seconds: float
    error: str = ""

    @property
    def equal(self) -> bool:
        """Whether both figures are the same."""
        return self.planned == self.printed


def cpu_settings(architecture: Architecture, model: TinyModel) -> CacheSettings:
    """The settings that vLLM's CPU platform gives the cache.

    No batch is prepared while another runs (cpu.py:331). With latent attention a prompt is one step
    and no prefix is kept (cpu.py:525).
    """
    latent = any(layer.attention.kind == MLA for layer in architecture.layers)
    step = model.max_num_batched_tokens
    return CacheSettings(
        max_model_len=model.max_model_len,
        max_num_batched_tokens=max(model.max_model_len, LEAST_STEP_TOKENS) if latent else step,
        block_size=CPU_MLA_BLOCK_TOKENS if latent else CPU_BLOCK_TOKENS,
        kernel_block_sizes=(CPU_MLA_BLOCK_TOKENS if latent else CPU_KERNEL_TOKENS,),
        concurrent_batches=1,
        prefix_caching=not latent,
    )


def planned(model: TinyModel) -> Figures:
    """What the planner says that vLLM will print.

    Raises:
        SpecError: the planner does not know the model.
    """
    architecture = read_architecture(model.config, Where(model.name))
    settings = cpu_settings(architecture, model)
    kv_cache_dtype = str(model.engine.get("kv_cache_dtype", "auto"))
    stages = layer_caches(architecture, tensor=1, pipeline=1, kv_cache_dtype=kv_cache_dtype)
    found = cache_capacity(cache_layout(stages, settings), [model.kv_bytes], settings)
    return Figures(found.printed_tokens, f"{found.max_concurrency:.2f}")


def start(model: TinyModel, folder: Path) -> Started:
    """Make the model in `folder`, start the engine with it, read its log, and see it end."""
    target, log = folder / model.name, folder / f"{model.name}.log"
    if model.made:
        make_model(target)
    else:
        target.mkdir()
        (target / "config.json").write_text(json.dumps(model.config))
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(target, model),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(START_LIMIT_S)
        except subprocess.TimeoutExpired:
            pass  # the log says how far it came
        finally:
            _end(process)
    text = log.read_text("utf-8", errors="replace")
    printed = read_log(text, model.max_model_len)
    error = "" if printed else _error(text, process.returncode)
    return Started(model.name, model.kind, planned(model), printed, time.monotonic() - began, error)


def command(folder: Path, model: TinyModel) -> list[str]:
    """What starts an engine with the model in `folder`."""
    program = [sys.executable, "-m", "benchmarks.planner_engine_start"]
    return [*program, str(folder), json.dumps(model.arguments)]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the engine's process group, which is its own."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_log(text: str, max_model_len: int) -> Figures | None:
    """The figures in an engine's log; None where it has none for this length."""
    for tokens, length, concurrency in PRINTED.findall(text):
        if int(length.replace(",", "")) == max_model_len:
            return Figures(int(tokens.replace(",", "")), concurrency)
    return None


def _error(text: str, code: int) -> str:
    """The last error that a log names."""
    found = ERROR_LINE.findall(text)
    return found[-1][:300] if found else f"no figures, exit code {code}"


def table(starts: Sequence[Started]) -> list[str]:
    """A line a start; the errors of those that did not come up stand below."""
    head = ("model", "KV cache", "tokens vLLM", "planner", "concurrency vLLM", "planner", "s", "")
    rows: list[Sequence[str]] = [head]
    for one in starts:
        printed = (f"{one.printed.tokens:,}", f"{one.printed.concurrency}x") if one.printed else ()
        tokens, concurrency = printed or ("-", "-")
        rows.append(
            (
                one.name,
                one.kind,
                tokens,
                f"{one.planned.tokens:,}",
                concurrency,
                f"{one.planned.concurrency}x",
                f"{one.seconds:.0f}",
                "equal" if one.equal else "DIFFERS" if one.printed else "DID NOT START",
            )
        )
    return [*columns(rows), *(f"{one.name}: {one.error}" for one in starts if one.error)]


def as_row(one: Started) -> Mapping[str, Any]:
    """Plain data."""
    return asdict(one) | {"equal": one.equal}


def bars(starts: Sequence[Started]) -> list[Bar]:
    """Every figure must be equal."""
    equal = sum(one.equal for one in starts)
    return [
        Bar(
            "KV tokens and concurrency of a real CPU engine",
            f"{equal} of {len(starts)} equal",
            "all equal",
            passed=bool(starts) and equal == len(starts),
            cases=len(starts),
        )
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Start them all, print, write; returns the exit code."""
    names = [model.name for model in MODELS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    unknown = [name for name in chosen.names if name not in names]
    if unknown:
        parser.error(f"no model {unknown[0]!r}; there are {', '.join(names)}")
    if importlib.util.find_spec("vllm") is None:
        print("error: an installed vLLM\n  do:    make setup", file=sys.stderr)
        return UNUSABLE
    # Being told to stop is a way out like any other: what was started is stopped on the way.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    wanted = [model for model in MODELS if not chosen.names or model.name in chosen.names]
    with tempfile.TemporaryDirectory(prefix="rs-planner-engine-") as folder:
        starts = [start(model, Path(folder)) for model in wanted]
    measured = bars(starts)
    print("\n".join([*table(starts), "", *bar_lines(measured)]))
    if chosen.json:
        write_part(chosen.json, map(as_row, starts), measured)
    return 0 if all(bar.passed for bar in measured) else 1


if __name__ == "__main__":
    sys.exit(main())
