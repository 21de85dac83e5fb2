"""What `rayserve convert` makes of the cases and of the pasted command line, and how a test reads it."""

from __future__ import annotations

from typing import Any

from rayserve.planner.convert import convert
from rayserve.spec import SPEC_KEY
from rayserve.spec.placeholders import PLACEHOLDER
from tests.bad_specs import ROOT
from tests.yaml_text import load_yaml

FOLDER = ROOT / "tests" / "cases" / "convert"
CASES = load_yaml((FOLDER / "commands.yml").read_text(encoding="utf-8"))["cases"]
HOSTILE = load_yaml((FOLDER / "hostile.yml").read_text(encoding="utf-8"))["cases"]
PASTED = (FOLDER / "eight-gpus-one-model.txt").read_text(encoding="utf-8")


def spec_of(text: str) -> dict[str, Any]:
    """The content of a cluster.yml."""
    return load_yaml(text)[SPEC_KEY]


def at(spec: Any, key: str) -> Any:
    """The value of a dotted key; None where it is absent."""
    for part in key.split("."):
        if isinstance(spec, list):
            spec = spec[int(part)]
        else:
            spec = spec.get(part) if isinstance(spec, dict) else None
    return spec


def run(case: dict[str, Any]):
    """The conversion of a case of the table."""
    options = {
        key: case[key]
        for key in ("version", "aim", "gpu", "config", "hosts", "gpus_per_host")
        if key in case
    }
    return convert(case["command"], **options)


def kinds(found) -> list[str]:
    """Findings as `kind flag`."""
    return [f"{item.kind} {item.flag}".rstrip() for item in found.findings]


def pasted(**options):
    """The command line with comments after its backslashes, for eight A100."""
    return convert(PASTED, gpu="A100-80GB-SXM", aim="latency", **options)


def filled(text: str) -> str:
    """The file with something in place of each placeholder, and of the folders of examples."""
    text = text.replace(f"revision: {PLACEHOLDER}", f"revision: {'a' * 40}")
    return text.replace(PLACEHOLDER, "filled-in").replace("/path/to/", "/srv/")
