"""Which weights are served, and which others of the same model are compared with them?"""

from __future__ import annotations

from pydantic import Field

from rayserve.spec.base import HF_ID, ModelName, OptionalPath, Section


class Checkpoint(Section):
    """Weights in one format. Either `path` or `hf_id`."""

    path: OptionalPath = ""
    """Folder of the checkpoint on every host; local profile: may be relative to cluster.yml."""
    hf_id: str = Field(default="", pattern=HF_ID)
    """Hugging Face id, `organisation/name`; pinned by `revision`."""
    revision: str = ""
    """Commit of `hf_id`, so that every host loads the same weights. Where the plan fetches `config`, a
    branch or tag will do: the plan names its commit."""
    config: str = ""
    """config.json of the checkpoint, relative to cluster.yml: the plan needs no download. Required
    beside `path`; empty beside `hf_id`: fetched from the hub, or its cache on this machine."""
    checkpoint_bytes: int = Field(default=0, ge=0)
    """Sum of the checkpoint's tensor sizes in bytes, for an architecture that the planner does not know
    and where the headers of its files cannot be read; 0: not told."""


class Candidate(Checkpoint):
    """Another checkpoint of the same model, such as one in 8 bits. Either `path` or `hf_id`."""

    name: ModelName
    """Short name in the table, such as `w4a16`; `model` is the one that `model` itself names."""


class Model(Checkpoint):
    """The model to serve: `path` or `hf_id`; or neither, and the planner picks one of `candidates`."""

    served_name: ModelName
    """The name that clients put in `model`."""
    candidates: list[Candidate] = []
    """Checkpoints of this model in other formats, at most 16. `rayserve plan --candidates` ranks them
    (docs/candidates.md). With neither `path` nor `hf_id` here, the best-ranked that fits is served."""
    accuracy_weight: float = Field(default=10, ge=0, le=100)
    """How much slower an answer may be, in percent, to keep one percent more of the model's accuracy,
    when candidates are ranked; 0: only speed counts."""
