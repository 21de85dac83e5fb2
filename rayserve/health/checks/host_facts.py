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
class Folder:
    """A folder, the file system that holds it, and what the user of Ray may do there."""

    path: str
    error: str = ""
    """What the kernel said instead, such as `Stale file handle`."""
    missing: bool = False
    """Nothing is there."""
    silent: bool = False
    """Nothing was answered in time: a dead network mount, or a disk that hangs."""
    unasked: str = ""
    """Why the question could not be put; nothing is known then."""
    kind: str = ""
    """Of the file system, such as `nfs4`."""
    empty: bool = False
    read_only: bool = False
    readable: bool = False
    writable: bool = False
    free_bytes: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """Soft limits of a process; -1: none, None: not known."""

    whose: str
    nofile: int | None
    memlock_bytes: int | None


@dataclass(frozen=True, slots=True)
class Unit:
    """A systemd unit that is installed."""

    name: str
    active: str
    """ActiveState, such as `active`."""
    at_boot: str
    """UnitFileState, such as `enabled`."""


@dataclass(frozen=True, slots=True)
class KeyFile:
    """The file of API keys, as the replica's own code reads it; no key is in here."""

    path: str
    count: int = 0
    needed: str = ""
    found: str = ""
    do: str = ""
    """All three: the replica's own refusal; empty: it takes the file."""
    unasked: str = ""
    """Why the question could not be put."""


@dataclass(frozen=True, slots=True)
class TokenFile:
    """The file of Ray's token; the token is not in here."""

    path: str
    """Empty: the token stands in the environment."""
    error: str = ""
    """Why Ray cannot read one from it."""
    mode: int = 0
    """Permissions of the file."""
    unasked: str = ""
    """Why the question could not be put."""


@dataclass(frozen=True, slots=True)
class Clock:
    """The system clock. `offset_s`: None where no daemon tells."""

    synchronized: bool
    offset_s: float | None = None


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What was read of a host; None: it could not be read."""

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
    units: tuple[Unit, ...] = ()
    """Those that are installed of the units that serving needs; empty: systemd did not answer."""
    nouveau: bool = False
    secure_boot: bool | None = None
    signed: bool | None = None
    """The module on disk carries a signature."""
    packages: tuple[str, ...] = ()
    """Installed packages that make up kernel and driver."""
    held: tuple[str, ...] | None = None
    clock: Clock | None = None
    shm_bytes: int | None = None
    limits: tuple[Limits, ...] = ()
    """Of Ray as it runs and as it starts next, else of this process."""
    listeners: tuple[Listener, ...] | None = None
    ray_disk: Folder | None = None
    folders: tuple[Folder, ...] = ()
    """Those that the plan names."""
    starting: bool = False
    """These are the checks of Ray's own unit, before it starts."""
    user: str = ""
    """In whose stead folders and secrets were asked for."""
    keys: KeyFile | None = None
    """None: no plan, or one without keys."""
    token: TokenFile | None = None
    """None: no plan, or one whose Ray asks for none."""
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

    def unit(self, name: str) -> Unit | None:
        """The unit of this name, `.service` left out; None: not installed, or not known."""
        return next((one for one in self.units if one.name == f"{name}.service"), None)
