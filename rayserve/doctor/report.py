"""How is a verdict shown: to people, and to programs?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rayserve.doctor.verdicts import Cause, Evidence, Gap, Verdict

FORMAT: Final = 1
"""Of the JSON (docs/json.md)."""
MOST_CAUSES: Final = 3
"""Shown to people; programs get all."""
MOST_GAPS: Final = 5
"""Shown to people; programs get all that were kept."""
RUNBOOKS: Final = "docs/runbooks"


def as_dict(verdict: Verdict, gaps: Sequence[Gap] = ()) -> dict[str, Any]:
    """A verdict as `--json` prints it; `gaps`: what could not be read."""
    out: dict[str, Any] = {
        "format": FORMAT,
        "verdict": verdict.word,
        "causes": [_cause(cause) for cause in verdict.causes],
    }
    if verdict.first_error is not None:
        out["first_error"] = _evidence(verdict.first_error)
    if gaps:
        out["partial"] = [{"file": gap.file, "why": gap.why} for gap in gaps]
    return out


def render(verdict: Verdict, logs: int, gaps: Sequence[Gap] = ()) -> str:
    """A verdict for people; `logs`: how many were read, `gaps`: what could not be."""
    if not gaps:
        return _rendered(verdict, logs)
    unread = [f"  {gap.file}: {gap.why}" for gap in gaps[:MOST_GAPS]]
    more = len(gaps) - MOST_GAPS
    unread += [f"  and {more} more; --json has them"] if more > 0 else []
    head = "partial: not all was read, and the first cause may stand in what was not"
    return "\n".join([head, *unread, "", _rendered(verdict, logs)])


def _rendered(verdict: Verdict, logs: int) -> str:
    read = f"{logs} log" + ("s" if logs != 1 else "")
    if verdict.word == "nothing":
        lines = [f"nothing found: no failure that is known, and no exception, in {read}"]
    elif verdict.word == "unknown":
        lines = [
            f"cause unknown: {read} {'tells' if logs == 1 else 'tell'} that something failed, and not why"
        ]
    else:
        best = verdict.causes[0]
        lines = [f"{best.title} ({best.tag}, {best.confidence} confidence)", *_details(best)]
        if verdict.first_error is not None:
            lines += [
                "",
                f"first error that is not explained, and may be another matter: {_place(verdict.first_error)}",
            ]
        for cause in verdict.causes[1:MOST_CAUSES]:
            lines += ["", f"also: {cause.title} ({cause.tag}, {cause.confidence} confidence)"]
            lines += _details(cause)
        more = len(verdict.causes) - MOST_CAUSES
        if more > 0:
            lines += ["", f"and {more} more; --json has them"]
        return "\n".join(lines)
    if verdict.first_error is not None:
        lines += ["  first error:", f"    {_place(verdict.first_error)}"]
    for cause in verdict.causes:
        lines += [f"  {cause.title}", *_details(cause)]
    return "\n".join(lines)


def _details(cause: Cause) -> list[str]:
    seen = [f"  {_place(one)}" for one in cause.evidence]
    more = cause.count - len(cause.evidence)
    if more > 0:
        seen.append(f"  and {more} more lines" if more > 1 else "  and one more line")
    page = _page(cause)
    return [*seen, f"  do:  {cause.fix}", *([f"  see: {page}"] if page else [])]


def _place(evidence: Evidence) -> str:
    return f"{evidence.file}:{evidence.line}: {evidence.text}"


def _page(cause: Cause) -> str:
    return f"{RUNBOOKS}/{cause.runbook}.md" if cause.runbook else ""


def _cause(cause: Cause) -> dict[str, Any]:
    return {
        "tag": cause.tag,
        "title": cause.title,
        "confidence": cause.confidence,
        "evidence": [_evidence(one) for one in cause.evidence],
        "fix": cause.fix,
        "runbook": _page(cause),
    }


def _evidence(evidence: Evidence) -> dict[str, Any]:
    return {"file": evidence.file, "line": evidence.line, "text": evidence.text}
