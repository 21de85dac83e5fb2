"""Can Ray and the replicas of this host read their secrets, and nobody else?"""

from __future__ import annotations

from rayserve.health.checks.host_facts import HostFacts
from rayserve.health.checks.wanted import Wanted
from rayserve.health.results import Check, CheckResult


def check_keys(facts: HostFacts, wanted: Wanted | None) -> CheckResult:
    """Would a replica take the file of API keys?"""
    check = Check("api-keys", "a file of API keys that a replica takes", "secrets")
    if wanted is None:
        return check.skipped("no plan was given")
    keys = facts.keys
    if keys is None:
        return check.skipped("the plan has no key file")
    if keys.unasked:
        return check.skipped(keys.unasked)
    if not keys.needed:
        return check.passed(f"{keys.count} in {keys.path}, as {facts.user}")
    observed = f"{keys.path}, as {facts.user}: {keys.found}"
    why = f"a replica ends at its start: it needs {keys.needed}"
    if facts.starting:
        # Ray itself reads no keys, and a host that is set up gets them after Ray.
        return check.warned(observed, why=f"Ray starts, but {why}", do=keys.do)
    return check.failed(observed, why=why, do=keys.do)


def check_token(facts: HostFacts, wanted: Wanted | None) -> CheckResult:
    """Does Ray find its token, and nobody else?"""
    check = Check("ray-token", "Ray's token, readable by its user alone", "secrets")
    if wanted is None:
        return check.skipped("no plan was given")
    token = facts.token
    if token is None:
        return check.skipped("the plan's Ray asks for none")
    if token.unasked:
        return check.skipped(token.unasked)
    if token.error:
        return check.failed(
            f"{token.path}, as {facts.user}: {token.error}",
            why="with RAY_AUTH_MODE=token Ray does not start without one",
            do="copy it from another host with mode 0400, owned by Ray's user, or name it in RAY_AUTH_TOKEN_PATH",
        )
    if not token.path:
        return check.passed("in RAY_AUTH_TOKEN")
    if token.mode & 0o077:
        return check.warned(
            f"{token.path}: mode {token.mode:04o}",
            why="whoever reads it runs code on every host of the cluster",
            do=f"chmod 0400 {token.path}; if others could log in here, make a new one on all hosts",
        )
    return check.passed(f"in {token.path}, as {facts.user}")
