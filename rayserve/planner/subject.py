"""Which model is planned? The spec and the content of config.json, brought together."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import Any

from rayserve.engine import check_served
from rayserve.errors import SpecError, Where
from rayserve.planner.profile import TYPE_BITS, ModelProfile, read_profile, scaled_bits
from rayserve.planner.support.schemes import contradicted
from rayserve.planner.weights.architecture import Architecture, read_architecture
from rayserve.planner.weights.facts import Facts, UnknownModelError
from rayserve.spec import ClusterSpec

GUESSING = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
"""Keys of config.json that count the layers that guess."""
GUESSERS = frozenset({"MiMoForCausalLM", "Ernie4_5_MoeForCausalLM", "NemotronHForCausalLM"})
"""Families with such layers in vLLM, of which the planner has no shapes."""


def read_model_profile(
    spec: ClusterSpec,
    model_config: Mapping[str, Any] | None,
    draft_config: Mapping[str, Any] | None,
) -> ModelProfile:
    """The model's figures, with what the spec says otherwise.

    Raises:
        SpecError: config.json is missing, or a figure in it cannot be.
    """
    where = spec.where("model", "config")
    if model_config is None:
        raise SpecError(
            "the model's config.json",
            found=f"no file at {_located(spec.model.config, where)}",
            do="copy it from the checkpoint; the path is relative to cluster.yml",
            where=where,
        )
    profile = read_profile(model_config, where)
    changes: dict[str, Any] = {}
    if spec.precision.dtype != "auto":
        changes["dtype_bits"] = TYPE_BITS[spec.precision.dtype]
        if not profile.quantization:
            changes["weight_bits"] = changes["dtype_bits"]
    bits = spec.precision.weight_bits
    if bits != "auto":
        changes["weight_bits"] = scaled_bits(bits, 128 if bits == 4 else 0)
    elif spec.precision.quantization != "auto" and not profile.quantization:
        changes["weight_bits"] = 4 if "4" in spec.precision.quantization else 8
    if spec.speculative is not None and (spec.speculative.config or draft_config is not None):
        changes["draft"] = _draft(spec, draft_config)
    return _replace(profile, changes)


def check_method(spec: ClusterSpec, profile: ModelProfile) -> None:
    """The method that the spec asks for must be that of the checkpoint, where it has one.

    Raises:
        SpecError: it is another.
    """
    asked = spec.precision.quantization
    if asked != "auto" and contradicted(profile.quantization, asked):
        raise SpecError(
            "the checkpoint's own method of quantization",
            found=f"{asked}, and a config.json of {profile.quantization}",
            do="write auto: vLLM reads the method from config.json",
            where=spec.where("precision", "quantization"),
        )


def check_guess(
    spec: ClusterSpec, architecture: Architecture | None, config: Mapping[str, Any]
) -> None:
    """Layers of the model's own that guess (method mtp) must be there, as vLLM asks
    (config/speculative.py: hf_config_override, and the end of __post_init__).

    Raises:
        SpecError: they are not, or the tokens are no multiple of them.
    """
    guess = spec.speculative
    if guess is None or guess.method != "mtp" or architecture is None:
        return
    inner = config.get("text_config")
    text = {**config, **inner} if isinstance(inner, Mapping) else config
    given = next((text[key] for key in GUESSING if isinstance(text.get(key), int)), None)
    layers = given if given is not None else len(architecture.draft)
    if layers < 1 or not (architecture.draft or architecture.name in GUESSERS):
        raise SpecError(
            "a model with layers that guess, for method mtp",
            found=f"{architecture.name}, and {_guessing(text)}",
            do="remove `speculative`, or write `method: ngram`, which needs no weights",
            where=spec.where("speculative", "method"),
        )
    if given is not None and guess.num_tokens > layers and guess.num_tokens % layers:
        raise SpecError(
            f"num_tokens of at most {layers}, the layers that guess, or a multiple of them",
            found=str(guess.num_tokens),
            do=f"write {guess.num_tokens // layers * layers}",
            where=spec.where("speculative", "num_tokens"),
        )


def _guessing(text: Mapping[str, Any]) -> str:
    """What config.json says of layers that guess."""
    said = [f"{key}: {text[key]}" for key in GUESSING if key in text]
    return f"`{said[0]}` in config.json"[:80] if said else f"no `{GUESSING[-1]}` in config.json"


def known_architecture(
    spec: ClusterSpec, profile: ModelProfile, model_config: Mapping[str, Any] | None
) -> Architecture | None:
    """The model layer by layer; None where its architecture or weight format is not known."""
    wanted = spec.precision.quantization
    try:
        return read_architecture(
            model_config or {},
            spec.where("model", "config"),
            dtype=spec.precision.dtype,
            quantization=wanted if wanted != "auto" and not profile.quantization else "",
        )
    except UnknownModelError:
        return None


def served_notes(spec: ClusterSpec, model_config: Mapping[str, Any] | None) -> list[str]:
    """What should be known of how vLLM serves the model, for the plan's notes.

    Raises:
        SpecError: it does not serve it as a model that writes text.
    """
    if model_config is None:
        return []
    where = spec.where("model", "config")
    note = check_served(
        Facts(model_config, where).words("architectures"),
        where,
        implementation=str(spec.engine_args.get("model_impl", "auto")),
        plugins=bool(spec.env.get("VLLM_PLUGINS")),
    )
    return [note] if note else []


def _located(written: str, where: Where) -> str:
    """A path beside cluster.yml as it is written, and where that is."""
    found = posixpath.normpath(posixpath.join(posixpath.dirname(where.path), written))
    return written if found == posixpath.normpath(written) else f"{written}, which is {found}"


def _draft(spec: ClusterSpec, draft_config: Mapping[str, Any] | None) -> ModelProfile:
    written = spec.speculative is not None and bool(spec.speculative.config)
    where = spec.where("speculative", "config" if written else "model")
    if draft_config is None:
        raise SpecError(
            "the draft model's config.json",
            found=f"no file at {_located(spec.speculative.config, where)}"
            if spec.speculative is not None and written
            else "no such file",
            do="copy it from the draft model; the path is relative to cluster.yml",
            where=where,
        )
    return read_profile(draft_config, where)


def _replace(profile: ModelProfile, changes: Mapping[str, Any]) -> ModelProfile:
    return ModelProfile(**{**vars(profile), **changes})


def unused_keys(spec: ClusterSpec, architecture: Architecture | None) -> list[str]:
    """Keys that only help where the architecture is not known."""
    if architecture is None:
        return []
    given = {
        "model.checkpoint_bytes": bool(spec.model.checkpoint_bytes),
        "precision.weight_bits": spec.precision.weight_bits != "auto",
    }
    return [
        f"{key} is not used: {architecture.name} is known, tensor by tensor."
        for key, is_given in given.items()
        if is_given
    ]
