"""Which keys of a spec ask for what the plan neither checked nor counted, or for less than they seem to?"""

from __future__ import annotations

from rayserve.plan import Placement
from rayserve.spec import ClusterSpec, serving_pool

UNCOUNTED_GUESSES = (
    "What speculative.method {method} saves is not counted: it depends on how many guesses the model takes, "
    "so measure it."
)
UNPROVEN_HOSTS = "No engine has run across hosts in this project's tests, only the placement: try it before you rely on it."
UNCHECKED_MEMORY = "Whether each host holds kv_offload.cpu_gib was not checked against {missing}, which the pool does not give."
SHORTER_ANSWERS = (
    "door.max_tokens ({asked:,}) is above max_model_len ({length:,}), which prompt and answer share: "
    "no answer is that long."
)
SHORTER_WORKLOAD = (
    "The expected request ({asked:,} tokens where `workload` is left out) is longer than max_model_len "
    "({length:,}): figures are for a shorter one. Write `workload`."
)


def cautions(spec: ClusterSpec, placement: Placement, length: int) -> list[str]:
    """Notes on what a reader might take for checked or counted.

    Args:
        spec: what the person wants.
        placement: of a replica.
        length: max_model_len that was chosen, in tokens.
    """
    notes = []
    if spec.speculative is not None:
        notes.append(UNCOUNTED_GUESSES.format(method=spec.speculative.method))
    if placement.executor == "ray":
        notes.append(UNPROVEN_HOSTS)
    pool = serving_pool(spec)
    missing = [key for key in ("memory_gib", "shm_gib") if not getattr(pool, key)]
    if spec.kv_offload.cpu_gib and missing:
        notes.append(UNCHECKED_MEMORY.format(missing=" and ".join(missing)))
    most = spec.door.max_tokens
    if isinstance(most, int) and most > length:
        notes.append(SHORTER_ANSWERS.format(asked=most, length=length))
    asked = spec.workload.prompt_tokens + spec.workload.output_tokens
    if asked > length and "workload" not in spec.model_fields_set:
        notes.append(SHORTER_WORKLOAD.format(asked=asked, length=length))
    return notes
