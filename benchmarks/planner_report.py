"""What does the planner get right, all its benchmarks in one table?

    python -m benchmarks.planner_report [CASES.json ...] [--configs MODEL_CONFIGS.json] [--only PART ...]

Runs every part as its own command, one after the other, shows what each prints, and closes with one
table: question, cases, measured, wanted, passed or missed. Exit code 1 when a bar is missed or a part
fails; the others run all the same. Parts that compare with logged starts need the cases and the
configs; without them they are left out, and the table says so. Figures go to build/bench/.

    accuracy   weights, blocks, KV cache and verdicts against logged starts    (cases)
    rivals     the same starts asked of three other tools                      (cases)
    engine     tiny models on a real CPU engine: are tokens and concurrency equal?
    latency    published latencies: do they lie in the ranges?
    hostile    broken and malicious inputs: a clear error each?
    cost       seconds and memory of a whole plan
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.planner_bars import UNUSABLE, Bar, bar_lines

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "bench"
PARTS = ("accuracy", "rivals", "engine", "latency", "hostile", "cost")
NEED_CASES = frozenset({"accuracy", "rivals"})
PART_LIMIT_S, STOP_LIMIT_S = 900.0, 30.0
OF_CASES = 'do:    make bench-planner CASES="cases.json" CONFIGS=model_configs.json'


@dataclass(frozen=True)
class Outcome:
    """How one part ended."""

    part: str
    bars: tuple[Bar, ...]
    code: int | None
    """Its exit code; None: it was not run."""

    @property
    def passed(self) -> bool:
        """Whether it ran as it should and missed nothing; a part that needs cases may be left out."""
        return self.code is None or (not self.code and all(bar.passed for bar in self.bars))


def command(part: str, cases: Sequence[Path], configs: Path | None, out: Path) -> list[str]:
    """The command of a part."""
    words = [sys.executable, "-m", f"benchmarks.planner_{part}"]
    if part in NEED_CASES:
        words += [*map(str, cases), "--configs", str(configs)]
    return [*words, "--json", str(out)]


def run_part(part: str, cases: Sequence[Path], configs: Path | None, out: Path) -> Outcome:
    """Run one part, its output shown as it comes, and read what it left."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    process = subprocess.Popen(
        command(part, cases, configs, out),
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        code = process.wait(PART_LIMIT_S)
    except subprocess.TimeoutExpired:
        return Outcome(part, (_broken(part, f"not over after {PART_LIMIT_S:.0f} s"),), 124)
    finally:
        _end(process)
    try:
        found = read_bars(json.loads(out.read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"left no readable {out.name} (exit code {code}): {type(error).__name__}"
        return Outcome(part, (_broken(part, why),), code or UNUSABLE)
    if code and all(bar.passed for bar in found):
        found = (*found, _broken(part, f"exit code {code}"))
    if not found:
        found = (_broken(part, "no bar"),)
    return Outcome(part, tuple(found), code)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a part to stop, which stops what it started itself; then do not ask."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _broken(part: str, why: str) -> Bar:
    return Bar(f"{part}: runs to its end", why, "exit code 0", passed=False)


def read_bars(report: Mapping[str, Any]) -> tuple[Bar, ...]:
    """The bars of a part's file; those of `planner_accuracy` are numbers with a limit.

    Raises:
        KeyError, TypeError, AttributeError: it is not such a file.
    """
    rows = len(report.get("rows") or ())
    summary = report.get("summary")
    listed = report.get("bars") or (summary.get("bars") if isinstance(summary, Mapping) else None)
    return tuple(_bar(item, rows) for item in listed or ())


def _bar(item: Mapping[str, Any], rows: int) -> Bar:
    if "measured" in item:
        cases = int(item.get("cases", rows))
        measured, wanted = str(item["measured"]), str(item["wanted"])
    else:
        cases = int(item["count"])
        wanted = f"{'≥' if item.get('at_least') else '≤'} {item['limit']:g}"
        measured = f"{item['value']:.3f}" if cases else "not measured: no case"
    return Bar(str(item["name"]), measured, wanted, bool(item["passed"]), cases)


def closing(outcomes: Sequence[Outcome], left_out: Sequence[str]) -> list[str]:
    """The closing table and its last line."""
    lines = bar_lines([bar for outcome in outcomes for bar in outcome.bars])
    lines += [f"left out: {part} (no cases given)" for part in left_out]
    bars = [bar for outcome in outcomes for bar in outcome.bars]
    missed = sum(not bar.passed for bar in bars)
    return [*lines, f"{len(bars) - missed} passed, {missed} missed"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", type=Path, nargs="*")
    parser.add_argument("--configs", type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args(arguments)
    if bool(chosen.cases) != bool(chosen.configs):
        print(f"error: logged starts and model configs, or neither\n  {OF_CASES}", file=sys.stderr)
        return UNUSABLE
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    wanted = [part for part in PARTS if part in chosen.only]
    left_out = [part for part in wanted if part in NEED_CASES and not chosen.cases]
    outcomes = []
    for part in wanted:
        if part in left_out:
            continue
        print(f"── {part} ──", flush=True)
        if importlib.util.find_spec(f"benchmarks.planner_{part}") is None:
            bar = Bar(f"{part}: runs to its end", "there is no such command", "exit code 0", False)
            outcomes.append(Outcome(part, (bar,), UNUSABLE))
            continue
        cases = [path.absolute() for path in chosen.cases]
        configs = chosen.configs and chosen.configs.absolute()
        file = chosen.out.absolute() / f"planner-{part}.json"
        outcomes.append(run_part(part, cases, configs, file))
    print("── the planner ──")
    print("\n".join(closing(outcomes, left_out)))
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
