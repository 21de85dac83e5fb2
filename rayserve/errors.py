"""What can go wrong, and the exit code that each kind of failure ends a command with.

    RayserveError                1
    ├── OutputError              1   standard output cannot be written
    ├── EngineHungError          1   a running engine makes no step and answers no probe
    ├── UsageError               2   the command line is wrong
    ├── InputError               2   a file that people write is wrong
    │   ├── SpecError            2   cluster.yml: unknown key, wrong unit, impossible combination
    │   ├── EngineArgumentError  2   the pinned vLLM does not accept an argument, or we own it
    │   └── PlanError            2   plan.yml: stale, hand-edited or not a plan
    ├── DoesNotFitError          3   the spec is well formed, but the hardware cannot hold it
    ├── HostError                4   this machine is not ready: packages, ports, files, Ray
    └── StartError               5   an engine, Ray or Serve did not start in its budget

Every message answers three questions, in this order: what was needed, what was found, what to do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rayserve.veil import veiled, veiled_location

_MESSAGE = re.compile(
    r"(?P<needed>[^\n]*)(?:\n  found: (?P<found>.*?))?(?:\n  do:    (?P<do>[^\n]*)|\Z)", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Where:
    """A place in a file that a person can open: path, line (1-based) and the dotted key."""

    path: str
    line: int | None = None
    key: str | None = None

    def __str__(self) -> str:
        place = self.path if self.line is None else f"{self.path}:{self.line}"
        return place if self.key is None else f"{place} ({self.key})"


class RayserveError(Exception):
    """Base of all errors that a person is meant to read.

    `needed`, `found` and `do` are whole phrases without a final full stop. What has the form of a key
    in them is not repeated.
    """

    exit_code = 1

    def __init__(
        self, needed: str, *, found: str = "", do: str = "", where: Where | None = None
    ) -> None:
        self.needed = veiled(needed)
        self.found = veiled(found)
        self.do = veiled(do)
        self.where = None if where is None else _veiled(where)
        super().__init__(self.message())

    def message(self) -> str:
        """The whole message, one line for each answer."""
        head = self.needed if self.where is None else f"{self.where}: {self.needed}"
        lines = [head]
        if self.found:
            lines.append(f"  found: {self.found}")
        if self.do:
            lines.append(f"  do:    {self.do}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, str | int]:
        """The same, for `--json`."""
        out: dict[str, str | int] = {
            "error": type(self).__name__,
            "exit_code": self.exit_code,
            "needed": self.needed,
        }
        if self.found:
            out["found"] = self.found
        if self.do:
            out["do"] = self.do
        if self.where is not None:
            out["path"] = self.where.path
            if self.where.line is not None:
                out["line"] = self.where.line
            if self.where.key is not None:
                out["key"] = self.where.key
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RayserveError:
        """The error that `as_dict` was made of, whichever its kind: all that its message says."""
        where = Where(data["path"], data.get("line"), data.get("key")) if "path" in data else None
        found, do = data.get("found", ""), data.get("do", "")
        return cls(data["needed"], found=found, do=do, where=where)

    @classmethod
    def from_message(cls, text: str) -> RayserveError | None:
        """The error whose message begins a text, whichever its kind; None where it begins with none."""
        found = _MESSAGE.match(text)
        if found is None or not (found["found"] or found["do"]):
            return None
        return cls(found["needed"], found=found["found"] or "", do=found["do"] or "")

    def __reduce__(self) -> tuple[object, ...]:
        # Ray carries exceptions between processes with pickle, which by default calls __init__ with
        # Exception.args: that would lose every keyword.
        return (_rebuild, (type(self), self.needed, self.found, self.do, self.where))


def _veiled(where: Where) -> Where:
    key = None if where.key is None else veiled_location(where.key)
    return replace(where, path=veiled(where.path), key=key)


def _rebuild(
    kind: type[RayserveError], needed: str, found: str, do: str, where: Where | None
) -> RayserveError:
    return kind(needed, found=found, do=do, where=where)


class OutputError(RayserveError):
    """Standard output cannot be written: its disk is full, or it is closed."""


class EngineHungError(RayserveError):
    """A running engine makes no step and answers no probe: its replica is given up."""


class UsageError(RayserveError):
    """The command line is wrong."""

    exit_code = 2


class InputError(RayserveError):
    """A file that people write is wrong."""

    exit_code = 2


class SpecError(InputError):
    """cluster.yml is wrong."""


class PlanError(InputError):
    """plan.yml is stale, was edited by hand, or is not a plan."""


class EngineArgumentError(InputError):
    """The pinned vLLM does not accept an argument, or the toolkit owns it."""


class DoesNotFitError(RayserveError):
    """The spec is well formed, but the hardware cannot hold it."""

    exit_code = 3
    weights_bytes: int = 0
    """Weights on the fullest GPU, where memory is what does not suffice."""


class HostError(RayserveError):
    """This machine is not ready: packages, ports, files or Ray."""

    exit_code = 4


class StartError(RayserveError):
    """An engine, Ray or Serve did not start within its budget."""

    exit_code = 5
