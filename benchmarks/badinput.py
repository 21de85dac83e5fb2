"""Is every bad request and every bad spec answered with the right error, and does the engine live on?

    python -m benchmarks.badinput          all of them; `make badinput`

Requests stand in tests/cases/bad_requests.yml and go to one running product; specs stand in
tests/cases/bad_specs.yml. Prints a table and the line `N passed, N failed`; exit code 1 when one
failed, when the engine answers otherwise than before, or when its process was replaced.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks import bad_bodies, bad_sockets, census
from benchmarks.wire import Reply, ask
from benchmarks.workbench import workbench
from rayserve.errors import RayserveError
from tests import bad_specs
from tests.bad_requests import BadRequest, load
from tests.served import Served

BRANCHES_MIN = 25
"""Distinct error messages that the cases must reach."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one case went."""

    name: str
    where: str
    """The path asked for, or the kind of spec error."""
    answer: str
    """Status and message, as a person would read them."""
    fault: str
    """Empty: as expected."""


def main() -> int:
    """Run all cases, print, return the exit code."""
    outcomes = [_spec(case) for case in bad_specs.load()]
    with workbench() as (plan, folder), Served(plan, folder) as served:
        before, pid = _proof(served), census.take(served).replica_pid
        outcomes += [run_case(served, case) for case in load()]
        census.wait_idle(served)
        outcomes.append(_alive(served, before, pid))
    print(_table(outcomes))
    failed = [one for one in outcomes if one.fault]
    branches = {one.answer for one in outcomes}
    print(f"\n{len(branches)} distinct answers (at least {BRANCHES_MIN})")
    print(f"{len(outcomes) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed or len(branches) < BRANCHES_MIN else 0


def run_case(served: Served, case: BadRequest) -> Outcome:
    """Send one bad request and compare the answer."""
    try:
        reply = _send(served, case)
    except (OSError, ValueError) as error:
        reply = Reply(0, f"{type(error).__name__}: {error}", {})
    return Outcome(case.name, case.path, reply.line(), _fault(case, reply))


def _send(served: Served, case: BadRequest) -> Reply:
    if case.socket:
        return bad_sockets.CONVERSATIONS[case.socket](served, case)
    body = bad_bodies.BODIES[case.make](served.plan, case) if case.make else case.body()
    base = served.url.rsplit("/", 1)[0] if case.outside else served.url
    return ask(base, case.method, case.path_for(served.key), body, case.headers_for(served.key))


def _fault(case: BadRequest, reply: Reply) -> str:
    """What is wrong with an answer; empty when nothing is."""
    if not case.statuses:
        return ""  # nobody waits for an answer; that the engine lives on is checked in the end
    if reply.status not in case.statuses:
        return f"status {reply.status} instead of {case.statuses}"
    if reply.status < 400 or case.shape in ("none", "any"):
        return ""
    message = reply.error(case.shape)
    if message is None:
        return f"no {case.shape} error body: {reply.text[:200]}"
    return "" if case.say.lower() in message.lower() else f"no {case.say!r} in {message[:200]!r}"


def _spec(case: bad_specs.BadSpec) -> Outcome:
    error = case.refusal
    return Outcome(
        name=f"spec: {case.name}",
        where="cluster.yml",
        answer="accepted" if error is None else f"{type(error).__name__}: {error.needed}",
        fault=_spec_fault(case, error),
    )


def _spec_fault(case: bad_specs.BadSpec, error: RayserveError | None) -> str:
    if error is None:
        return "it was accepted"
    if type(error).__name__ != case.error:
        return f"{type(error).__name__} instead of {case.error}"
    if case.expect not in error.message():
        return f"no {case.expect!r} in {error.message()!r}"
    line = error.where.line if error.where is not None else None
    return f"line {line} instead of {case.line}" if case.line not in (None, line) else ""


def _proof(served: Served) -> str:
    """A greedy answer, which stays the same as long as the engine is well."""
    body = {
        "model": served.model,
        "prompt": "the engine answers as before " * 4,
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
    }
    headers = {"Content-Type": "application/json", **served.headers}
    reply = ask(served.url, "POST", "/v1/completions", body, headers)
    if reply.status != 200:
        raise RuntimeError(f"a good request was answered {reply.line()}")
    return str(reply.json()["choices"][0]["text"])


def _alive(served: Served, before: str, pid: int) -> Outcome:
    time.sleep(1)
    text, now = _proof(served), census.take(served).replica_pid
    fault = "" if text == before else f"it now says {text!r} instead of {before!r}"
    if now != pid:
        fault = f"its replica was replaced: process {pid} is now {now}"
    return Outcome("the engine is alive and answers as before", "/v1/completions", "200", fault)


def _table(outcomes: Iterable[Outcome]) -> str:
    lines = []
    for one in outcomes:
        word = "FAIL" if one.fault else "pass"
        lines.append(f"{word}  {one.name[:52]:<52}  {one.where[:24]:<24}  {one.answer[:110]}")
        if one.fault:
            lines.append(f"      {one.fault}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
