"""What the engine is doing now: counts and latencies as its own statistics report them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

WINDOW_S = 30.0
"""Time to first token is averaged over the requests of this many seconds."""


@dataclass
class EngineLoad:
    """The engine's last reported step, updated in place by the statistics hook."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    steps: int = 0
    last_step_s: float = 0.0
    """Monotonic time of the last reported step."""
    _first_tokens: deque[tuple[float, float]] = field(default_factory=deque)

    def step(self, now_s: float, running: int, waiting: int, kv_usage: float) -> None:
        """Record one scheduler step."""
        self.running = running
        self.waiting = waiting
        self.kv_usage = kv_usage
        self.steps += 1
        self.last_step_s = now_s

    def first_token(self, now_s: float, ttft_s: float) -> None:
        """Record the time to first token of one request."""
        self._first_tokens.append((now_s, ttft_s))
        self._forget(now_s)

    def ttft_ms(self, now_s: float) -> float:
        """Mean time to first token over the window, in milliseconds; 0 without a request."""
        self._forget(now_s)
        if not self._first_tokens:
            return 0.0
        return 1000.0 * sum(ttft for _, ttft in self._first_tokens) / len(self._first_tokens)

    def _forget(self, now_s: float) -> None:
        """Drop what has left the window, whether anybody asks for the mean or not."""
        while self._first_tokens and self._first_tokens[0][0] < now_s - WINDOW_S:
            self._first_tokens.popleft()
