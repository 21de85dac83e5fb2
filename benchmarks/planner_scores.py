"""Which tool comes nearest, on the cases that it answers and on those that all of them answer?"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.planner_bars import Bar, columns
from benchmarks.planner_formulas import Answer

TITLES: Mapping[str, str] = {
    "weights_gib": "weights",
    "request_gib": "KV cache of one request",
    "kv_gib": "KV cache that is left",
    "concurrency": "concurrency",
    "activation_gib": "activation peak",
}
"""Figures of an `Answer` that logs print too."""
TIE = 0.01
"""Percent. Logs print two or three digits, so what is nearer by less is as near."""
NONE = "-"


@dataclass(frozen=True)
class Logged:
    """What one start printed, for one GPU: the figures of `Answer`; None where it did not."""

    weights_gib: float | None = None
    request_gib: float | None = None
    kv_gib: float | None = None
    concurrency: float | None = None
    activation_gib: float | None = None
    started: bool = False
    """With a max_model_len that is known; else nobody can be judged by it."""
    refused_for_memory: bool = False


@dataclass(frozen=True)
class Compared:
    """One case with everybody's answers; the first tool is this planner."""

    id: str
    logged: Logged
    answers: Mapping[str, Answer]
    campaign: bool = False
    """A start of llm-d-planner's own campaign."""
    reason: str = ""
    """Why nobody is asked."""

    def error(self, tool: str, figure: str) -> float | None:
        """Absolute error in percent; None where it was not logged or not answered."""
        found, logged = getattr(self.answers[tool], figure), getattr(self.logged, figure)
        return 100 * abs(found / logged - 1) if logged and found is not None else None


@dataclass(frozen=True)
class Score:
    """A tool's errors in one figure, in percent."""

    errors: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Of none, nan."""
        return statistics.fmean(self.errors) if self.errors else float("nan")

    def cells(self) -> tuple[str, str, str, str]:
        """Number, mean, median and worst as text."""
        if not self.errors:
            return "0", NONE, NONE, NONE
        median, worst = statistics.median(self.errors), max(self.errors)
        return str(len(self.errors)), f"{self.mean:.2f}", f"{median:.2f}", f"{worst:.2f}"


def score(cases: Sequence[Compared], tool: str, figure: str) -> Score:
    """A tool's errors over those cases that it answers."""
    errors = (case.error(tool, figure) for case in cases)
    return Score(tuple(error for error in errors if error is not None))


def tools(cases: Sequence[Compared], figure: str = "") -> list[str]:
    """All tools, or those that give a figure in at least one case."""
    names = list(cases[0].answers) if cases else []
    return [name for name in names if not figure or score(cases, name, figure).errors]


def shared(cases: Sequence[Compared], figure: str) -> list[Compared]:
    """The cases in which every tool that gives this figure gives it."""
    names = tools(cases, figure)
    return [case for case in cases if all(case.error(name, figure) is not None for name in names)]


def error_table(cases: Sequence[Compared]) -> list[str]:
    """Each figure and tool: on all cases that the tool answers, and on those that all answer."""
    head = ("cases", "mean", "median", "worst")
    rows = [("error in %", "tool", *head, "same cases", *head[1:])]
    for figure, title in TITLES.items():
        same = shared(cases, figure)
        for name in tools(cases):
            own = score(cases, name, figure)
            common = score(same, name, figure) if own.errors else Score(())
            rows.append((title, name, *own.cells(), *common.cells()))
    return columns(rows)


def wrong_fits(cases: Sequence[Compared], tool: str) -> tuple[int, int]:
    """(`fits` on a start that was refused for memory, such starts that the tool judges)."""
    judged = [case.answers[tool].fits for case in cases if case.logged.refused_for_memory]
    return sum(fits is True for fits in judged), sum(fits is not None for fits in judged)


def wrong_refusals(cases: Sequence[Compared], tool: str) -> tuple[int, int]:
    """(`cannot fit` on a start that ran, such starts that the tool judges)."""
    judged = [case.answers[tool].fits for case in cases if case.logged.started]
    return sum(fits is False for fits in judged), sum(fits is not None for fits in judged)


def verdict_table(cases: Sequence[Compared]) -> list[str]:
    """Wrong verdicts of each tool, and the cases that it leaves to a measurement or does not judge."""
    asked = [case for case in cases if case.logged.started or case.logged.refused_for_memory]
    rows = [("verdicts", "wrong `fits`", "wrong `cannot fit`", "says: measure", "none")]
    for name in tools(cases):
        fits, refusals = wrong_fits(asked, name), wrong_refusals(asked, name)
        answers = [case.answers[name] for case in asked]
        measure = sum(answer.measure for answer in answers)
        rows.append(
            (
                name,
                f"{fits[0]} of {fits[1]} refused",
                f"{refusals[0]} of {refusals[1]} started",
                str(measure),
                str(sum(answer.fits is None for answer in answers) - measure),
            )
        )
    return columns(rows)


def campaign_table(
    cases: Sequence[Compared], published: Mapping[str, float], other: str
) -> list[str]:
    """A tool's published mean errors, its formula on the same campaign, and this planner."""
    own = [case for case in cases if case.campaign]
    if not own:
        return []
    ours = tools(own)[0]
    rows = [("its own campaign, mean error in %", "cases", "published", "formula here", ours)]
    for figure, mean in published.items():
        theirs, mine = score(own, other, figure).cells(), score(own, ours, figure).cells()
        rows.append((TITLES[figure], theirs[0], f"{mean:.2f}", theirs[1], mine[1]))
    return columns(rows)


def bars(cases: Sequence[Compared]) -> Iterator[Bar]:
    """This planner must come nearest on the same cases, and never say a wrong `fits`."""
    for figure, title in TITLES.items():
        yield _nearest(cases, figure, f"{title}, mean error beside other tools")
    yield _never_wrong(cases)


def _nearest(cases: Sequence[Compared], figure: str, title: str) -> Bar:
    ours, same = next(iter(tools(cases)), ""), shared(cases, figure)
    means = {name: score(same, name, figure).mean for name in tools(cases, figure)}
    others = {name: mean for name, mean in means.items() if name != ours}
    if not same or ours not in means or not others:
        return Bar(title, "not measured: no case", "least of all", passed=False)
    best = min(others, key=lambda name: others[name])
    return Bar(
        title,
        f"{means[ours]:.2f} % ({best}: {others[best]:.2f} %)",
        "least of all",
        passed=means[ours] <= others[best] + TIE,
        cases=len(same),
    )


def _never_wrong(cases: Sequence[Compared]) -> Bar:
    title = "`fits` on a start refused for memory, beside other tools"
    names = tools(cases)
    judged = [
        case
        for case in cases
        if case.logged.refused_for_memory
        and (case.answers[names[0]].fits is not None or case.answers[names[0]].measure)
    ]
    if not judged:
        return Bar(title, "not measured: no case", "0", passed=False)
    wrong, *others = (wrong_fits(judged, name) for name in names)
    rest = ", ".join(f"{count} of {judges}" for count, judges in others)
    return Bar(title, f"{wrong[0]} (others: {rest})", "0", passed=not wrong[0], cases=len(judged))
