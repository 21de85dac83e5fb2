"""The command line, run in this process, and the files that `rayserve plan` writes."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner, Result

from rayserve.cli import main


def run(*args: object) -> Result:
    """Run `rayserve` with these arguments."""
    return CliRunner().invoke(main, [str(arg) for arg in args])


def plan_files(inventory: Path) -> tuple[Path, Path]:
    """Where plan and Serve config of an inventory go."""
    return inventory / "group_vars" / "all" / "plan.yml", inventory / "serve.yml"
