"""Which requests must be refused, and how? Reads tests/cases/bad_requests.yml."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.yaml_text import load_yaml

CASES = Path(__file__).parent / "cases" / "bad_requests.yml"
USER = [{"role": "user", "content": "hello"}]
GOOD: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"model": "demo", "messages": USER, "max_tokens": 4}),
    "completion": ("/v1/completions", {"model": "demo", "prompt": "hello", "max_tokens": 4}),
    "responses": ("/v1/responses", {"model": "demo", "input": "hello", "max_output_tokens": 4}),
    "messages": ("/v1/messages", {"model": "demo", "messages": USER, "max_tokens": 4}),
    "tokenize": ("/tokenize", {"model": "demo", "prompt": "hello"}),
}
"""Path and body of a good request of each kind."""
ANY_BODY = {"model": "demo"}


@dataclass(frozen=True)
class BadRequest:
    """One request with one mistake."""

    name: str
    to: str
    status: Any
    say: str = ""
    method: str = "POST"
    shape: str = ""
    key: str = "right"
    headers: dict[str, str] = field(default_factory=dict)
    replaced: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    raw: str | bytes | None = None
    make: str = ""
    socket: str = ""
    outside: bool = False

    @property
    def path(self) -> str:
        """The path asked for, below the application's own."""
        return GOOD[self.to][0] if self.to in GOOD else self.to

    @property
    def statuses(self) -> tuple[int, ...]:
        """The right statuses; none: nobody waits for an answer."""
        if self.status == "none":
            return ()
        return tuple(self.status) if isinstance(self.status, list) else (self.status,)

    def good(self) -> dict[str, Any]:
        """The body without its mistake."""
        return dict(GOOD[self.to][1] if self.to in GOOD else ANY_BODY)

    def body(self) -> bytes | dict[str, Any] | None:
        """The body with its mistake; None for a request that has none."""
        if self.raw is not None:
            return self.raw.encode() if isinstance(self.raw, str) else self.raw
        if self.method == "GET":
            return None
        fields = {**self.good(), **self.replaced}
        return {name: value for name, value in fields.items() if name not in self.without}

    def path_for(self, key: str) -> str:
        """The path, with the key where the case puts it there."""
        return self.path.replace("{key}", key)

    def headers_for(self, key: str) -> dict[str, str]:
        """All headers."""
        keys = {
            "right": {"Authorization": f"Bearer {key}"},
            "wrong": {"Authorization": "Bearer no-such-key"},
            "swapped": {"Authorization": f"Bearer {key.swapcase()}"},
            "none": {},
        }
        own = {name: value.replace("{key}", key) for name, value in self.headers.items()}
        return {"Content-Type": "application/json", **keys[self.key], **own}


def load() -> list[BadRequest]:
    """All cases of the table, the welcome ones last."""
    data = load_yaml(CASES.read_text(encoding="utf-8"))
    return [_case(row) for row in (*data["cases"], *data["welcome"])]


def _case(row: dict[str, Any]) -> BadRequest:
    fields = dict(row)
    fields["replaced"] = fields.pop("with", fields.pop("body", {}))
    fields["without"] = tuple(fields.get("without", ()))
    fields.setdefault("shape", "anthropic" if fields["to"] == "messages" else "openai")
    return BadRequest(**fields)
