"""What is a host, as its checks see it? Facts without verdicts."""

from __future__ import annotations

from dataclasses import dataclass


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
    """Name of the process, with the script that a Python runs; empty: not ours to see."""


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
    container: bool = False
