"""Which test hosts are there? Makes, lists and removes hosts with systemd, their image and their network.

    tests/hosts/enter python3 tests/hosts/hosts.py image bookworm
    tests/hosts/enter python3 tests/hosts/hosts.py up node1 node2 --key build/hosts/key.pub
    tests/hosts/enter python3 tests/hosts/hosts.py down node1 node2

Runs with the system's Python and without the project, on Podman (with runc) or Docker. Names, network
and folders carry a prefix made from this checkout's path, so that two checkouts do not meet. A host
gets every capability but those that reach the machine: never its clock, modules, raw devices or reboot,
and never `--privileged`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
IMAGE_FILES = ("packages", "first-process", "provision")
LABEL = "rayserve.test-host"
NEVER = ("SYS_TIME", "SYS_MODULE", "SYS_BOOT", "SYS_RAWIO")
"""Capabilities that would reach the machine: its clock, kernel, power and devices."""
SYS_RESOURCE = 24
"""Number of CAP_SYS_RESOURCE, which is not ours to give where we do not have it."""
MOST_FILES, MOST_PROCESSES = 1048576, 32768
FIRST_HOST = 21
"""Last part of the first host's address."""


class HostsError(RuntimeError):
    """A host, an image or the network could not be made."""


@dataclass(frozen=True)
class Checkout:
    """What makes the names of this checkout's hosts its own."""

    path: Path

    @property
    def tag(self) -> str:
        """Six hex digits."""
        return hashlib.sha256(str(self.path).encode()).hexdigest()[:6]

    @property
    def network(self) -> str:
        """Name of the network."""
        return f"rayserve-{self.tag}"

    @property
    def subnet(self) -> str:
        """A /24 of 10.64.0.0/10, by the checkout."""
        number = int(self.tag, 16)
        return f"10.{64 + number % 64}.{number // 64 % 256}.0/24"

    def address(self, index: int) -> str:
        """Address of the host with this number, from 0 on."""
        return self.subnet.replace(".0/24", f".{FIRST_HOST + index}")

    def container(self, name: str) -> str:
        """The container of a host."""
        return f"rayserve-{self.tag}-{name}"

    @property
    def folder(self) -> Path:
        """For the hosts' disks."""
        return Path(os.environ.get("HOSTS_VAR", "/var/lib/rayserve-hosts")) / self.tag


CHECKOUT = Checkout(HERE.parent.parent)


def engine() -> str:
    """podman, or docker where there is no podman."""
    wanted = os.environ.get("HOSTS_ENGINE")
    found = wanted or shutil.which("podman") or shutil.which("docker")
    if not found:
        raise HostsError(
            "Podman or Docker is needed: apt-get install podman runc netavark aardvark-dns"
        )
    return Path(found).name


def call(*command: str, check: bool = True) -> str:
    """Output of a command; its own words where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise HostsError(
            f"{' '.join(command[:3])} …: {(done.stderr or done.stdout).strip()[-800:]}"
        )
    return done.stdout if not done.returncode else ""


# ── image ───────────────────────────────────────────────────────────────────────────────────────


def image_name(suite: str) -> str:
    """The image of a Debian release, by the content of what makes it."""
    digest = hashlib.sha256(b"".join((HERE / "image" / name).read_bytes() for name in IMAGE_FILES))
    return f"localhost/rayserve-host:{suite}-{digest.hexdigest()[:12]}"


def image(suite: str) -> str:
    """Make the image from the distribution's mirror, unless it is there."""
    name = image_name(suite)
    if engine() != "podman":
        raise HostsError("with Docker, build the image by hand: tests/hosts/image/Containerfile")
    if _exists(name):
        return name
    cache = Path(os.environ.get("HOSTS_CACHE", "/var/cache/rayserve-hosts"))
    cache.mkdir(parents=True, exist_ok=True)
    root = cache / f"{name.rsplit(':', 1)[1]}.tar"
    if not root.is_file():
        part = root.with_suffix(".part")
        _bootstrap(suite, part)
        part.rename(root)
    changes = (
        'CMD ["/usr/local/sbin/first-process"]',
        "STOPSIGNAL SIGRTMIN+3",
        "ENV container=podman",
    )
    call("podman", "import", "-q", *(f"--change={change}" for change in changes), str(root), name)
    return name


def _exists(name: str) -> bool:
    return subprocess.run(["podman", "image", "exists", name], check=False).returncode == 0


def _bootstrap(suite: str, target: Path) -> None:
    folder = HERE / "image"
    packages = ",".join((folder / "packages").read_text().split())
    leave_out = ("man/*", "doc/*", "locale/*")
    call(
        "mmdebstrap", "--quiet", "--format=tar", "--variant=minbase", f"--include={packages}",
        *(f"--dpkgopt=path-exclude=/usr/share/{path}" for path in leave_out),
        f"--customize-hook=copy-in {folder / 'first-process'} /usr/local/sbin",
        f"--customize-hook=copy-in {folder / 'provision'} /tmp",
        '--customize-hook=chroot "$1" sh /tmp/provision',
        '--customize-hook=rm -f "$1/tmp/provision" "$1/etc/resolv.conf"',
        '--customize-hook=: > "$1/etc/resolv.conf"; : > "$1/etc/hostname"',
        suite, str(target),
    )  # fmt: skip


# ── hosts ───────────────────────────────────────────────────────────────────────────────────────


def up(names: Sequence[str], *, suite: str, key: Path, disks: int, mounts: Sequence[str]) -> None:
    """Start hosts; those that run are left alone."""
    picture = image(suite)
    network()
    taken = addresses()
    free = iter(index for index in range(200) if CHECKOUT.address(index) not in taken.values())
    for name in names:
        if name in taken:
            continue
        start(name, CHECKOUT.address(next(free)), picture, key.read_text().strip(), disks, mounts)


def network() -> None:
    """The hosts' network, once."""
    if call(engine(), "network", "inspect", CHECKOUT.network, check=False):
        return
    no_dns = ["--disable-dns"] if engine() == "podman" else []
    call(engine(), "network", "create", "--subnet", CHECKOUT.subnet, *no_dns, CHECKOUT.network)


def start(
    name: str, address: str, picture: str, key: str, disks: int, mounts: Sequence[str]
) -> None:
    """Start one host at an address."""
    folder = CHECKOUT.folder / name
    folder.mkdir(parents=True, exist_ok=True)
    devices = [f"--device={loop}:/dev/nvme{number}n1" for number, loop in _disks(folder, disks)]
    files = _most(resource.RLIMIT_NOFILE, MOST_FILES)
    processes = _most(resource.RLIMIT_NPROC, MOST_PROCESSES)
    call(
        engine(), "run", "--detach", "--name", CHECKOUT.container(name), "--hostname", name,
        "--network", CHECKOUT.network, "--ip", address, "--restart=always",
        "--label", f"{LABEL}={CHECKOUT.tag}", "--label", f"{LABEL}.name={name}",
        *_kind(), f"--ulimit=nofile={files}:{files}", f"--ulimit=nproc={processes}:{processes}",
        "--shm-size=4g", "--env", f"AUTHORIZED_KEY={key}", "--cap-add=ALL",
        *(f"--cap-drop={capability}" for capability in _dropped()),
        "--security-opt=seccomp=unconfined", "--security-opt=apparmor=unconfined",
        "--security-opt=label=disable", "--device=/dev/loop-control", "--device=/dev/fuse",
        *devices,  # of the machine's disks these alone
        f"--volume={folder}:/host-disk", *(f"--volume={mount}" for mount in mounts), picture,
    )  # fmt: skip


def _kind() -> list[str]:
    if engine() == "podman":
        return ["--systemd=always", "--security-opt=unmask=/proc/sys:/sys/dev/block"]
    return [
        "--cgroupns=private", "--tmpfs=/run:exec,mode=755", "--tmpfs=/run/lock",
        "--tmpfs=/tmp:exec,mode=1777", "--env=container=docker", "--stop-signal=RTMIN+3",
        "--security-opt=systempaths=unconfined",
    ]  # fmt: skip


def _dropped() -> list[str]:
    status = Path("/proc/self/status").read_text()
    effective = int(
        next(line for line in status.splitlines() if line.startswith("CapEff")).split()[1], 16
    )
    return [*NEVER, *([] if effective >> SYS_RESOURCE & 1 else ["SYS_RESOURCE"])]


def _most(which: int, limit: int) -> int:
    hard = resource.getrlimit(which)[1]
    return limit if hard == resource.RLIM_INFINITY else min(hard, limit)


def _disks(folder: Path, count: int) -> list[tuple[int, str]]:
    """Loop devices of 1 GiB, which the host sees as NVMe disks."""
    found = []
    for number in range(1, count + 1):
        file = folder / f"disk{number}.img"
        with file.open("ab") as disk:
            disk.truncate(2**30)
        loop = call("losetup", "--find", "--show", str(file)).strip()
        found.append((number, loop))
    return found


def addresses() -> dict[str, str]:
    """Address of each host of this checkout, by its name."""
    listed = call(engine(), "ps", "--all", "--quiet", "--filter", f"label={LABEL}={CHECKOUT.tag}")
    found = {}
    for identity in listed.split():
        about = json.loads(call(engine(), "inspect", identity))[0]
        networks = about["NetworkSettings"]["Networks"].get(CHECKOUT.network, {})
        settled = networks.get("IPAMConfig") or {}
        address = networks.get("IPAddress") or settled.get("IPv4Address") or ""
        found[about["Config"]["Labels"][f"{LABEL}.name"]] = address
    return found


def down(names: Sequence[str]) -> None:
    """Remove hosts with their disks; without names, all of this checkout and its network."""
    for name in names or list(addresses()):
        call(engine(), "rm", "--force", "--time=3", CHECKOUT.container(name), check=False)
        folder = CHECKOUT.folder / name
        for disk in folder.glob("disk*.img"):
            # Asked of the kernel: after a reboot a number that was noted is somebody else's.
            loops = call("losetup", "--noheadings", "--output=NAME", "--associated", str(disk))
            for loop in loops.split():
                call("losetup", "--detach", loop, check=False)
        shutil.rmtree(folder, ignore_errors=True)
    if not names:
        call(engine(), "network", "rm", CHECKOUT.network, check=False)


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("image", help="make the image").add_argument(
        "suite", default="bookworm", nargs="?"
    )
    starting = verbs.add_parser("up", help="start hosts")
    starting.add_argument("names", nargs="+")
    starting.add_argument("--suite", default="bookworm")
    starting.add_argument("--key", type=Path, required=True, help="public SSH key of user ansible")
    starting.add_argument(
        "--disks", type=int, default=0, help="1 GiB disks, as /dev/nvme1n1 and on"
    )
    starting.add_argument("--mount", action="append", default=[], help="SOURCE:TARGET[:ro]")
    verbs.add_parser("list", help="print the addresses as JSON")
    verbs.add_parser("down", help="remove hosts; all without names").add_argument(
        "names", nargs="*"
    )
    chosen = parser.parse_args()
    try:
        if chosen.verb == "image":
            print(image(chosen.suite))
        elif chosen.verb == "up":
            up(
                chosen.names,
                suite=chosen.suite,
                key=chosen.key,
                disks=chosen.disks,
                mounts=chosen.mount,
            )
            print(json.dumps(addresses()))
        elif chosen.verb == "list":
            print(json.dumps(addresses()))
        else:
            down(chosen.names)
    except HostsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main())
