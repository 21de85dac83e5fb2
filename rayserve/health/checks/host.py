"""Is this host fit to serve: its driver, limits, disks and clock?"""

from __future__ import annotations

import re

from rayserve.health.checks.driver import NO_GPU, check_driver_set
from rayserve.health.checks.host_facts import Clock, Folder, HostFacts
from rayserve.health.checks.install import check_shm
from rayserve.health.checks.limits import check_memlock, check_nofile
from rayserve.health.checks.secrets import check_keys, check_token
from rayserve.health.checks.wanted import Wanted
from rayserve.health.results import Check, CheckResult
from rayserve.units import GIB

RAY_DISK_BYTES = 20 * GIB
RAY_DISK_SHARE = 0.05
"""Ray refuses to spill where its disk is over 95 % full."""
CLOCK_OFF_S = 0.5
"""Tokens, certificates and Ray's timeouts bear less than a minute; logs of several hosts are ordered by
time, and half a second is what a diagnosis bears."""


def check_host(facts: HostFacts, wanted: Wanted | None = None) -> list[CheckResult]:
    """All verdicts on a host, in the order in which they are best repaired."""
    return [
        *check_driver_set(facts, wanted),
        check_clock(facts.clock),
        check_shm(facts.shm_bytes),
        check_nofile(facts),
        check_memlock(facts),
        check_ports(facts, wanted),
        check_ray_disk(facts.ray_disk, facts.user),
        check_raid(facts.raid_degraded),
        check_mounts(facts, wanted),
        check_keys(facts, wanted),
        check_token(facts, wanted),
        check_swap(facts),
        check_iommu(facts),
    ]


def check_clock(clock: Clock | None) -> CheckResult:
    """Is the clock right, and will it not jump?"""
    check = Check("clock", f"synchronized, within {CLOCK_OFF_S:g} s", "host-limits")
    if clock is None:
        return check.skipped("neither timedatectl nor chronyc answers")
    if not clock.synchronized:
        return check.warned(
            "not synchronized",
            why="logs of several hosts cannot be ordered, tokens and certificates may be refused",
            do="systemctl enable --now chrony (or systemd-timesyncd)",
        )
    if clock.offset_s is not None and abs(clock.offset_s) > CLOCK_OFF_S:
        return check.warned(
            f"{clock.offset_s:+.3f} s off",
            why="the clock is about to be stepped, and timeouts that use it fire",
            do="chronyc tracking; chronyc makestep before serving starts",
        )
    return check.passed("synchronized")


OURS = re.compile(r"ray::|raylet|gcs_server|haproxy|python\S* \S*/ray/dashboard/dashboard\.py$")
"""Names of Ray's and Serve's processes. Of them the dashboard alone keeps the name of its interpreter."""


def check_ports(facts: HostFacts, wanted: Wanted | None) -> CheckResult:
    """Are the ports free that the plan needs, or held by Ray and Serve themselves?"""
    check = Check("ports", "the plan's ports free, or held by Ray and Serve", "ports")
    if wanted is None or not wanted.ports:
        return check.skipped("no plan was given")
    if facts.listeners is None:
        return check.skipped("the list of open ports could not be read")
    taken = [one for one in facts.listeners if one.port in wanted.ports]
    strange = [one for one in taken if one.owner and not OURS.match(one.owner)]
    unknown = [str(one.port) for one in taken if not one.owner]
    ports = ", ".join(map(str, wanted.ports))
    if strange:
        return check.failed(
            "taken: " + ", ".join(f"{one.port} by {one.owner}" for one in strange),
            why="Ray or Serve does not start, or a client reaches something else",
            do="stop that process, or write another port in cluster.yml",
        )
    if unknown:
        return check.skipped(f"{', '.join(unknown)} taken, and only root sees by whom")
    if taken:
        return check.passed(f"{ports}: {len(taken)} held by Ray or Serve, the others free")
    return check.passed(f"{ports} free")


def check_ray_disk(folder: Folder | None, user: str) -> CheckResult:
    """Has the disk of Ray's sessions room for logs and spilled objects?"""
    least = f"{RAY_DISK_BYTES // GIB} GiB and {RAY_DISK_SHARE:.0%} free"
    check = Check("ray-disk", f"{least} where Ray keeps its sessions", "disks")
    if folder is None:
        return check.skipped("Ray's folder was not looked at")
    if folder.missing:
        return check.skipped(f"{folder.path} is not there yet")
    if folder.unasked and not folder.silent:
        return check.skipped(f"{folder.path}: {folder.unasked}")
    if folder.error:
        return check.failed(
            f"{folder.path}: {folder.error}{_of(folder)}",
            why="Ray cannot start",
            do=MEND_MOUNT.replace("PATH", folder.path),
        )
    observed = (
        f"{folder.free_bytes / GIB:.1f} of {folder.size_bytes / GIB:.1f} GiB free on {folder.path}"
    )
    if folder.read_only:
        return check.failed(
            f"{folder.path} is read-only",
            why="Ray cannot start; a disk fault often makes a file system so",
            do=f"dmesg | grep -i error; then: mount -o remount,rw {folder.path}",
        )
    if not folder.writable:
        return check.failed(
            f"{folder.path} is not writable for {user}",
            why="Ray cannot start: it makes the folder of its session there",
            do=f"chown {user} {folder.path}, or name another folder (ray start --temp-dir)",
        )
    if folder.free_bytes < RAY_DISK_SHARE * folder.size_bytes:
        return check.failed(
            observed,
            why="Ray makes no object that it would have to spill: `is over 95% full`",
            do="make room, or put Ray's sessions on NVMe (ray start --temp-dir)",
        )
    if folder.free_bytes < RAY_DISK_BYTES:
        return check.warned(
            observed, why="logs of days of serving fill it", do="make room, or use a larger disk"
        )
    return check.passed(observed)


MEND_MOUNT = (
    "findmnt -T PATH says what is mounted there; is its server up? Then: umount -f -l, mount again"
)


def _of(folder: Folder) -> str:
    return f" ({folder.kind})" if folder.kind else ""


def check_raid(degraded: tuple[str, ...] | None) -> CheckResult:
    """Are the arrays whole that hold weights and caches?"""
    check = Check("raid", "no array that misses a disk", "disks")
    if degraded is None:
        return check.skipped("no software RAID on this host")
    if not degraded:
        return check.passed("whole")
    do = "cat /proc/mdstat; mdadm --detail /dev/mdX; replace the disk"
    lost = [one for one in degraded if not _has_spare(one)]
    if lost:
        return check.failed(
            ", ".join(lost),
            why="a striped array that misses a disk has lost its data",
            do=f"{do}, make the array anew and copy the weights",
        )
    return check.warned(
        ", ".join(degraded), why="the next disk that fails takes the data with it", do=do
    )


def _has_spare(degraded: str) -> bool:
    """A mirror or a parity array that still runs."""
    _, level, state = degraded.split(": ", 2)
    return level not in ("raid", "raid0", "linear") and state not in ("inactive", "broken")


def check_mounts(facts: HostFacts, wanted: Wanted | None) -> CheckResult:
    """Are the folders of the plan there, alive, and open to Ray's user as they must be?"""
    check = Check("mounts", "the folders of weights and caches mounted", "disks")
    if wanted is None:
        return check.skipped("no plan was given")
    missing = [f"not there: {one.path}" for one in facts.folders if one.missing]
    empty = [f"empty: {one.path}" for one in facts.folders if _is_bare(one, wanted)]
    if missing or empty:
        return check.failed(
            ", ".join([*missing, *empty]),
            why="the engine finds no weights; a disk that did not mount at boot leaves an empty folder",
            do="mount it (findmnt --verify; journalctl -b -u '*.mount'), or copy the weights",
        )
    broken = [one for one in facts.folders if one.error and (one.silent or not one.unasked)]
    if broken:
        return check.failed(
            "; ".join(f"{one.path}: {one.error}{_of(one)}" for one in broken),
            why="whatever reads there hangs or ends: the mount is dead, its disk too, or it is closed "
            f"to {facts.user}",
            do=MEND_MOUNT.replace("PATH", broken[0].path),
        )
    if found := _closed(facts, wanted):
        return check.failed(found[0], why=found[1], do=found[2])
    unknown = [one for one in facts.folders if one.unasked]
    if unknown:
        return check.skipped(f"{unknown[0].path}: {unknown[0].unasked}")
    return check.passed(", ".join(one.path for one in facts.folders) or "none needed")


def _is_bare(folder: Folder, wanted: Wanted) -> bool:
    return folder.empty and folder.path == wanted.model_path


def _closed(facts: HostFacts, wanted: Wanted) -> tuple[str, str, str] | None:
    """What is observed, why and what to do where a folder is not open to Ray's user."""
    asked = [one for one in facts.folders if not one.unasked]
    unreadable = [one.path for one in asked if not one.readable]
    if unreadable:
        return (
            f"not readable for {facts.user}: {', '.join(unreadable)}",
            "the engine runs as this user",
            f"namei -l {unreadable[0]}; chmod or chown what is closed on the way",
        )
    for one in asked:
        if one.path == wanted.offload_dir and (one.read_only or not one.writable):
            how = "read-only" if one.read_only else f"not writable for {facts.user}"
            mend = "mount -o remount,rw" if one.read_only else f"chown {facts.user}"
            return (f"{how}: {one.path}", "KV blocks cannot be written there", f"{mend} {one.path}")
    return None


def check_swap(facts: HostFacts) -> CheckResult:
    """Is memory being swapped, which stops an engine for seconds?"""
    check = Check("swap", "none in use", "host-limits")
    if facts.swap_bytes is None:
        return check.skipped("/proc/swaps could not be read")
    used = facts.swap_used_bytes or 0
    if used <= GIB:
        return check.passed(f"{used / GIB:.1f} of {facts.swap_bytes / GIB:.1f} GiB in use")
    return check.warned(
        f"{used / GIB:.1f} of {facts.swap_bytes / GIB:.1f} GiB in use",
        why="host memory is short: what is swapped out stops the engine for as long as it takes to read",
        do="find what holds it (ps -eo rss,comm --sort=-rss | head), lower kv_offload.cpu_gib",
    )


def check_iommu(facts: HostFacts) -> CheckResult:
    """Does the way between GPUs and NICs go through the root of the PCI tree?"""
    check = Check("acs", "no bridge that redirects transfers between devices", "fabric-slow")
    if not facts.gpus:
        return check.skipped(NO_GPU)
    if facts.redirecting is None:
        return check.skipped("lspci did not show it (it needs root)")
    if not facts.redirecting:
        return check.passed("none redirects")
    if facts.guest:
        return check.passed(f"{len(facts.redirecting)} redirect, as they must in a virtual machine")
    return check.warned(
        f"{len(facts.redirecting)} bridges redirect, such as {facts.redirecting[0]}"
        + (f"; {facts.iommu}" if facts.iommu else ""),
        why="transfers between GPU and NIC or NVMe are slow or hang; NVLink between GPUs is not touched",
        do="switch ACS off in the BIOS, on bare metal only (NCCL's troubleshooting guide, PCI ACS)",
    )
