"""What is every record of a plan made of?"""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict

from rayserve.described import Described


class Record(Described):
    """Base of everything in the plan: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class NamedValue(Record):
    """One entry of what would be a map: an engine argument or an environment variable."""

    name: str
    value: Any
    """A scalar, a list or a mapping; never null."""
    reason: str = ""
    """Why the planner chose it; empty where a person wrote it."""
