"""The runbooks: one for each verdict that names one, with the same headings, and commands that parse."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from rayserve.cli import main
from rayserve.doctor.signatures import signatures
from rayserve.health.results import RUNBOOKS
from tests.errors_of import error_of

PAGES = sorted(Path(RUNBOOKS).glob("*.md"))
HEADINGS = ["Symptom", "Confirm", "Act", "Verify", "Undo"]


def named_pages() -> set[str]:
    """Pages that the checks name in their source."""
    found = set()
    for path in Path("rayserve/health/checks").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(r"Check\(\s*(?:[^()]|\([^()]*\))*?\)", text):
            found |= set(re.findall(r'"([a-z-]+)"\s*,?\s*\)$', match[0]))
        found |= set(re.findall(r'runbook="([a-z-]+)"', text))
    return found


def test_every_page_that_is_named_is_there() -> None:
    """A verdict's runbook is a file, and no file is without a check or a signature that names it."""
    named = {signature.runbook for signature in signatures()} - {""}
    assert named_pages() | named == {page.stem for page in PAGES}


@pytest.mark.parametrize("tag", ["kv-capacity", "oom-load", "oom-runtime", "preemption"])
def test_what_does_not_fit_is_told_by_a_page_about_that(tag: str) -> None:
    """A GPU without room is not the page of its memory's faults."""
    pages = {signature.runbook for signature in signatures() if signature.tag == tag}
    assert pages - {"", "gpu-memory-held"} == {"memory-fit"}
    assert f"`{tag}`" in Path(RUNBOOKS, "memory-fit.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_the_five_headings(page: Path) -> None:
    """Symptom, Confirm, Act, Verify and Undo, in this order and no others."""
    found = re.findall(r"^## (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert found == HEADINGS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_its_rayserve_commands_parse(page: Path) -> None:
    """Each `rayserve …` line of a page is a command with options that exist."""
    lines = [line for line in page.read_text(encoding="utf-8").splitlines()
             if line.startswith("rayserve ")]  # fmt: skip
    assert lines
    for line in lines:
        words = shlex.split(line)[1:]
        command: click.Command = main
        context = click.Context(main, info_name="rayserve")
        while isinstance(command, click.Group):
            found = command.get_command(context, words.pop(0))
            assert found is not None, line
            command = found
        told = error_of(command.make_context, command.name, words)
        # A file of a host need not be here.
        assert told is None or "no file at /etc/rayserve" in getattr(told, "found", "")
