"""In which order would an operator take the checkpoints? Five questions, one after the other.

1. Can it be served? Memory, chip and cut decide; what cannot be served has no rank.
2. Is it sure to fit, and long enough? A verdict within the uncertainty, or a simple estimate, comes
   after a proof; a max_model_len below the expected request after one that holds it.
3. Does it meet the SLO? Met, may be missed (the range crosses it) or not known, missed.
4. Is max_model_len within the positions that the checkpoint's makers claim? If not, after the others.
5. What does it cost? The figure of the aim, times a surcharge for lost accuracy:

       cost = figure x (1 + accuracy_weight x lost accuracy)

   figure   latency: time of an answer of the expected length to one user, TTFT + tokens x TPOT;
            throughput: time of a token over all requests that run at once, TPOT / requests.
            Both in the middle of their range.
   lost     1 - published recovery of the format at the model's size (quality.py), at least 0. A format
            that nobody was found to have measured counts as the worst published one.

   With the default weight of 10, one percent of accuracy is worth ten percent of time.

KV heads and attention windows are not judged again: fewer KV bytes a token already are a shorter TPOT
and more requests at once. They decide ties, together with memory: more expected requests at once, then
fewer weight bytes, then fewer KV bytes a token, then the order of the file.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rayserve.planner.candidates.record import SloState

SLO_LEVELS: dict[SloState, int] = {
    "met": 0,
    "not set": 0,
    "may be missed": 1,
    "not known": 1,
    "missed": 2,
}
SLO_WORDS: dict[SloState, str] = {
    "met": "meets the SLO",
    "not set": "has no SLO to meet",
    "may be missed": "may miss the SLO",
    "not known": "is not known to meet the SLO",
    "missed": "misses the SLO",
}


@dataclass(frozen=True)
class Standing:
    """What decides the rank of a checkpoint that can be served."""

    name: str
    sure: bool
    """It is proven to fit."""
    short: bool
    """max_model_len is below the expected request, so its figures are those of a shorter one."""
    slo: SloState
    stretched: bool
    """max_model_len is beyond the positions that its makers claim."""
    figure: float
    """Of the aim, in ms: less is better; inf: not known."""
    figure_text: str
    throughput: bool
    """The figure is a rate in words, so that less of it is worse."""
    recovery_percent: float
    """Published, or the worst published where nothing is."""
    quality_known: bool
    accuracy_weight: float
    expected_concurrency: float
    weights_bytes: int
    kv_bytes_per_token: int
    order: int
    """Place in the file."""

    @property
    def surcharge(self) -> float:
        """What the lost accuracy adds to the figure, as a share."""
        return self.accuracy_weight * max(0.0, 100 - self.recovery_percent) / 100

    @property
    def cost(self) -> float:
        """The figure with its surcharge."""
        return self.figure * (1 + self.surcharge)

    @property
    def key(self) -> tuple[float, ...]:
        """Sorts the best first; no two are equal."""
        accuracy = -self.recovery_percent if math.isinf(self.figure) else 0.0
        return (
            not self.sure,
            self.short,
            SLO_LEVELS[self.slo],
            self.stretched,
            self.cost,
            accuracy * self.accuracy_weight,
            -self.expected_concurrency,
            self.weights_bytes,
            self.kv_bytes_per_token,
            self.order,
        )


def ranked(standings: Sequence[Standing]) -> list[tuple[Standing, str]]:
    """The best first, each with the reason for its place in one line."""
    ordered = sorted(standings, key=lambda one: one.key)
    if not ordered:
        return []
    first = _first(ordered[0], alone=len(ordered) == 1)
    later = [_after(own, before) for before, own in itertools.pairwise(ordered)]
    return list(zip(ordered, [first, *later], strict=True))


def _first(best: Standing, *, alone: bool) -> str:
    parts = ["the only one that can be served" if alone else "best"]
    if best.slo not in ("not set", "not known"):
        parts.append(SLO_WORDS[best.slo])
    if best.figure_text:
        parts.append(best.figure_text)
    if best.surcharge and best.figure_text:
        parts.append(f"{_accuracy(best)} count for {_percent(best.surcharge)} more")
    return "; ".join(parts)


def _after(own: Standing, before: Standing) -> str:
    """Why it stands behind the one before: the first of the questions that they answer differently."""
    name = before.name
    if own.sure != before.sure:
        return f"after {name}, which is proven to fit"
    if own.short != before.short:
        return f"too short for the expected request, which {name} holds"
    if SLO_LEVELS[own.slo] != SLO_LEVELS[before.slo]:
        return f"{SLO_WORDS[own.slo]}; {name} {SLO_WORDS[before.slo]}"
    if own.stretched != before.stretched:
        return f"max_model_len is beyond the positions that its makers claim, unlike {name}'s"
    if math.isinf(own.figure) and not math.isinf(before.figure):
        return f"its speed is not known; that of {name} is"
    if own.cost != before.cost:
        return _dearer(own, before)
    if own.figure == before.figure and own.recovery_percent != before.recovery_percent:
        return f"less accurate than {name}, with {_accuracy(own)}"
    return f"as good as {name}, {_tie(own, before)}"


def _dearer(own: Standing, before: Standing) -> str:
    ratio = own.figure / before.figure
    extra = own.surcharge - before.surcharge
    times = f"{1 / ratio:.2f}x as many as" if own.throughput else f"{ratio:.2f}x as long as with"
    text = f"{own.figure_text}, {times} {before.name}"
    if math.isclose(extra, 0, abs_tol=0.0005):
        return text
    if extra < 0:
        return f"{text}, and its better accuracy counts for {_percent(-extra)} only"
    return f"{text}, and {_accuracy(own)} count for {_percent(own.surcharge)} more"


def _accuracy(own: Standing) -> str:
    lost = max(0.0, 100 - own.recovery_percent)
    known = "" if own.quality_known else " (taken for it, since nothing is published)"
    return f"{lost:.2g} % of lost accuracy{known}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _tie(own: Standing, before: Standing) -> str:
    if own.expected_concurrency != before.expected_concurrency:
        return "but it holds fewer requests at once"
    if own.weights_bytes != before.weights_bytes:
        return "but its weights take more memory"
    if own.kv_bytes_per_token != before.kv_bytes_per_token:
        return "but it keeps more of each token"
    return "and later in the file"
