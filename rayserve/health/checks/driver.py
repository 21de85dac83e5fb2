"""Do kernel, driver and Fabric Manager fit together, now and after the next reboot?"""

from __future__ import annotations

from rayserve.health.checks.host_facts import HostFacts
from rayserve.health.checks.wanted import MIN_DRIVER, Wanted
from rayserve.health.results import Check, CheckResult

NO_GPU = "no NVIDIA GPU on the PCI bus"


def check_driver_set(facts: HostFacts, wanted: Wanted | None = None) -> list[CheckResult]:
    """All verdicts on kernel and driver, in the order in which they are best repaired."""
    checks = (check_fabric_manager, check_boot_units, check_next_boot, check_holds)
    return [
        check_nouveau(facts),
        check_driver(facts, wanted),
        *(check(facts) for check in checks),
    ]


def without_gpu(check: Check, wanted: Wanted | None) -> CheckResult:
    """The verdict where no GPU is on the bus: a fault where the plan wants one here."""
    if wanted is None or not wanted.gpus:
        return check.skipped(NO_GPU)
    do = "lspci -d 10de: ; correct node_pools in cluster.yml, or the inventory"
    if wanted.without_gpus:
        return check.warned(
            f"none on the PCI bus, as is right for a host of pool `{wanted.without_gpus}`",
            why="a host of the other pool would have lost its GPUs",
            do=do,
        )
    return check.failed(
        "none on the PCI bus",
        why="the board is not seated, has no power, or this is another host than the plan's",
        do=do,
    )


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


def check_driver(facts: HostFacts, wanted: Wanted | None = None) -> CheckResult:
    """Is the driver loaded, new enough, and of one version in kernel and user space?"""
    check = Check(
        "driver", f"branch {MIN_DRIVER} or newer, the same in kernel and libraries", "driver"
    )
    if not facts.gpus:
        return without_gpu(check, wanted)
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
    unit = facts.unit("nvidia-fabricmanager")
    if unit is None or unit.active != "active":
        return check.failed(
            f"{facts.manager}, {unit.active if unit is not None else 'state not known'}",
            why="without it the switches carry nothing, and CUDA ends with error 802",
            do="systemctl enable --now nvidia-fabricmanager; then: journalctl -u nvidia-fabricmanager",
        )
    return check.passed(f"{facts.manager}, active")


LEFT_OFF = ("disabled", "masked", "masked-runtime", "enabled-runtime", "linked", "linked-runtime")
"""States of a unit's file in which it does not start at the next boot, unless another unit wants it."""


def check_boot_units(facts: HostFacts) -> CheckResult:
    """Do the units that run now start at the next boot?"""
    check = Check("boot-units", "what runs now starts at boot", "driver")
    if not facts.units:
        return check.skipped("systemd did not answer, or has no unit of serving")
    running = [one for one in facts.units if one.active in ("active", "activating", "reloading")]
    off = [one for one in running if one.at_boot in LEFT_OFF]
    if not off:
        return check.passed(", ".join(one.name for one in running) or "none of them runs")
    return check.warned(
        ", ".join(f"{one.name} runs, and is {one.at_boot}" for one in off),
        why="the next reboot leaves it off: without Fabric Manager CUDA ends with error 802, without "
        "Ray the host does not serve",
        do=f"systemctl enable {' '.join(one.name for one in off)} (masked: systemctl unmask first)",
    )


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
    installed = {one.release: one.driver for one in facts.kernels}
    if chosen and chosen not in installed:
        return check.warned(
            f"GRUB starts {chosen}, which has no image and modules here",
            why="after the next reboot this host stands at GRUB, or has no GPUs",
            do="update-grub (grub2-mkconfig), or grub-set-default with a kernel that is installed",
        )
    if not chosen:
        return check.passed("every kernel has one; which boots next is not known")
    return check.passed(f"{chosen} boots next, with {installed[chosen]}")


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
