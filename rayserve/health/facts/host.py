"""What is this host: kernel, driver, packages, limits, disks, clock?

`root` stands for `/` and `run` for the commands, so that recorded hosts can be read too. What cannot be
read is None or empty; nothing here raises.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from rayserve.health.checks.host_facts import Clock, HostFacts, InstalledKernel, Listener, Mount
from rayserve.health.checks.wanted import Wanted
from rayserve.health.facts.install import read_shm_bytes
from rayserve.health.facts.pci import nvidia_devices, redirecting_bridges
from rayserve.health.facts.run import Runner, run

QUICK_S = 5.0
LIBRARIES = ("usr/lib/x86_64-linux-gnu", "usr/lib64", "usr/lib/aarch64-linux-gnu", "usr/lib")
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
) -> HostFacts:
    """All facts of this host. `listeners`: who holds which port; None: asked of the kernel."""
    gpus, switches = nvidia_devices(root)
    kernel = _line(root / "proc/sys/kernel/osrelease")
    kernels = tuple(_kernels(root, run)) if gpus else ()
    swap_bytes, swap_used_bytes = _swap(root)
    packages, held = _packages(run)
    paths = [path for path in (wanted.model_path, wanted.offload_dir) if path] if wanted else []
    return HostFacts(
        kernel=kernel,
        gpus=gpus,
        switches=switches,
        kernels=kernels,
        next_kernel=_next_kernel(root, kernels),
        loaded_driver=_line(root / "sys/module/nvidia/version"),
        library=library_version(root),
        manager=_manager(run) if switches else "",
        manager_state=_unit_state(run, "nvidia-fabricmanager") if switches else "",
        nouveau=_has_module(root, "nouveau"),
        secure_boot=_secure_boot(root),
        signed=_signed(run) if gpus else None,
        packages=packages,
        held=held,
        clock=_clock(run),
        shm_bytes=read_shm_bytes(root / "dev/shm"),
        nofile=_limit(resource.RLIMIT_NOFILE),
        memlock_bytes=_limit(resource.RLIMIT_MEMLOCK),
        listeners=(listeners or _listeners)(),
        ray_disk=_mount(root, _ray_folder(root)),
        mounts=tuple(mount for path in paths if (mount := _mount(root, Path(path))) is not None),
        raid_degraded=_raid(root),
        swap_bytes=swap_bytes,
        swap_used_bytes=swap_used_bytes,
        iommu=_iommu(root),
        redirecting=redirecting_bridges(run) if gpus else None,
        guest=_is_guest(run),
        container=_is_container(root),
    )


def _line(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


# ── kernel and driver ───────────────────────────────────────────────────────────────────────────


def _kernels(root: Path, run: Runner) -> Iterator[InstalledKernel]:
    """Kernels that may boot: those with modules, and an image where /boot has any."""
    modules, boot = root / "lib/modules", root / "boot"
    try:
        folders = sorted(modules.iterdir())
    except OSError:
        return
    images = [path.name for path in _children(boot) if path.name.startswith("vmlinuz-")]
    for folder in folders:
        if images and f"vmlinuz-{folder.name}" not in images:
            continue
        yield InstalledKernel(
            release=folder.name,
            headers=(folder / "build").exists(),
            driver=_module_version(folder.name, run),
        )


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _module_version(release: str, run: Runner) -> str:
    """Version of the NVIDIA module that depmod would load for a kernel; empty: there is none."""
    answer = run(["modinfo", "-F", "version", "-k", release, "nvidia"], QUICK_S)
    return answer.text.strip() if answer.ok else ""


def _next_kernel(root: Path, kernels: Sequence[InstalledKernel]) -> str:
    """What GRUB starts by default: the newest, unless the configuration names an entry."""
    default = re.search(
        r"^GRUB_DEFAULT=[\"']?([^\"'\n]*)", _line(root / "etc/default/grub"), re.MULTILINE
    )
    if default is not None and default[1] not in ("", "0"):
        named = [one.release for one in kernels if one.release in default[1]]
        return named[0] if named else ""
    return max((one.release for one in kernels), key=_version_key, default="")


def _version_key(release: str) -> list[tuple[int, str]]:
    parts = re.findall(r"\d+|[a-z]+", release)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def library_version(root: Path) -> str:
    """Version of libnvidia-ml.so.1, by the name of the file that it stands for."""
    for folder in LIBRARIES:
        link = root / folder / "libnvidia-ml.so.1"
        with contextlib.suppress(OSError):
            match = re.search(r"\.so\.(\d+\.[\d.]+)$", str(link.resolve(strict=True)))
            if match:
                return match[1]
    return ""


def _manager(run: Runner) -> str:
    answer = run(["nv-fabricmanager", "--version"], QUICK_S)
    match = re.search(r"\d{3}\.\d+(?:\.\d+)?", answer.text)
    return match[0] if match else ""


def _unit_state(run: Runner, unit: str) -> str:
    answer = run(["systemctl", "is-active", unit], QUICK_S)
    return answer.text.split("\n", 1)[0].strip()


def _has_module(root: Path, name: str) -> bool:
    return any(line.split(" ", 1)[0] == name for line in _line(root / "proc/modules").splitlines())


def _secure_boot(root: Path) -> bool | None:
    for path in _children(root / "sys/firmware/efi/efivars"):
        if path.name.startswith("SecureBoot-"):
            with contextlib.suppress(OSError):
                data = path.read_bytes()
                return len(data) > 4 and data[4] == 1  # four bytes of attributes first
    return False if not (root / "sys/firmware/efi").exists() else None


def _signed(run: Runner) -> bool | None:
    answer = run(["modinfo", "-F", "signer", "nvidia"], QUICK_S)
    return bool(answer.text.strip()) if answer.ok else None


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


# ── limits, clock, ports ────────────────────────────────────────────────────────────────────────


def _limit(which: int) -> int:
    soft, _ = resource.getrlimit(which)
    return -1 if soft == resource.RLIM_INFINITY else soft


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


def _ray_folder(root: Path) -> Path:
    named = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    return root / named.lstrip("/")


def _mount(root: Path, path: Path) -> Mount | None:
    """The file system that holds a path; None where there is no such path."""
    try:
        there = path.resolve(strict=True)
        stat = os.statvfs(there)
    except OSError:
        return None
    kind = ""
    for line in _line(root / "proc/self/mounts").splitlines():
        fields = line.split(" ")
        if len(fields) > 2 and there.is_relative_to(fields[1]):
            kind = fields[2]
    return Mount(
        point=str(path),
        kind=kind,
        read_only=bool(stat.f_flag & os.ST_RDONLY),
        free_bytes=stat.f_bavail * stat.f_frsize,
        size_bytes=stat.f_blocks * stat.f_frsize,
    )


def _raid(root: Path) -> tuple[str, ...] | None:
    text = _line(root / "proc/mdstat")
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
    words = _line(root / "proc/cmdline").split()
    return " ".join(word for word in words if "iommu" in word)


def _is_guest(run: Runner) -> bool | None:
    answer = run(["systemd-detect-virt", "--vm"], QUICK_S)
    kind = answer.text.strip()
    return None if not kind else kind != "none"


def _is_container(root: Path) -> bool:
    return (root / ".dockerenv").exists() or (root / "run/.containerenv").exists()
