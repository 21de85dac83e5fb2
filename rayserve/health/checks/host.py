"""Is this host fit to serve, and will it be after the next reboot?

Kernel, driver and what holds them in place; limits, disks and clock. What only GPUs tell is in
`checks/gpu.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rayserve.health.checks.install import check_shm
from rayserve.health.checks.wanted import MIN_DRIVER, Wanted
from rayserve.health.results import Check, CheckResult

GIB = 2**30
NOFILE = 65536
"""A stream takes a few descriptors, HAProxy and Ray some each; the usual soft limit of 1024 breaks at a
few hundred streams (vllm issue 7920)."""
RAY_DISK_BYTES = 20 * GIB
RAY_DISK_SHARE = 0.05
"""Ray refuses to spill where its disk is over 95 % full."""
CLOCK_OFF_S = 0.5
"""Tokens, certificates and Ray's timeouts bear less than a minute; logs of several hosts are ordered by
time, and half a second is what a diagnosis bears."""


@dataclass(frozen=True, slots=True)
class InstalledKernel:
    """A kernel that is installed; `release` as `uname -r` prints it."""

    release: str
    headers: bool
    """What a module is built with is there."""
    driver: str
    """Version of the NVIDIA module on disk for it; empty: none."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A TCP port that is taken."""

    port: int
    owner: str
    """Name of the process; empty: not ours to see."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system."""

    point: str
    kind: str
    read_only: bool
    free_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Clock:
    """The system clock. `offset_s`: None where no daemon tells."""

    synchronized: bool
    offset_s: float | None = None


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What was read of a host; None: it could not be read, and `unread` has the reason by field."""

    kernel: str
    switches: int
    """NVSwitches on the PCI bus."""
    gpus: int
    """NVIDIA GPUs on the PCI bus, whether a driver knows them or not."""
    kernels: tuple[InstalledKernel, ...] = ()
    next_kernel: str = ""
    """Release that the next boot starts; empty: not known."""
    loaded_driver: str = ""
    """Version of the NVIDIA module in the running kernel; empty: none is loaded."""
    library: str = ""
    """Version of the NVIDIA user-space library; empty: none is installed."""
    manager: str = ""
    """Version of Fabric Manager; empty: not installed."""
    manager_state: str = ""
    """Of its systemd unit, such as `active`; empty: not known."""
    nouveau: bool = False
    secure_boot: bool | None = None
    signed: bool | None = None
    """The module on disk carries a signature."""
    packages: tuple[str, ...] = ()
    """Installed packages that make up kernel and driver."""
    held: tuple[str, ...] | None = None
    clock: Clock | None = None
    shm_bytes: int | None = None
    nofile: int | None = None
    """Soft limit; -1: none."""
    memlock_bytes: int | None = None
    """-1: no limit."""
    listeners: tuple[Listener, ...] | None = None
    ray_disk: Mount | None = None
    mounts: tuple[Mount, ...] = ()
    """Those that hold the plan's folders."""
    raid_degraded: tuple[str, ...] | None = None
    """Arrays with a missing disk."""
    swap_bytes: int | None = None
    swap_used_bytes: int | None = None
    iommu: str = ""
    """What the kernel's command line says of it."""
    redirecting: tuple[str, ...] | None = None
    """PCI bridges whose access control sends transfers between devices through the root."""
    guest: bool | None = None
    """A virtual machine."""
    reboot_required: bool = False
    container: bool = False


def check_host(facts: HostFacts, wanted: Wanted | None = None) -> list[CheckResult]:
    """All verdicts on a host, in the order in which they are best repaired."""
    return [
        *_driver(facts),
        check_next_boot(facts),
        check_holds(facts),
        check_clock(facts.clock),
        check_shm(facts.shm_bytes),
        check_nofile(facts.nofile),
        check_memlock(facts),
        check_ports(facts, wanted),
        check_ray_disk(facts.ray_disk),
        check_raid(facts.raid_degraded),
        check_mounts(facts, wanted),
        check_swap(facts),
        check_iommu(facts),
    ]


NO_GPU = "no NVIDIA GPU on the PCI bus"


def _driver(facts: HostFacts) -> Iterator[CheckResult]:
    for check in (check_nouveau, check_driver, check_fabric_manager):
        yield check(facts)


def check_nouveau(facts: HostFacts) -> CheckResult:
    """Is the kernel's own driver out of the way?"""
    check = Check("nouveau", "nouveau not loaded", "driver")
    if not facts.gpus:
        return check.skipped(NO_GPU)
    if not facts.nouveau:
        return check.passed("not loaded")
    return check.failed(
        "loaded",
        why="it holds the GPUs, so NVIDIA's module finds none",
        do="blacklist nouveau, rebuild the initramfs, reboot",
    )


def check_driver(facts: HostFacts) -> CheckResult:
    """Is the driver loaded, new enough, and of one version in kernel and user space?"""
    check = Check(
        "driver", f"branch {MIN_DRIVER} or newer, the same in kernel and libraries", "driver"
    )
    if not facts.gpus:
        return check.skipped(NO_GPU)
    loaded, library = facts.loaded_driver, facts.library
    if not loaded:
        return check.failed(
            f"not loaded into {facts.kernel}",
            why=_why_not_loaded(facts),
            do="install the driver's open modules and the headers of this kernel, then: modprobe nvidia",
        )
    if library and library != loaded:
        return check.failed(
            f"module {loaded}, libraries {library}",
            why="every call ends with `Driver/library version mismatch`: an upgrade replaced the "
            "libraries under a running module",
            do="drain this host and reboot it; then hold the packages",
        )
    if branch_of(loaded) < MIN_DRIVER:
        return check.failed(
            loaded,
            why=f"CUDA 13, with which torch and vLLM are built, needs branch {MIN_DRIVER}",
            do=f"install branch {MIN_DRIVER}, with Fabric Manager of exactly its version",
        )
    if not library:
        return check.warned(
            f"module {loaded}, no libnvidia-ml.so.1",
            why="without its libraries CUDA does not start",
            do=f"install the user-space packages of {loaded}",
        )
    return check.passed(f"{loaded}, module and libraries")


def branch_of(version: str) -> int:
    """`580.95.05` → 580; 0 where it is no version."""
    head = version.split(".", 1)[0]
    return int(head) if head.isdigit() else 0


def _why_not_loaded(facts: HostFacts) -> str:
    if facts.nouveau:
        return "nouveau holds the GPUs"
    running = next((one for one in facts.kernels if one.release == facts.kernel), None)
    if running is not None and not running.driver:
        headers = "" if running.headers else ", and its headers are not installed"
        return f"no module was built for {facts.kernel}{headers}"
    if facts.secure_boot and facts.signed is False:
        return "secure boot is on and the module is not signed"
    return "the module is there but not in use: see `dmesg | grep NVRM`"


def check_fabric_manager(facts: HostFacts) -> CheckResult:
    """Where there are NVSwitches: does Fabric Manager run, of exactly the driver's version?"""
    check = Check("fabric-manager", "active, and of the driver's version", "fabric-manager")
    if not facts.switches:
        return check.skipped("no NVSwitch on the PCI bus")
    if not facts.manager:
        return check.failed(
            f"not installed, beside {facts.switches} NVSwitches",
            why="CUDA ends with error 802 (system not yet initialized), though nvidia-smi lists all",
            do=f"install nvidia-fabricmanager {facts.loaded_driver or 'of the driver'}'s version",
        )
    if facts.loaded_driver and facts.manager != facts.loaded_driver:
        return check.failed(
            f"{facts.manager} beside driver {facts.loaded_driver}",
            why="it refuses any other version, to the last digit",
            do=f"install nvidia-fabricmanager {facts.loaded_driver}, and hold both",
        )
    if facts.manager_state != "active":
        return check.failed(
            f"{facts.manager}, {facts.manager_state or 'state not known'}",
            why="without it the switches carry nothing, and CUDA ends with error 802",
            do="systemctl enable --now nvidia-fabricmanager; then: journalctl -u nvidia-fabricmanager",
        )
    return check.passed(f"{facts.manager}, active")


def check_next_boot(facts: HostFacts) -> CheckResult:
    """Would the next reboot break this host?"""
    check = Check("next-boot", "every kernel that may boot has the driver's module", "driver")
    if not facts.gpus:
        return check.skipped(NO_GPU)
    if facts.container:
        return check.skipped("a container does not choose its kernel")
    if not facts.kernels:
        return check.skipped("no kernel under /lib/modules to look at")
    chosen = facts.next_kernel
    without = [one.release for one in facts.kernels if not one.driver]
    other = [
        f"{one.release}: {one.driver}"
        for one in facts.kernels
        if one.driver and facts.library and one.driver != facts.library
    ]
    build = "dkms autoinstall -k {0} (needs linux-headers-{0}), or remove that kernel"
    if chosen in without:
        return check.failed(
            f"{chosen} boots next and has no NVIDIA module",
            why="after the next reboot this host has no GPUs",
            do=build.format(chosen),
        )
    if without:
        return check.warned(
            f"no NVIDIA module for {', '.join(without)}",
            why="should it boot, this host has no GPUs",
            do=build.format(without[0]),
        )
    if other:
        return check.warned(
            f"modules of another version than the libraries' {facts.library}: {'; '.join(other)}",
            why="should it boot, every CUDA call ends with a version mismatch",
            do="build the module again: dkms autoinstall, or reinstall the driver's packages",
        )
    if facts.secure_boot and facts.signed is False:
        return check.failed(
            "secure boot is on and the module on disk is not signed",
            why="the kernel refuses it at the next boot",
            do="enrol the key that signs it (mokutil), or use the distribution's signed modules",
        )
    return check.passed(f"{chosen or facts.kernel} has {facts.kernels[-1].driver}")


def check_holds(facts: HostFacts) -> CheckResult:
    """Can an unattended upgrade replace kernel or driver?"""
    check = Check("holds", "kernel and driver packages on hold", "driver")
    if not facts.gpus:
        return check.skipped(NO_GPU)
    if facts.held is None or not facts.packages:
        return check.skipped("no package manager that was asked knows the driver")
    free = sorted(set(facts.packages) - set(facts.held))
    if not free:
        return check.passed(f"{len(facts.packages)} packages held")
    some = ", ".join(free[:4]) + (f" and {len(free) - 4} more" if len(free) > 4 else "")
    return check.warned(
        f"not held: {some}",
        why="an upgrade replaces the libraries under the running module, and every new process fails",
        do=f"apt-mark hold {' '.join(free[:8])}",
    )


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


def check_nofile(limit: int | None) -> CheckResult:
    """May a process hold as many open files as streams need?"""
    check = Check("nofile", f"at least {NOFILE} open files", "host-limits")
    if limit is None:
        return check.skipped("the limit could not be read")
    if limit < 0 or limit >= NOFILE:
        return check.passed("no limit" if limit < 0 else str(limit))
    return check.warned(
        str(limit),
        why="each stream takes descriptors; beyond the limit the engine ends with `Too many open files`",
        do=f"LimitNOFILE=1048576 in the units of Ray and Serve (a shell: ulimit -n {NOFILE})",
    )


def check_memlock(facts: HostFacts) -> CheckResult:
    """May NCCL and the KV offload pin host memory?"""
    check = Check("memlock", "no limit on locked memory", "host-limits")
    if not facts.gpus:
        return check.skipped(NO_GPU)
    limit = facts.memlock_bytes
    if limit is None:
        return check.skipped("the limit could not be read")
    if limit < 0:
        return check.passed("no limit")
    return check.warned(
        f"{limit // 1024} KiB",
        why="NCCL registers buffers for its network, and fails with `unhandled system error`",
        do="LimitMEMLOCK=infinity in the units of Ray and Serve",
    )


OURS = ("ray", "raylet", "gcs_server", "haproxy", "python", "serve", "dashboard")


def check_ports(facts: HostFacts, wanted: Wanted | None) -> CheckResult:
    """Are the ports free that the plan needs, or held by Ray and Serve themselves?"""
    check = Check("ports", "the plan's ports free, or held by Ray and Serve", "ports")
    if wanted is None or not wanted.ports:
        return check.skipped("no plan was given")
    if facts.listeners is None:
        return check.skipped("the list of open ports could not be read")
    taken = [one for one in facts.listeners if one.port in wanted.ports]
    strange = [one for one in taken if not one.owner.startswith(OURS)]
    if not strange:
        held = f"; {len(taken)} held by Ray or Serve" if taken else ""
        return check.passed(f"{', '.join(map(str, wanted.ports))} free{held}")
    who = ", ".join(f"{one.port} by {one.owner or 'a process of another user'}" for one in strange)
    return check.failed(
        f"taken: {who}",
        why="Ray or Serve does not start, or a client reaches something else",
        do="stop that process, or write another port in cluster.yml",
    )


def check_ray_disk(mount: Mount | None) -> CheckResult:
    """Has the disk of Ray's sessions room for logs and spilled objects?"""
    least = f"{RAY_DISK_BYTES // GIB} GiB and {RAY_DISK_SHARE:.0%} free"
    check = Check("ray-disk", f"{least} where Ray keeps its sessions", "disks")
    if mount is None:
        return check.skipped("Ray's folder could not be read")
    observed = (
        f"{mount.free_bytes / GIB:.1f} of {mount.size_bytes / GIB:.1f} GiB free on {mount.point}"
    )
    if mount.read_only:
        return check.failed(
            f"{mount.point} is read-only",
            why="Ray cannot start; a disk fault often makes a file system so",
            do=f"dmesg | grep -i error; then: mount -o remount,rw {mount.point}",
        )
    if mount.free_bytes < RAY_DISK_SHARE * mount.size_bytes:
        return check.failed(
            observed,
            why="Ray makes no object that it would have to spill: `is over 95% full`",
            do="make room, or put Ray's sessions on NVMe (ray start --temp-dir)",
        )
    if mount.free_bytes < RAY_DISK_BYTES:
        return check.warned(
            observed, why="logs of days of serving fill it", do="make room, or use a larger disk"
        )
    return check.passed(observed)


def check_raid(degraded: tuple[str, ...] | None) -> CheckResult:
    """Are the arrays whole that hold weights and caches?"""
    check = Check("raid", "no array that misses a disk", "disks")
    if degraded is None:
        return check.skipped("no software RAID on this host")
    if not degraded:
        return check.passed("whole")
    return check.failed(
        ", ".join(degraded),
        why="a striped array that misses a disk has lost its data; a mirror has lost its spare",
        do="cat /proc/mdstat; mdadm --detail /dev/mdX; copy the weights again after the repair",
    )


def check_mounts(facts: HostFacts, wanted: Wanted | None) -> CheckResult:
    """Are the folders of the plan there and writable where they must be?"""
    check = Check("mounts", "the folders of weights and caches mounted", "disks")
    if wanted is None:
        return check.skipped("no plan was given")
    paths = [path for path in (wanted.model_path, wanted.offload_dir) if path]
    there = {one.point for one in facts.mounts}
    missing = [path for path in paths if path not in there]
    if missing:
        return check.failed(
            f"not there: {', '.join(missing)}",
            why="the engine finds no weights; a disk that did not mount at boot leaves an empty folder",
            do="mount it (findmnt --verify; journalctl -b -u '*.mount'), or copy the weights",
        )
    locked = [
        one.point for one in facts.mounts if one.read_only and one.point == wanted.offload_dir
    ]
    if locked:
        return check.failed(
            f"read-only: {', '.join(locked)}",
            why="KV blocks cannot be written there",
            do=f"mount -o remount,rw {locked[0]}",
        )
    return check.passed(", ".join(paths) or "none needed")


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
