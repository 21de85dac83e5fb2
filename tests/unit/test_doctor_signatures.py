"""Is every signature whole, and does each code of the driver that asks for something have one?"""

from __future__ import annotations

import re
import shlex

import click
import pytest

from rayserve.cli import main
from rayserve.doctor.signatures import CONFIDENCES, signatures
from rayserve.health.checks.kernel_log import xids
from tests.bad_specs import ROOT
from tests.unit.diagnosed import tags


def test_every_xid_that_asks_for_something_is_a_finding():
    """Codes of the Xid table are found, but for those that ask for nothing or depend on counters."""
    line = "kernel: NVRM: Xid (PCI:0000:4e:00): {}, pid=12, name=x, some text"
    found = {code for code in xids() if tags(line.format(code))}
    asks = {code for code, row in xids().items() if row.action in ("restart", "reset", "reboot")}
    ignored = {code for code, row in xids().items() if row.action == "ignore"}
    assert asks <= found
    assert not found & ignored


@pytest.mark.parametrize("signature", signatures(), ids=lambda one: f"{one.tag}: {one.title}"[:50])
def test_a_signature_is_whole(signature):
    """A signature's patterns can match lowered text, its confidence is a known word, its page is there."""
    assert signature.sure in CONFIDENCES
    assert re.fullmatch(r"[a-z0-9-]+", signature.tag)
    assert not signature.runbook or (ROOT / "docs/runbooks" / f"{signature.runbook}.md").is_file()
    for pattern in signature.patterns:
        plain = re.sub(r"\\.", "", pattern.regex)
        assert (pattern.has + plain) == (pattern.has + plain).lower()
        assert len(re.sub(r"[\d ]", "", pattern.has)) >= 3
        re.compile(pattern.regex)


def test_commands_in_fixes_parse():
    """Each `rayserve …` that a fix names in backticks is a command with options that exist."""
    lines = [line for one in signatures() for line in re.findall(r"`(rayserve [^`]+)`", one.fix)]
    assert len(lines) > 5
    for line in set(lines):
        words = shlex.split(line)[1:]
        command: click.Command = main
        while isinstance(command, click.Group):
            command = command.commands[words.pop(0)]
        known = {name for option in command.params for name in option.opts}
        assert {word for word in words if word.startswith("--")} <= known, line
