"""How long may a request be by the model's positions, and can they be stretched?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayserve.errors import SpecError
from rayserve.planner.profile import MROPE, PER_KIND, ModelProfile
from rayserve.planner.support.rope import check_rope_types
from rayserve.spec import ClusterSpec

IRREPLACEABLE = (MROPE, PER_KIND)
"""What no scaling can take the place of: sections of three dimensions, and one base for each kind."""
REPLACED = (
    "rope_scaling ({kind}) takes the place of {own}, which the checkpoint was trained with: answers to "
    "prompts of up to {most:,} tokens change too. Compare their quality before you rely on it."
)


def longest(spec: ClusterSpec, profile: ModelProfile) -> int:
    """The longest context that the model's positions allow, in tokens."""
    rope = spec.rope_scaling
    if rope is None:
        return profile.max_position
    return int(rope.original_max_position_embeddings * rope.factor)


def stretched(spec: ClusterSpec, profile: ModelProfile) -> str:
    """How `rope_scaling` would lengthen the context, as the end of a remedy; empty: it cannot."""
    if spec.rope_scaling is not None:
        return ", or raise the factor of `rope_scaling`"
    if not profile.rope_theta or profile.rope_scaling:
        return ""
    return ", or stretch the model with `rope_scaling`"


def check_rope(spec: ClusterSpec, profile: ModelProfile, config: Mapping[str, Any]) -> None:
    """Does `rope_scaling` lengthen the context, and does it leave the model's rotary positions whole?

    vLLM replaces the mapping of config.json as a whole; without `rope_scaling`, it must know that.

    Raises:
        SpecError: it shortens the context, or takes away what the attention needs.
    """
    rope, own = spec.rope_scaling, profile.rope_scaling
    if rope is None:
        if not spec.env.get("VLLM_PLUGINS"):  # which may bring types of their own
            check_rope_types(config, spec.where("model", "config"))
        return
    if not profile.rope_theta:
        raise SpecError(
            "`rope_theta` in the model's config.json, to scale its positions",
            found="nothing",
            do="remove rope_scaling; this model has no rotary positions to stretch",
            where=spec.where("rope_scaling"),
        )
    length, trained = longest(spec, profile), rope.original_max_position_embeddings
    if trained > profile.max_position and own not in IRREPLACEABLE:
        raise SpecError(
            f"at most {profile.max_position} trained positions, those of the model's config.json",
            found=str(trained),
            do=f"write {profile.max_position}",
            where=spec.where("rope_scaling", "original_max_position_embeddings"),
        )
    if own in IRREPLACEABLE:
        needed = "`rope_scaling` only for a model whose rotary positions are of one kind"
    elif length < profile.max_position or (own and length == profile.max_position):
        needed = f"`rope_scaling` to more than the model's own {profile.max_position:,} positions"
    else:
        return
    over = f", over {own} in config.json" if own else ""
    raise SpecError(
        needed,
        found=f"{rope.rope_type} of {rope.original_max_position_embeddings:,} positions by "
        f"{rope.factor:g}: {length:,}{over}",
        do=f"remove rope_scaling; the model has {profile.max_position:,} positions without it",
        where=spec.where("rope_scaling"),
    )


def rope_notes(spec: ClusterSpec, profile: ModelProfile) -> list[str]:
    """That a stretch takes the place of the scaling that the checkpoint was trained with."""
    if spec.rope_scaling is None or not profile.rope_scaling:
        return []
    return [
        REPLACED.format(
            kind=spec.rope_scaling.rope_type, own=profile.rope_scaling, most=profile.max_position
        )
    ]


def rope_overrides(spec: ClusterSpec, profile: ModelProfile) -> dict[str, Any]:
    """vLLM's `hf_overrides` for `rope_scaling`, which `check_rope` has judged; empty: none."""
    rope = spec.rope_scaling
    if rope is None:
        return {}
    # vLLM multiplies the length of the config by the factor, but for YaRN it takes it as stretched.
    trained = rope.original_max_position_embeddings
    length = int(trained * rope.factor) if rope.rope_type == "yarn" else trained
    overrides = {
        "max_position_embeddings": length,
        # The whole mapping is replaced, so the base frequency must be told again.
        "rope_parameters": {**rope.model_dump(), "rope_theta": profile.rope_theta},
    }
    return {"text_config": overrides} if profile.nested else overrides
