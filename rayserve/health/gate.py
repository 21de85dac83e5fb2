"""May this host serve? Reads the facts that were asked for and judges them, one room after the other.

What systemd runs before Ray starts, what a timer runs for the metrics, and what a person runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from rayserve.health.checks.engine import check_engine
from rayserve.health.checks.fabric import BandwidthFact, FabricFacts, check_fabric
from rayserve.health.checks.gpu import check_gpu
from rayserve.health.checks.host import check_host
from rayserve.health.checks.install import InstallFacts, check_install
from rayserve.health.checks.wanted import Wanted
from rayserve.health.facts.all_reduce import measure_all_reduce
from rayserve.health.facts.engine import read_engine_facts
from rayserve.health.facts.gpu import read_fabric_facts, read_gpu_facts
from rayserve.health.facts.host import read_host_facts
from rayserve.health.facts.install import read_install_facts
from rayserve.health.results import Check, CheckResult


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of this host."""

    wanted: Wanted | None = None
    """What a plan asks of this host; None: no plan was given."""
    before_start: bool = False
    """Nothing may hold GPU memory yet."""
    measure: bool = False
    """Measure an all-reduce, which needs idle GPUs."""


def _install(_request: Request) -> list[CheckResult]:
    return check_install(read_install_facts())


def _installed(_request: Request) -> list[CheckResult]:
    """Without the imports, which take ten seconds."""
    facts: InstallFacts = read_install_facts(imports=False)
    untried = Check("imports", "torch, transformers and vLLM import").skipped(
        "they take ten seconds: rayserve check install"
    )
    return [*check_install(facts), untried]


def _host(request: Request) -> list[CheckResult]:
    wanted = request.wanted
    return check_host(read_host_facts(wanted), wanted)


def _gpu(request: Request) -> list[CheckResult]:
    return check_gpu(read_gpu_facts(), request.wanted, before_start=request.before_start)


def _fabric(request: Request) -> list[CheckResult]:
    facts = read_fabric_facts()
    if request.measure:
        facts = measured(facts, lambda: measure_all_reduce(facts.on_bus))
    return check_fabric(facts, request.wanted)


def measured(facts: FabricFacts, measure: Callable[[], BandwidthFact]) -> FabricFacts:
    """The facts with an all-reduce where two GPUs or more are idle.

    On GPUs that serve it would slow every stream, and its figure would say nothing of the fabric.
    """
    if facts.on_bus < 2:
        return facts
    bandwidth = BandwidthFact(facts.on_bus, 0, unasked=facts.busy) if facts.busy else measure()
    return replace(facts, bandwidth=bandwidth)


def _engine(request: Request) -> list[CheckResult]:
    if request.before_start:  # nothing is meant to answer yet
        return []
    wanted = request.wanted
    return check_engine(read_engine_facts(wanted) if wanted is not None else None)


ROOMS: dict[str, tuple[Callable[[Request], list[CheckResult]], ...]] = {
    "install": (_install,),
    "host": (_host,),
    "gpu": (_gpu,),
    "fabric": (_fabric,),
    "engine": (_engine,),
    "all": (_installed, _host, _gpu, _fabric, _engine),
}


def run_checks(room: str, request: Request) -> list[CheckResult]:
    """The verdicts of one room, or of all. What all of them repeat is said once."""
    found: dict[str, CheckResult] = {}
    for ask in ROOMS[room]:
        for result in ask(request):
            found.setdefault(result.name, result)
    return list(found.values())
