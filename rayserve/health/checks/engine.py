"""Does the engine of this plan answer on this host?"""

from __future__ import annotations

from dataclasses import dataclass

from rayserve.health.results import Check, CheckResult


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the plan's endpoint answered; a status of 0: no connection, and `ending` says why."""

    url: str
    health: int = 0
    """HTTP status of /health: the engine's process lives."""
    ready: int = 0
    """HTTP status of /ready: warmed up, and not draining."""
    ending: str = ""
    sessions: str = ""
    """Folder in which Ray keeps its sessions; empty: not asked, since the engine lives."""


MEANING = {
    0: "nothing listens here",
    404: "this revision is not deployed here",
    503: "Serve has no replica of this revision",
}
"""What a status of /health other than 200 says; any other comes from the engine itself."""


def check_engine(facts: EngineFacts | None) -> list[CheckResult]:
    """Both verdicts; None: no plan was given."""
    return [check_alive(facts), check_ready(facts)]


def check_alive(facts: EngineFacts | None) -> CheckResult:
    """Does the engine's process live? It says nothing of a hang."""
    check = Check("engine-alive", "200 from /health", "engine")
    if facts is None:
        return check.skipped("no plan was given")
    if facts.health == 200:
        return check.passed(f"200 from {facts.url}/health")
    observed = f"{facts.health} from {facts.url}/health" if facts.health else facts.ending
    return check.failed(
        observed,
        why=MEANING.get(facts.health, "the engine has died"),
        do=f"serve status; the log of the replica is under {facts.sessions}/session_latest/logs/serve",
    )


def check_ready(facts: EngineFacts | None) -> CheckResult:
    """Does it take new requests?"""
    check = Check("engine-ready", "200 from /ready", "engine")
    if facts is None:
        return check.skipped("no plan was given")
    if facts.ready == 200:
        return check.passed(f"200 from {facts.url}/ready")
    if not facts.ready:
        return check.skipped(f"it does not answer: {facts.ending}")
    if facts.health != 200:
        return check.skipped("the engine does not live; engine-alive says more")
    return check.warned(
        f"{facts.ready} from {facts.url}/ready",
        why="it is warming up or draining",
        do="wait for timeouts.start_s or drain_s; then: serve status",
    )
