"""What would start this host's GPUs, now and at the next boot: kernels, modules, libraries, signatures?"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rayserve.health.checks.host_facts import InstalledKernel
from rayserve.health.facts.run import Runner
from rayserve.health.readings.grub import next_release, parse_environment

QUICK_S = 5.0
LIBRARIES = ("usr/lib/x86_64-linux-gnu", "usr/lib64", "usr/lib/aarch64-linux-gnu", "usr/lib")
GRUB = ("boot/grub", "boot/grub2")


def read_line(path: Path) -> str:
    """A file without the white space around it; empty where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def read_kernels(root: Path, run: Runner) -> Iterator[InstalledKernel]:
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


def read_next_kernel(root: Path, kernels: Sequence[InstalledKernel]) -> str:
    """Release that the next boot starts; empty: not known."""
    written = re.search(
        r"^GRUB_DEFAULT=[\"']?([^\"'\n]*)", read_line(root / "etc/default/grub"), re.MULTILINE
    )
    menu, saved = (_of_grub(root, name) for name in ("grub.cfg", "grubenv"))
    return next_release(
        menu or "",
        parse_environment(saved) if saved is not None else None,
        written[1] if written else "",
        sorted((one.release for one in kernels), key=_version_key),
    )


def _of_grub(root: Path, name: str) -> str | None:
    """A file of GRUB's; empty: there is none, None: it may not be read."""
    for folder in GRUB:
        try:
            return (root / folder / name).read_text(errors="replace")
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return ""


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


def read_secure_boot(root: Path) -> bool | None:
    """Whether the firmware boots signed kernels alone; None: not known."""
    for path in _children(root / "sys/firmware/efi/efivars"):
        if path.name.startswith("SecureBoot-"):
            with contextlib.suppress(OSError):
                data = path.read_bytes()
                return len(data) > 4 and data[4] == 1  # four bytes of attributes first
    return False if not (root / "sys/firmware/efi").exists() else None


def read_signed(run: Runner) -> bool | None:
    """Whether the module on disk carries a signature; None: there is none to ask."""
    answer = run(["modinfo", "-F", "signer", "nvidia"], QUICK_S)
    return bool(answer.text.strip()) if answer.ok else None
