"""What do hosts install from? Builds rayserve's wheel, and fills a folder with the wheels of a lock.

    python scripts/build_wheels.py                      dist/rayserve-<version>-py3-none-any.whl
    python scripts/build_wheels.py --lock cpu           and build/wheelhouse, for hosts without an index

The wheel of the same sources is the same file, byte for byte, so that a host tells by its digest whether
anything has changed.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EPOCH = "946684800"
"""Time of every file inside the wheel: 2000-01-01."""
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "rayserve")


def build(target: Path) -> Path:
    """Build rayserve's wheel into a folder, in place of earlier ones; from a copy, which leaves no trace here."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name, "source")
        copy.mkdir()
        for source in SOURCES:
            _copy(ROOT / source, copy / source)
        environment = {**os.environ, "SOURCE_DATE_EPOCH": EPOCH}
        _pip(
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "--wheel-dir",
            name,
            str(copy),
            env=environment,
        )
        built = next(Path(name).glob("rayserve-*.whl"))
        for old in target.glob("rayserve-*.whl"):
            old.unlink()
        return Path(shutil.move(built, target / built.name))


def download(lock: Path, target: Path) -> None:
    """Fetch a wheel for each line of a lock, unless all are there."""
    target.mkdir(parents=True, exist_ok=True)
    if not missing(lock.read_text("utf-8"), [path.name for path in target.glob("*.whl")]):
        return
    _pip(
        "download",
        "--no-deps",
        "--find-links",
        str(target),
        "--dest",
        str(target),
        "--requirement",
        str(lock),
    )


def missing(lock: str, wheels: Sequence[str]) -> list[str]:
    """Pins of a lock's text for this kind of machine that none of the wheels, by file name, satisfies."""
    there = {_pin(name) for name in wheels}
    lines = [line for line in lock.splitlines() if line and not line.startswith("#")]
    pins = [line.partition(";") for line in lines]
    here = [pin.strip() for pin, _, marker in pins if not marker or platform.machine() in marker]
    return [pin for pin in here if pin not in there]


def _pin(wheel: str) -> str:
    """name==version of a wheel's file name, the name as locks write it."""
    name, version = wheel.split("-")[:2]
    return f"{name.lower().replace('_', '-').replace('.', '-')}=={version}"


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copyfile(source, target)


def _pip(*arguments: str, env: dict[str, str] | None = None) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, env=env)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--lock", choices=["cpu", "gpu"], help="also fill build/wheelhouse from this lock"
    )
    chosen = parser.parse_args()
    try:
        print(build(ROOT / "dist"))
        if chosen.lock:
            download(ROOT / "requirements" / f"{chosen.lock}.lock", ROOT / "build" / "wheelhouse")
    except subprocess.CalledProcessError as error:
        print(f"error: pip ended with {error.returncode}; its words are above", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
