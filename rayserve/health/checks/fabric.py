"""Do the GPUs of this host reach each other, all pairs, and as fast as they should?"""

from __future__ import annotations

from dataclasses import dataclass

from rayserve.health.checks.driver import without_gpu
from rayserve.health.checks.wanted import Wanted
from rayserve.health.readings.nvidia_smi import Matrix
from rayserve.health.results import Check, CheckResult

FLOOR, USUAL = 0.67, 0.75
"""Shares of NVLink's rate in one direction that an all-reduce must, and usually does, reach. On eight
A100-SXM, 300 GB/s: Azure's health check fails below 230 and expects 235 at 4 GiB, nccl-tests issue 175 has
232.5, issue 149 about 200 at 1 GiB. Other GPUs: taken over, not measured."""


@dataclass(frozen=True, slots=True)
class BandwidthFact:
    """An all-reduce among the GPUs of a host."""

    ranks: int
    size_bytes: int
    seconds: float = 0.0
    """Median of one all-reduce; 0: it did not end well."""
    ending: str = ""
    """Why there is no figure: no answer in time, an error."""
    unasked: str = ""
    """Why nothing was measured: the GPUs are at work."""

    @property
    def bus_gb_s(self) -> float:
        """Bus bandwidth, 10^9 bytes/s: size / time x 2 (n - 1) / n (nccl-tests, PERFORMANCE.md)."""
        if not self.seconds or self.ranks < 2:
            return 0.0
        return self.size_bytes / self.seconds * 2 * (self.ranks - 1) / self.ranks / 1e9


@dataclass(frozen=True, slots=True)
class FabricFacts:
    """What was read of the ways between GPUs."""

    on_bus: int
    """NVIDIA GPUs on the PCI bus."""
    topology: Matrix | None = None
    """`nvidia-smi topo -m`; None: no answer."""
    peers: Matrix | None = None
    """`nvidia-smi topo -p2p n`, peer access over NVLink; None: no answer."""
    fabric_states: tuple[str, ...] = ()
    """Of each GPU that reports one."""
    bandwidth: BandwidthFact | None = None
    """None: not measured."""
    busy: str = ""
    """Who uses the GPUs now, or why that is not known; empty: they are idle."""


def check_fabric(facts: FabricFacts, wanted: Wanted | None = None) -> list[CheckResult]:
    """All verdicts on the ways between GPUs."""
    return [
        check_state(facts),
        check_topology(facts, wanted),
        check_peers(facts, wanted),
        check_bandwidth(facts.bandwidth, wanted),
    ]


def _alone(facts: FabricFacts) -> str:
    return "no NVIDIA GPU on the PCI bus" if not facts.on_bus else "one GPU has no peer"


def check_state(facts: FabricFacts) -> CheckResult:
    """Has every GPU joined the fabric of the switches?"""
    check = Check("fabric-state", "every GPU has joined (Completed)", "fabric-manager")
    if facts.on_bus < 2:
        return check.skipped(_alone(facts))
    if not facts.fabric_states:
        return check.skipped("these GPUs do not report it (Hopper and newer do)")
    odd = {index: state for index, state in enumerate(facts.fabric_states) if state != "Completed"}
    if not odd:
        return check.passed("all completed")
    each = ", ".join(f"GPU {index}: {state}" for index, state in odd.items())
    return check.failed(
        each,
        why="CUDA ends with error 802, or that GPU is left out of NVLink",
        do="systemctl restart nvidia-fabricmanager; nvidia-smi -q | grep -A3 Fabric",
    )


def check_topology(facts: FabricFacts, wanted: Wanted | None) -> CheckResult:
    """Does NVLink join every pair, with equally many links?"""
    check = Check("topology", "equally many NVLinks between all pairs", "fabric-slow")
    if not facts.on_bus:
        return without_gpu(check, wanted)
    seen = min(facts.on_bus, len(facts.topology.cells) if facts.topology else facts.on_bus)
    if wanted is not None and seen < wanted.gpus:
        return check.failed(
            f"{seen} GPUs, of {wanted.gpus}",
            why="a GPU is lost, or this is another host than the plan's",
            do="rayserve check gpu says more",
        )
    if facts.on_bus < 2:
        return check.skipped(_alone(facts))
    if facts.topology is None:
        return check.skipped("`nvidia-smi topo -m` did not answer")
    ways = {(a, b): way for a, b, way in facts.topology.pairs()}
    kinds = sorted(set(ways.values()))
    linked = [way for way in kinds if way.startswith("NV")]
    if not linked:
        if wanted is not None and wanted.link_gb_s:
            return check.failed(
                f"no NVLink between any two GPUs: {', '.join(kinds)}",
                why="an all-reduce over PCIe takes about ten times as long",
                do="rayserve check host says whether Fabric Manager runs; nvidia-smi nvlink --status",
            )
        return check.passed(f"no NVLink: {', '.join(kinds)}")
    if len(kinds) == 1:
        few = _fewer_links(facts, wanted)
        if few:
            return check.failed(
                f"{kinds[0]} between all {len(ways)} pairs: {few}",
                why="an all-reduce is as much slower as links are missing",
                do="nvidia-smi nvlink --status shows which are inactive; dmesg | grep -iE 'xid|sxid'; then "
                "reset the GPUs, or reboot",
            )
        return check.passed(f"{kinds[0]} between all {len(ways)} pairs")
    most = max(kinds, key=lambda kind: sum(way == kind for way in ways.values()))
    odd = [f"GPU {a}-{b} {way}" for (a, b), way in ways.items() if way != most]
    verdict = check.failed if wanted is not None and wanted.link_gb_s else check.warned
    return verdict(
        f"{most}, but {', '.join(odd[:4])}" + (f" and {len(odd) - 4} more" if len(odd) > 4 else ""),
        why="the slowest pair sets the pace of every all-reduce; a GPU may have lost its links",
        do="nvidia-smi nvlink --status; dmesg | grep -iE 'xid|sxid'; then reset the GPUs, or reboot",
    )


def _fewer_links(facts: FabricFacts, wanted: Wanted | None) -> str:
    """What is missing of the plan's NVLinks, where all pairs are alike; empty: nothing.

    Behind switches a pair shows all links of a GPU; wired directly, its peers share them.
    """
    if wanted is None or not wanted.links or facts.topology is None:
        return ""
    way = next(iter(facts.topology.pairs()))[2]
    between = int(way[2:]) if way[2:].isdigit() else 0
    peers = len(facts.topology.cells) - 1
    links = between * peers if between * peers <= wanted.links else between
    return f"{links} links of each GPU, of {wanted.links}" if links < wanted.links else ""


def check_peers(facts: FabricFacts, wanted: Wanted | None) -> CheckResult:
    """Does every GPU read the memory of every other one?"""
    check = Check("peer-access", "between all pairs", "fabric-slow")
    if facts.on_bus < 2:
        return check.skipped(_alone(facts))
    if wanted is None or not wanted.link_gb_s:
        return check.skipped("no plan asks for NVLink between all GPUs")
    if facts.peers is None:
        return check.skipped("`nvidia-smi topo -p2p n` did not answer")
    odd = [f"GPU {a}-{b}: {state}" for a, b, state in facts.peers.pairs() if state != "OK"]
    if not odd:
        return check.passed("OK")
    return check.failed(
        ", ".join(odd[:4]) + (f" and {len(odd) - 4} more" if len(odd) > 4 else ""),
        why="NCCL falls back to host memory, or hangs when ranks meet",
        do="rayserve check host says what the driver and Fabric Manager lack; then reboot",
    )


def check_bandwidth(fact: BandwidthFact | None, wanted: Wanted | None) -> CheckResult:
    """Is an all-reduce among all GPUs as fast as NVLink allows?"""
    rate = wanted.link_gb_s if wanted is not None else 0.0
    expected = f"at least {FLOOR * rate:.0f} GB/s" if rate else "an all-reduce that ends in time"
    check = Check("all-reduce", expected, "fabric-slow")
    if fact is None:
        return check.skipped("measured only when asked (--measure), with the GPUs idle")
    if fact.unasked:
        return check.skipped(f"not measured, the GPUs must be idle: {fact.unasked}")
    if fact.ending:
        return check.failed(
            fact.ending,
            why="ranks cannot reach each other: an engine would hang where it first needs them",
            do="run it again with NCCL_DEBUG=INFO and read the first WARN line",
        )
    observed = (
        f"{fact.bus_gb_s:.1f} GB/s bus bandwidth, {fact.ranks} ranks, {fact.size_bytes >> 20} MiB"
    )
    if not rate or fact.bus_gb_s >= USUAL * rate:
        return check.passed(observed)
    why = "every token waits for two all-reduces a layer"
    do = "nvidia-smi topo -m, nvlink --status; 20 to 25 GB/s is what PCIe and host memory give"
    if fact.bus_gb_s >= FLOOR * rate:
        return check.warned(observed, why=why, do=do)
    return check.failed(observed, why=why, do=do)
