"""Do the served checkpoint and the candidates name weights that can be served and compared?"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rayserve.documents import Loc, dotted
from rayserve.spec.base import COMMIT
from rayserve.spec.checkpoint import Checkpoint
from rayserve.spec.model import ClusterSpec
from rayserve.spec.placeholders import unfilled
from rayserve.spec.problem import CLOUD_SCHEMES, Problem

MOST_CANDIDATES = 16
WEIGHTS = (
    "path (a folder on every host)",
    "hf_id (organisation/name)",
    "candidates (the plan picks)",
)
"""What a model may be named by."""
SERVED = "model"
"""Name in the table of the checkpoint that `model` itself names."""


def picks(spec: ClusterSpec) -> bool:
    """Whether the planner is to choose the checkpoint."""
    return bool(spec.model.candidates) and not spec.model.path and not spec.model.hf_id


def model_rule(spec: ClusterSpec) -> Iterator[Problem]:
    """The checkpoint that `model` itself names, or none beside candidates."""
    model, at = spec.model, ("model",)
    if picks(spec):
        for key in ("config", "revision", "checkpoint_bytes"):
            if getattr(model, key):
                yield Problem(
                    (*at, key),
                    f"no `model.{key}` where the planner picks one of model.candidates",
                    str(getattr(model, key)),
                    "move it to its candidate, or name the checkpoint to serve in model.path",
                )
        return
    yield from _weights(spec, model, at)


def candidates_rule(spec: ClusterSpec) -> Iterator[Problem]:
    """Candidates: each names its weights, and nothing else in the spec is about one format alone."""
    candidates = spec.model.candidates
    at: Loc = ("model", "candidates")
    if not candidates:
        return
    if len(candidates) > MOST_CANDIDATES:
        yield Problem(
            at,
            f"at most {MOST_CANDIDATES} candidates",
            str(len(candidates)),
            "keep one checkpoint of each format",
        )
    taken = [SERVED]
    for index, candidate in enumerate(candidates):
        if candidate.name in taken:
            yield Problem(
                (*at, index, "name"),
                "a name that is not taken",
                f"`{candidate.name}`, the checkpoint of `model` itself"
                if candidate.name == SERVED
                else f"`{candidate.name}` again",
                "rename the candidate",
            )
        taken.append(candidate.name)
        yield from _weights(spec, candidate, (*at, index))
    for key in ("quantization", "weight_bits"):
        value = getattr(spec.precision, key)
        if value != "auto":
            yield Problem(
                ("precision", key),
                f"`{key}: auto` beside model.candidates, whose formats differ",
                str(value),
                "remove it; each config.json says how its weights are kept",
            )


def _weights(spec: ClusterSpec, checkpoint: Checkpoint, at: Loc) -> Iterator[Problem]:
    """Exactly one place of the weights, and one that every host reads the same from."""
    name = dotted(at)
    if bool(checkpoint.path) == bool(checkpoint.hf_id):
        yield Problem(
            at,
            f"either `{name}.path` or `{name}.hf_id`",
            "both" if checkpoint.path else "neither",
            "keep one; a folder on every host (`path`) loads fastest"
            if checkpoint.path
            else f"write one of: {', '.join(WEIGHTS if at == ('model',) else WEIGHTS[:2])}",
        )
    if checkpoint.path.startswith(CLOUD_SCHEMES):
        yield Problem(
            (*at, "path"),
            "a folder on every host's disk",
            checkpoint.path,
            "stage the weights there first, and write the folder",
        )
    if checkpoint.revision and checkpoint.path:
        yield Problem(
            (*at, "revision"),
            "`revision` only with `hf_id`",
            f"path: {checkpoint.path}",
            "remove `revision`; a folder has none",
        )
    if not checkpoint.config and not checkpoint.hf_id:
        yield Problem(
            (*at, "config"),
            f"`{name}.config`, the checkpoint's config.json",
            "nothing",
            "add its path, relative to cluster.yml; the plan needs no other file",
        )
    if checkpoint.hf_id and not checkpoint.revision and spec.profile == "production":
        yield Problem(
            (*at, "hf_id"),
            f"`{name}.revision` beside hf_id in production",
            "nothing",
            "add the commit hash, so that every host loads the same weights",
        )
    yield from revision_form((*at, "revision"), checkpoint.revision)
    if checkpoint.hf_id and checkpoint.config and moving(spec, checkpoint.revision):
        yield Problem(
            (*at, "revision"),
            f"a commit of 40 hexadecimal digits beside `{name}.config` in production: only a plan that "
            "fetches config.json itself pins a branch",
            checkpoint.revision,
            f"write the commit that {checkpoint.config} is of, or remove `config`",
        )


def revision_form(at: Loc, revision: str) -> Iterator[Problem]:
    """A revision without blanks, and a commit in the letters that a hub knows it by."""
    plain = revision.strip()
    if COMMIT.fullmatch(plain.lower()):
        plain = plain.lower()
    if unfilled(revision) or (revision == plain and not re.search(r"\s", revision)):
        return
    one = plain and not re.search(r"\s", plain)
    yield Problem(
        at,
        "a branch, tag or commit: without blanks, a commit in lower-case letters",
        repr(revision),
        f"write {plain}" if one else "write the commit's 40 hexadecimal digits",
    )


def moving(spec: ClusterSpec, revision: str) -> bool:
    """Whether a revision of production may come to name other weights: a branch, tag or short hash."""
    told = bool(revision) and not unfilled(revision)
    return spec.profile == "production" and told and not COMMIT.fullmatch(revision)
