"""Which exact versions does each kind of machine install? Writes requirements/*.lock.

    python scripts/lock.py            write all locks (a fresh resolution of pyproject.toml)
    python scripts/lock.py --check    say whether the locks still cover pyproject.toml; no network

pip resolves, with `--dry-run --report`; nothing is installed. From its report this keeps what our own
requirements reach, on Python 3.11 and 3.12 alike, after the distributions in CPU_EXCLUDED are taken
out. The locks are installed with `pip install --no-deps`, so nothing can bring those back.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent

CPU_EXCLUDED = frozenset({"torchaudio", "torchcodec", "torchvision", "triton"})
"""What the CPU engine asks for and runs better without.

The torch family: their builds on the index belong to the CUDA torch, and beside torch+cpu they break
`import transformers`. triton: 1 GB that a CPU cannot use; and where CUDA_VISIBLE_DEVICES is empty, as
in a Ray actor without GPUs, vLLM takes it for usable (vllm/triton_utils/importing.py)."""

PYTHONS = ("3.11", "3.12")
ARCHITECTURES = ("x86_64", "aarch64")

CPU_PINS = ("torch==2.13.0+cpu",)
GPU_PINS = ("torch===2.13.0",)
"""`===` takes the CUDA build even where the configured index also offers a `+cpu` one."""


class LockError(Exception):
    """pip could not resolve, or a lock misses something that pyproject.toml asks for."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """One distribution of a resolution: its exact version and what it requires."""

    name: str
    version: str
    requires: tuple[str, ...]


Resolution = Mapping[str, Distribution]
Wanted = tuple[str, str]
"""A canonical name and one extra of it ("" for none)."""


def parse_report(report: Mapping[str, object]) -> dict[str, Distribution]:
    """The distributions of a pip installation report, by canonical name."""
    out: dict[str, Distribution] = {}
    for item in report["install"]:  # type: ignore[attr-defined]
        metadata = item["metadata"]
        name = canonicalize_name(metadata["name"])
        requires = tuple(metadata.get("requires_dist", ()))
        out[name] = Distribution(name, metadata["version"], requires)
    return out


def environment(python: str, machine: str) -> dict[str, str]:
    """What a marker is compared with on Linux, for one Python and one architecture."""
    return {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": machine,
        "platform_system": "Linux",
        "sys_platform": "linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }


def closure(
    resolution: Resolution, roots: Iterable[str], *, excluded: frozenset[str] = frozenset()
) -> dict[str, frozenset[str]]:
    """What `roots` reach on either Python, without passing through `excluded`: name -> machines.

    Raises LockError where something needed is not in the resolution.
    """
    found: dict[str, set[str]] = {}
    for machine in ARCHITECTURES:
        for python in PYTHONS:
            here = environment(python, machine)
            for name in _closure_in(here, resolution, roots, excluded):
                found.setdefault(name, set()).add(machine)
    return {name: frozenset(machines) for name, machines in found.items()}


def _closure_in(
    here: Mapping[str, str],
    resolution: Resolution,
    roots: Iterable[str],
    excluded: frozenset[str],
) -> set[str]:
    todo = list(_wanted(roots, "", here))
    seen: set[Wanted] = set()
    while todo:
        name, extra = todo.pop()
        if name in excluded or (name, extra) in seen:
            continue
        seen.add((name, extra))
        if name not in resolution:
            where = f"Python {here['python_version']} {here['platform_machine']}"
            raise LockError(f"{name} is needed on {where}, but the resolution does not hold it")
        todo.extend(_wanted(resolution[name].requires, extra, here))
    return {name for name, _ in seen}


def _wanted(requires: Iterable[str], extra: str, here: Mapping[str, str]) -> Iterable[Wanted]:
    for text in requires:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is not None and not marker.evaluate({**here, "extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        yield name, ""
        for one in requirement.extras:
            yield name, one


def render(title: str, resolution: Resolution, names: Mapping[str, frozenset[str]]) -> str:
    """The text of a lock file; what only one architecture needs carries a marker."""
    head = (
        f"# {title}\n"
        "# Written by scripts/lock.py (`make lock`); do not edit.\n"
        "# Install with: pip install --no-deps -r <this file>\n"
    )
    lines = []
    for name, machines in sorted(names.items()):
        line = f"{name}=={resolution[name].version}"
        if machines != frozenset(ARCHITECTURES):
            line += " ; " + " or ".join(f'platform_machine == "{one}"' for one in sorted(machines))
        lines.append(line + "\n")
    return head + "".join(lines)


def without(
    names: Mapping[str, frozenset[str]], others: Iterable[str]
) -> dict[str, frozenset[str]]:
    """Those of `names` that another lock does not hold already."""
    held = set(others)
    return {name: machines for name, machines in names.items() if name not in held}


def read_lock(path: Path) -> dict[str, str]:
    """Name -> version of a lock file."""
    lines = (line.partition(";")[0].strip() for line in path.read_text().splitlines())
    return dict(line.split("==", 1) for line in lines if line and not line.startswith("#"))


def resolve(requirements: Sequence[str]) -> dict[str, Distribution]:
    """Ask pip for the newest versions that fit together; downloads metadata, installs nothing.

    Raises LockError with pip's last lines when it finds none.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        command += ["--only-binary=:all:", "--quiet", "--report", str(report), *requirements]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            tail = "\n".join(done.stderr.strip().splitlines()[-5:])
            raise LockError(f"pip could not resolve {' '.join(requirements)}:\n{tail}")
        return parse_report(json.loads(report.read_text()))


def project_requirements() -> dict[str, list[str]]:
    """Requirements by extra, "" for the base ones, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"": project["dependencies"], **project["optional-dependencies"]}


def build_locks() -> dict[str, str]:
    """File name -> text, for every lock."""
    extras = project_requirements()
    cpu_roots = ["pip", *extras[""], *extras["serve"], *extras["cpu"]]
    both = [*cpu_roots, *extras["dev"], *extras["bench"]]
    cpu = resolve([*both, *CPU_PINS])
    cpu_names = closure(cpu, cpu_roots, excluded=CPU_EXCLUDED)
    dev_names = without(closure(cpu, extras["dev"], excluded=CPU_EXCLUDED), cpu_names)
    bench_all = closure(cpu, extras["bench"], excluded=CPU_EXCLUDED)
    bench_names = without(bench_all, [*cpu_names, *dev_names])
    gpu_roots = ["pip", *extras[""], *extras["serve"], *extras["gpu"]]
    gpu = resolve([*gpu_roots, *GPU_PINS])
    ansible = resolve(extras["ansible"])
    title = "Python 3.11 and 3.12 on Linux;"
    return {
        "cpu.lock": render(f"{title} machines without a GPU", cpu, cpu_names),
        "dev.lock": render(f"{title} on top of cpu.lock: tests and linters", cpu, dev_names),
        "bench.lock": render(f"{title} on top of cpu.lock and dev.lock: bench", cpu, bench_names),
        "gpu.lock": render(f"{title} GPU hosts (CUDA 13)", gpu, closure(gpu, gpu_roots)),
        "ansible.lock": render(
            f"{title} the controller: Ansible and its linters, in an environment of their own",
            ansible,
            closure(ansible, extras["ansible"]),
        ),
    }


def uncovered(pins: Mapping[str, str], requirements: Iterable[str]) -> list[str]:
    """Requirements that these pins do not satisfy."""
    missing = []
    for text in requirements:
        requirement = Requirement(text)
        version = pins.get(canonicalize_name(requirement.name))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            missing.append(text)
    return missing


def check() -> list[str]:
    """What pyproject.toml asks for and the committed locks do not hold."""
    extras = project_requirements()
    pins = {name: read_lock(ROOT / f"requirements/{name}.lock") for name in ("cpu", "dev", "bench")}
    cpu_side = pins["cpu"] | pins["dev"] | pins["bench"]
    gpu_side = read_lock(ROOT / "requirements/gpu.lock")
    controller = read_lock(ROOT / "requirements/ansible.lock")
    problems = [
        f"cpu, dev and bench locks: {text}"
        for extra in ("", "serve", "cpu", "dev", "bench")
        for text in uncovered(cpu_side, extras[extra])
    ]
    problems += [
        f"gpu.lock: {text}"
        for extra in ("", "serve", "gpu")
        for text in uncovered(gpu_side, extras[extra])
    ]
    problems += [f"ansible.lock: {text}" for text in uncovered(controller, extras["ansible"])]
    problems += [f"cpu.lock holds {name}" for name in sorted(CPU_EXCLUDED & cpu_side.keys())]
    return problems


def main() -> int:
    """Write the locks, or check them; 1 when they do not cover pyproject.toml."""
    parser = argparse.ArgumentParser(description="Write or check requirements/*.lock.")
    parser.add_argument("--check", action="store_true", help="only compare with pyproject.toml")
    if parser.parse_args().check:
        problems = check()
        for problem in problems:
            print(f"not covered: {problem}", file=sys.stderr)
        if problems:
            print("do: make lock", file=sys.stderr)
        return 1 if problems else 0
    try:
        locks = build_locks()
    except LockError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    folder = ROOT / "requirements"
    folder.mkdir(exist_ok=True)
    for name, text in locks.items():
        (folder / name).write_text(text)
        print(f"requirements/{name}: {len(read_lock(folder / name))} distributions")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
