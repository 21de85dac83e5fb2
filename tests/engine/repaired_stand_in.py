"""Stands in for the engine where a test is about a host that is repaired: it starts if a file exists.

Imported by Ray's workers as `tests.engine.repaired_stand_in`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ray import serve


class Repaired:
    """Answers everything with its process id."""

    def __init__(self, needs: str) -> None:
        if not Path(needs).exists():
            raise RuntimeError(f"{needs} is not there")

    def __call__(self) -> str:
        return str(os.getpid())


def refuse(args: dict[str, Any]) -> Any:
    """No application: what it is built from is not on this host."""
    raise RuntimeError(f"no model in {args['needs']}")


def build(args: dict[str, Any]) -> Any:
    """An application of one replica that needs the file `args["needs"]`."""
    deployment = serve.deployment(name="Repaired", ray_actor_options={"num_cpus": 0})
    return deployment(Repaired).bind(args["needs"])
