"""May this host serve? Reads the facts that were asked for and judges them, one room after the other.

What systemd runs before Ray starts, what a timer runs for the metrics, and what a person runs.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rayserve.errors import HostError, UsageError
from rayserve.health.checks.engine import check_engine
from rayserve.health.checks.fabric import BandwidthFact, FabricFacts, check_fabric
from rayserve.health.checks.gpu import check_gpu
from rayserve.health.checks.host import check_host
from rayserve.health.checks.install import InstallFacts, check_install
from rayserve.health.checks.wanted import LINK_GB_S, Wanted
from rayserve.health.facts.all_reduce import measure_all_reduce
from rayserve.health.facts.engine import read_engine_facts
from rayserve.health.facts.gpu import read_fabric_facts, read_gpu_facts
from rayserve.health.facts.host import read_host_facts
from rayserve.health.facts.install import read_install_facts
from rayserve.health.results import Check, CheckResult, metrics
from rayserve.inventory import current, write_all
from rayserve.plan import Plan
from rayserve.planner.catalogue import gpus
from rayserve.units import MIB

RAY_PORTS = (6379, 8265)
"""Of Ray's GCS and dashboard, on the head."""
HAPROXY_PORTS = (8404, 9101)
"""Of the statistics and metrics of Serve's HAProxy, on every host with a replica."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of this host."""

    plan: Plan | None = None
    before_start: bool = False
    """Nothing may hold GPU memory yet."""
    measure: bool = False
    """Measure an all-reduce, which needs idle GPUs."""

    @property
    def wanted(self) -> Wanted | None:
        """What the plan asks of a host of its serving pool."""
        return wanted_of(self.plan) if self.plan is not None else None


def wanted_of(plan: Plan) -> Wanted:
    """The plan's serving pool as a host must be; without GPUs for the CPU engine."""
    pool = next((pool for pool in plan.node_pools if pool.gpu in gpus()), None)
    gpu = gpus()[pool.gpu] if pool is not None else None
    count = pool.gpus_per_host if pool is not None else 0
    linked = gpu is not None and count > 1 and gpu.linked(count)
    link_gb_s = gpu.link_gb_s if gpu is not None and linked else 0.0
    one_gb_s = LINK_GB_S.get(gpu.compute_capability, 0.0) if gpu is not None else 0.0
    replica = plan.replica
    return Wanted(
        gpus=count,
        model=gpu.name if gpu is not None else "",
        label=gpu.label if gpu is not None else "",
        memory_mib=gpu.memory_bytes // MIB if gpu is not None else 0,
        link_gb_s=link_gb_s / 2,
        links=round(link_gb_s / one_gb_s) if one_gb_s else 0,
        ports=_ports(plan),
        model_path=replica.model if replica.model_source == "path" else "",
        offload_dir=_offload_dir(replica.engine_arguments().get("kv_transfer_config")),
        key_file=plan.door.api_key_file,
        token=any(one.name == "RAY_AUTH_MODE" and one.value == "token" for one in plan.environment),
        without_gpus=next((one.name for one in plan.node_pools if not one.gpus_per_host), ""),
    )


def _ports(plan: Plan) -> tuple[int, ...]:
    """Ports that Ray, Serve and its HAProxy listen on."""
    haproxy = HAPROXY_PORTS if plan.endpoint.ingress == "haproxy" else ()
    return (*RAY_PORTS, plan.endpoint.port, *haproxy)


def _offload_dir(transfer: object) -> str:
    """Folder of the KV cache's disk tier in vLLM's `kv_transfer_config`; empty: none."""
    extra = transfer.get("kv_connector_extra_config") if isinstance(transfer, dict) else None
    tiers = extra.get("secondary_tiers") if isinstance(extra, dict) else None
    folders = [str(tier.get("root_dir", "")) for tier in tiers or () if isinstance(tier, dict)]
    return folders[0] if folders else ""


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
    return check_engine(read_engine_facts(request.plan) if request.plan is not None else None)


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


def write_textfile(path: Path, results: Sequence[CheckResult]) -> None:
    """The verdicts as metrics, for node_exporter's textfile collector: whole or not at all.

    Raises:
        UsageError: there is another file, which is not replaced.
        HostError: the folder does not take it.
    """
    text = metrics(results, host=socket.gethostname(), now_s=time.time())
    begin = text.partition("{")[0]
    if not path.parent.is_dir():
        raise HostError(
            "a folder for the metrics that is there",
            found=f"no folder for {path}",
            do="make it, and give it to the user of this command",
        )
    there = current(path)
    if there and not there.startswith(begin):
        raise UsageError(
            "a file for the metrics: a new one, or one with metrics of these checks",
            found=f"{path} holds something else",
            do="name another file: --textfile /var/lib/node_exporter/rayserve.prom",
        )
    write_all({path: text})
    with contextlib.suppress(OSError):
        path.chmod(0o644)  # node_exporter is another user
