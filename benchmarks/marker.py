"""Which prompt crashes a worker that has `crash_marker` in it? Apart, since that one needs vLLM."""

from __future__ import annotations

MARKER = [7] * 8
"""Token ids."""
