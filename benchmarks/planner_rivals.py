"""How near to logged starts does this planner come, beside hf-mem, llm-d-planner and gpustack?

    python -m benchmarks.planner_rivals CASES.json [CASES.json ...] --configs MODEL_CONFIGS.json
        [--json OUT.json] [--verbose]

Every tool gets the same cases and the same inputs: the model's config, the sizes of its checkpoint, the
flags and the GPU; nothing from the log. What a tool does not take as an input (llm-d-planner: dtype,
the cache's type; hf-mem: ranks) it goes without. The formulas of the others are in `planner_formulas`,
each with its source; `planner_hf_mem` holds one of them against the tool itself.

1. Errors: of each tool on all cases that it answers, with their number, since a tool that leaves hard
   cases out has fewer of them; and on the same cases, those that every tool answers which gives the
   figure at all. A few failures of a method (latent attention, recurrent layers) make most of the
   others' means, so the medians stand beside them. The bars are about the same cases.
2. Verdicts: `fits` of a start that was refused for memory is wrong, so is `cannot fit` of one that ran.
   Refusals because another process held the GPU are left out: no tool is told.
3. llm-d-planner's own campaign (vLLM 0.19 on H100): the mean errors that it published over 53 starts,
   its formula on those of them that the case files hold, and this planner on the same. Start by start
   the formula gives the published errors within 0.1 point, but for granite-vision's weights (-0.5 %
   for +0.0 %) and the activation of a pipeline stage, of which the case file has another rank's.

Figures, all for one GPU: weights; KV cache of one request of max_model_len (logged: the cache divided
by the concurrency); KV cache left; concurrency; activation peak. Exit code 1: another tool comes
nearer than this planner, or it says a wrong `fits`; 2: the files cannot be read.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.planner_bars import UNUSABLE, bar_lines, read_json, write_part
from benchmarks.planner_cases import Record, case_inputs, find_record, out_of_scope
from benchmarks.planner_checkpoint import case_checkpoint
from benchmarks.planner_formulas import Answer, Question, gpustack, hf_mem, llm_d_planner
from benchmarks.planner_rows import FREE, MEMORY_REFUSAL, TOTALS, case_row, case_setup
from benchmarks.planner_scores import (
    TITLES,
    Compared,
    Logged,
    bars,
    campaign_table,
    error_table,
    verdict_table,
)
from rayserve.errors import RayserveError
from rayserve.planner.memory.estimate import Estimate, Setup, estimate
from rayserve.units import GIB

Case = Mapping[str, Any]
OURS = "rayserve"
LLMD = "llm-d-planner"
RIVALS: Mapping[str, Callable[[Question], Answer]] = {
    "hf-mem 0.5.6": hf_mem,
    LLMD: llm_d_planner,
    "gpustack 2.2.3": gpustack,
}
CAMPAIGN = "llm-d-incubation/llm-d-planner"
PUBLISHED = {"weights_gib": 0.89, "kv_gib": 6.62, "concurrency": 15.34, "activation_gib": 195.12}
"""Mean absolute errors in percent over 53 starts of vLLM 0.19 on H100: accuracy/accuracy_report.md of
github.com/llm-d-incubation/llm-d-planner at 875a4fd (pull request 205). Published, not measured here."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask every tool, print, write; returns the exit code."""
    chosen = _options(arguments)
    records = read_json(chosen.configs)
    cases = [case for path in chosen.cases for case in read_json(path)]
    try:
        compared = [compare(case, find_record(case, records)) for case in cases]
        checks = list(published_sizes(records))
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        print(
            f"error: cases and configs in the documented form\n  found: {error!r}", file=sys.stderr
        )
        return UNUSABLE
    asked = [case for case in compared if not case.reason]
    for line in _report(compared, asked, checks, verbose=chosen.verbose):
        print(line)
    measured = list(bars(asked))
    print("\n".join(["", *bar_lines(measured)]))
    if chosen.json:
        write_part(chosen.json, _rows(compared), measured)
    return 0 if all(bar.passed for bar in measured) else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", type=Path, nargs="+")
    parser.add_argument("--configs", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--verbose", action="store_true", help="what each tool leaves out, and why")
    return parser.parse_args(arguments)


def _report(
    compared: Sequence[Compared],
    asked: Sequence[Compared],
    checks: Sequence[tuple[str, float]],
    *,
    verbose: bool,
) -> Iterator[str]:
    yield f"{len(asked)} of {len(compared)} cases asked of every tool; left out:"
    reasons = Counter(case.reason.split(";")[0] for case in compared if case.reason)
    for reason, count in reasons.most_common():
        yield f"  {count:3d}  {reason}"
    if checks:
        name, worst = max(checks, key=lambda check: abs(check[1]))
        yield (
            f"checkpoint sizes against the published ones: {len(checks)} models, "
            f"worst {100 * worst:+.2f} % ({name})"
        )
    yield ""
    yield from error_table(asked)
    yield ""
    yield from verdict_table(asked)
    yield "hf-mem has no verdict: read as `fits` where its total is not above what the GPUs have"
    campaign = campaign_table(asked, PUBLISHED, LLMD)
    yield from (["", *campaign] if campaign else [])
    if verbose:
        yield from _silences(asked)


def _silences(asked: Iterable[Compared]) -> Iterator[str]:
    for case in asked:
        for tool, answer in case.answers.items():
            if answer.silent:
                yield f"{case.id[:48]:48}  {tool}: {answer.silent}"


def _rows(compared: Iterable[Compared]) -> Iterator[dict[str, Any]]:
    """One row a case and tool."""
    for case in compared:
        if case.reason:
            yield {"id": case.id, "left_out": case.reason}
            continue
        logged = {f"logged_{figure}": getattr(case.logged, figure) for figure in TITLES}
        for tool, answer in case.answers.items():
            errors = {f"{figure}_error_percent": case.error(tool, figure) for figure in TITLES}
            yield {"id": case.id, "tool": tool, **asdict(answer), **logged, **errors}


def published_sizes(records: Iterable[Record]) -> Iterator[tuple[str, float]]:
    """(model, relative error) of the checkpoints whose size was published."""
    for record in records:
        published, name = record.get("checkpoint_total_size_bytes"), str(record["model"])
        if not published:
            continue
        try:
            found = case_checkpoint(case_inputs({"id": name, "model": name}, record), name)
        except RayserveError:
            continue
        yield name, found.size_bytes / published - 1


def compare(case: Case, record: Record | None) -> Compared:
    """Ask every tool for one case."""
    logged, campaign = logged_figures(case), _of_campaign(case)
    nothing = dict.fromkeys((OURS, *RIVALS), Answer())
    reason = out_of_scope(case) or _unaskable(case, logged)
    if record is None:
        reason = "the model's config is not at hand"
    if record is None or reason:
        return Compared(str(case["id"]), logged, nothing, campaign, reason)
    answers = {OURS: our_answer(case, record)}
    try:
        question = case_question(case, record)
    except RayserveError as error:
        # Not the others' fault: their checkpoint cannot be put together without our layout.
        reason = f"no checkpoint size: {error.needed}; found {error.found}"
        return Compared(str(case["id"]), logged, nothing, campaign, reason)
    answers |= {name: tool(question) for name, tool in RIVALS.items()}
    return Compared(str(case["id"]), logged, answers, campaign)


def logged_figures(case: Case) -> Logged:
    """The figures of a start, for one GPU."""
    kv, concurrency = case.get("kv_cache_gib_per_gpu"), case.get("max_concurrency")
    kv = kv if kv and kv > 0 else None
    pipelined = int(case.get("pp") or 1) > 1
    return Logged(
        weights_gib=case.get("weights_gib_per_gpu"),
        # With pipeline stages the cache is one stage's, the concurrency the poorest one's.
        request_gib=kv / concurrency if kv and concurrency and not pipelined else None,
        kv_gib=kv,
        concurrency=concurrency,
        activation_gib=case.get("activation_gib"),
        started=case["outcome"] == "ok" and bool(case.get("max_model_len")),
        refused_for_memory=case["outcome"] == "error"
        and bool(MEMORY_REFUSAL.search(str(case.get("error") or ""))),
    )


def _of_campaign(case: Case) -> bool:
    """Whether it is one of the starts that llm-d-planner's published errors are about.

    Its report leaves out starts with flags that the tool does not take: another dtype, FP8 weights
    made while loading, an FP8 cache.
    """
    own = CAMPAIGN in str(case.get("url")) and case.get("vllm_version") == "0.19.0"
    plain = case.get("dtype") != "float32" and case.get("kv_cache_dtype") in {None, "auto"}
    return own and plain and case.get("quantization") != "fp8"


def _unaskable(case: Case, logged: Logged) -> str:
    if FREE.search(str(case.get("error") or "")):
        return "another process held the GPU"
    if case["outcome"] != "ok" and not logged.refused_for_memory:
        return "refused for something else than memory"
    return ""


def case_question(case: Case, record: Record) -> Question:
    """The inputs of a case, as every tool may read them.

    Raises:
        SpecError: the checkpoint's sizes cannot be put together.
    """
    inputs = case_inputs(case, record)
    gpu = str(case.get("gpu") or "").lower()
    total = float(case.get("gpu_total_gib") or _total_by_name(gpu))
    length = case.get("max_model_len") or inputs.config.get("max_position_embeddings") or 0
    return Question(
        config=inputs.config,
        checkpoint=case_checkpoint(inputs, str(case["id"])),
        ranks=inputs.place.tensor * inputs.place.pipeline,
        tensor=inputs.place.tensor,
        max_model_len=int(length),
        kv_cache_dtype=str(case.get("kv_cache_dtype") or "auto"),
        utilization=case.get("gpu_memory_utilization"),
        total_gib=total,
        catalogue_gib=int(case.get("gpu_mem_gb") or round(total)),
    )


def _total_by_name(gpu: str) -> float:
    return next((gib for pattern, gib in TOTALS if re.search(pattern, gpu)), 0.0)


def our_answer(case: Case, record: Record) -> Answer:
    """This planner's answer.

    With pipeline stages the log does not say whose figures it shows: the stage that comes nearest is
    taken, as in `planner_accuracy`.
    """
    weights = case_row(case, record).weights_gib
    known = case_setup(case, record)
    if isinstance(known, str):
        return Answer(weights_gib=weights, silent=known)
    architecture, setup = known
    try:
        found = estimate(architecture, setup)
    except RayserveError as error:
        return Answer(weights_gib=weights, silent=f"{error.needed}; found {error.found}")
    kv = [budget.kv.expected / GIB for budget in found.budgets]
    return Answer(
        weights_gib=weights,
        request_gib=max(found.expected.request_bytes, default=0) / GIB or None,
        kv_gib=nearest(kv, case.get("kv_cache_gib_per_gpu")),
        concurrency=found.expected.max_concurrency,
        activation_gib=nearest(_activation_gib(found, setup), case.get("activation_gib")),
        fits=found.verdict.starts,
        measure=found.verdict.starts is None,
    )


def nearest(values: Sequence[float], logged: float | None) -> float:
    """The value that comes nearest to the logged one; without one, the least."""
    return min(values, key=lambda value: abs(value - logged) if logged else value)


def _activation_gib(found: Estimate, setup: Setup) -> list[float]:
    """Each stage's peak as its version prints it: from 0.27 with the estimate for CUDA graphs."""
    facts, peaks = setup.facts, []
    for budget in found.budgets:
        size = budget.terms.activation.expected
        if facts.activation_includes_graphs and facts.counts_graphs:
            size += budget.terms.graphs.estimate.expected
        peaks.append(size / GIB)
    return peaks


if __name__ == "__main__":
    sys.exit(main())
