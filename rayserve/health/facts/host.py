"""What is this host: kernel, driver, packages, limits, disks, clock?

`root` stands for `/` and `run` for the commands, so that recorded hosts can be read too. What cannot be
read is None or empty; nothing here raises.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from rayserve.health.checks.host_facts import Clock, HostFacts, Listener
from rayserve.health.checks.wanted import Wanted
from rayserve.health.facts.boot import (
    QUICK_S,
    library_version,
    read_kernels,
    read_line,
    read_next_kernel,
    read_secure_boot,
    read_signed,
)
from rayserve.health.facts.install import read_shm_bytes
from rayserve.health.facts.pci import nvidia_devices, redirecting_bridges
from rayserve.health.facts.plan_files import ray_folder, read_folder, read_keys, read_token
from rayserve.health.facts.ray_unit import (
    RAY,
    Asker,
    read_limits,
    read_ray_unit,
    read_units,
    this_process,
    units_of,
)
from rayserve.health.facts.run import Runner, run

PACKAGES = re.compile(
    r"(?:lib)?nvidia-(?!container|cuda-)|cuda-drivers|linux-(?:image|headers|modules)-|xserver-xorg-video-nvidia"
)
"""Packages whose upgrade takes kernel and driver apart."""


def read_host_facts(
    wanted: Wanted | None = None,
    *,
    root: Path = Path("/"),
    run: Runner = run,
    listeners: Callable[[], tuple[Listener, ...] | None] | None = None,
    asker: Asker | None = None,
) -> HostFacts:
    """All facts of this host. `listeners`: who holds which port; None: asked of the kernel.

    `asker`: who runs the checks; None: this process.
    """
    gpus, switches = nvidia_devices(root)
    kernels = tuple(read_kernels(root, run)) if gpus else ()
    swap_bytes, swap_used_bytes = _swap(root)
    packages, held = _packages(run) if gpus else ((), None)
    paths = [path for path in (wanted.model_path, wanted.offload_dir) if path] if wanted else []
    units = read_units(run)
    ray = read_ray_unit(units.get(RAY), root, asker or this_process())
    return HostFacts(
        kernel=read_line(root / "proc/sys/kernel/osrelease"),
        gpus=gpus,
        switches=switches,
        kernels=kernels,
        next_kernel=read_next_kernel(root, kernels),
        loaded_driver=read_line(root / "sys/module/nvidia/version"),
        library=library_version(root),
        manager=_manager(run) if switches else "",
        units=units_of(units),
        nouveau=_has_module(root, "nouveau"),
        secure_boot=read_secure_boot(root),
        signed=read_signed(run) if gpus else None,
        packages=packages,
        held=held,
        clock=_clock(run),
        shm_bytes=read_shm_bytes(root / "dev/shm"),
        limits=read_limits(units.get(RAY), root),
        listeners=(listeners or _listeners)(),
        ray_disk=read_folder(ray_folder(ray), ray, root, run),
        folders=tuple(read_folder(path, ray, root, run) for path in paths),
        starting=ray.inside,
        user=ray.user or ray.asker,
        keys=read_keys(wanted, ray, run),
        token=read_token(wanted, ray, root, run),
        raid_degraded=_raid(root),
        swap_bytes=swap_bytes,
        swap_used_bytes=swap_used_bytes,
        iommu=_iommu(root),
        redirecting=redirecting_bridges(run) if gpus else None,
        guest=_is_guest(run) if gpus else None,
        container=_is_container(root),
    )


# ── kernel and driver ───────────────────────────────────────────────────────────────────────────


def _manager(run: Runner) -> str:
    answer = run(["nv-fabricmanager", "--version"], QUICK_S)
    match = re.search(r"\d{3}\.\d+(?:\.\d+)?", answer.text)
    return match[0] if match else ""


def _has_module(root: Path, name: str) -> bool:
    return any(
        line.split(" ", 1)[0] == name for line in read_line(root / "proc/modules").splitlines()
    )


def _packages(run: Runner) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """Installed packages of kernel and driver, and those on hold, by dpkg."""
    listed = run(["dpkg-query", "-W", "-f", "${db:Status-Abbrev} ${Package}\n"], QUICK_S)
    if not listed.ok:
        return (), None
    rows = (line.split() for line in listed.text.splitlines())
    names = [row[1] for row in rows if len(row) == 2 and row[0].endswith("i")]
    ours = tuple(sorted(name for name in names if PACKAGES.match(name)))
    held = run(["apt-mark", "showhold"], QUICK_S)
    return ours, tuple(held.text.split()) if held.ok else None


# ── clock, ports ────────────────────────────────────────────────────────────────────────────────


def _clock(run: Runner) -> Clock | None:
    tracking = run(["chronyc", "-n", "tracking"], QUICK_S)
    if tracking.ok and tracking.text:
        match = re.search(r"System time\s*:\s*([\d.]+) seconds (slow|fast)", tracking.text)
        offset_s = float(match[1]) * (-1 if match[2] == "slow" else 1) if match else None
        return Clock("Not synchronised" not in tracking.text, offset_s)
    answer = run(["timedatectl", "show", "-p", "NTPSynchronized", "--value"], QUICK_S)
    if not answer.ok or answer.text.strip() not in ("yes", "no"):
        return None
    return Clock(answer.text.strip() == "yes")


def _listeners() -> tuple[Listener, ...] | None:
    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return None
    found = set()
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr:
            found.add((connection.laddr.port, _name(connection.pid)))
    return tuple(Listener(port, owner) for port, owner in sorted(found))


def _name(pid: int | None) -> str:
    if pid is None:
        return ""
    try:
        process = psutil.Process(pid)
        return owner(process.name(), process.cmdline())
    except psutil.Error:
        return ""


def owner(name: str, command: Sequence[str]) -> str:
    """A process as people know it: an interpreter by its script, since `python` says nothing."""
    script = next((part for part in command[1:] if not part.startswith("-")), "")
    return f"{name} {script}" if name.startswith("python") and script.endswith(".py") else name


# ── disks and memory ────────────────────────────────────────────────────────────────────────────


def _raid(root: Path) -> tuple[str, ...] | None:
    text = read_line(root / "proc/mdstat")
    return parse_mdstat(text) if re.search(r"^md\d", text, re.MULTILINE) else None


def parse_mdstat(text: str) -> tuple[str, ...]:
    """Arrays of /proc/mdstat that miss a disk, are failed or do not run, `name: level: why`.

    What holds the metadata of firmware RAID ("external:imsm", "external:ddf") never runs, and is sound.
    """
    found: list[str] = []
    blocks = re.split(r"^(?=md\S+ :)", text, flags=re.MULTILINE)
    for block in blocks:
        match = re.match(r"(md\S+) : (\S+)(?: \([^)]*\))?(?: (raid\d+|linear))?", block)
        if match is None or "external:" in block:
            continue
        level = match[3] or "raid"
        lamp = re.search(r"\[([U_]+)\]", block)
        if match[2] != "active":
            found.append(f"{match[1]}: {level}: {match[2]}")
        elif "(F)" in block:
            found.append(f"{match[1]}: {level}: a disk failed")
        elif lamp and "_" in lamp[1]:
            found.append(f"{match[1]}: {level}: [{lamp[1]}]")
    return tuple(found)


def _swap(root: Path) -> tuple[int | None, int | None]:
    try:
        lines = (root / "proc/swaps").read_text().splitlines()[1:]
    except OSError:
        return None, None
    rows = [line.split() for line in lines]
    kib = [(int(row[2]), int(row[3])) for row in rows if len(row) > 3]
    return 1024 * sum(size for size, _ in kib), 1024 * sum(used for _, used in kib)


def _iommu(root: Path) -> str:
    words = read_line(root / "proc/cmdline").split()
    return " ".join(word for word in words if "iommu" in word)


def _is_guest(run: Runner) -> bool | None:
    answer = run(["systemd-detect-virt", "--vm"], QUICK_S)
    kind = answer.text.strip()
    return None if not kind else kind != "none"


def _is_container(root: Path) -> bool:
    return (root / ".dockerenv").exists() or (root / "run/.containerenv").exists()
