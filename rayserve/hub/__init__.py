"""What does a model hub hold of a checkpoint, and at which commit?

Only the small files are fetched: config.json, a quantization config, an index, headers of the weights.
huggingface_hub does it, so that an id means here what it means to vLLM: HF_ENDPOINT, HF_TOKEN and the
token file, HF_HOME, HF_HUB_OFFLINE, and its cache on this machine, which is asked first. This package
adds bounds of size and time, and errors of ours (ADR 0056). Importing it takes about a second: only a
plan that needs it does.
"""

from __future__ import annotations

from rayserve.hub.fetch import Hub, Snapshot

__all__ = ["Hub", "Snapshot"]
