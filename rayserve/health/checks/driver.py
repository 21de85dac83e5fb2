"""Do kernel, driver and Fabric Manager fit together, now and after the next reboot?"""

from __future__ import annotations

from rayserve.health.checks.host_facts import HostFacts
from rayserve.health.checks.wanted import MIN_DRIVER
from rayserve.health.results import Check, CheckResult

NO_GPU = "no NVIDIA GPU on the PCI bus"


def check_driver_set(facts: HostFacts) -> list[CheckResult]:
    """All verdicts on kernel and driver, in the order in which they are best repaired."""
    checks = (check_nouveau, check_driver, check_fabric_manager, check_next_boot, check_holds)
    return [check(facts) for check in checks]


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
