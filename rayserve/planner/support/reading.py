"""What do a model's own files say, and are they what they claim to be?

Pure checks over bytes: whoever reads a file asks `check_size` first, then hands the bytes over. A
file may come from anywhere, so time and memory are bounded by its size, every fault is one of our
errors, and nothing in it is believed twice: a figure that is no plain, possible number is refused
here, before it is multiplied.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from rayserve.documents import brief
from rayserve.engine.models import COPY
from rayserve.errors import SpecError, Where
from rayserve.planner.support.figures import check_figures
from rayserve.units import MIB

MAX_CONFIG_BYTES = 4 * MIB
"""A config.json has some KiB; those that list every layer or label, some hundred."""
MAX_INDEX_BYTES = 32 * MIB
"""An index of 140 000 tensors, a trillion parameters in experts, has 14 MB."""
MAX_NAME = 255
"""Bytes of a file's name on Linux (NAME_MAX)."""
MAX_DEPTH = 32
_HOLDS = (dict, list)  # `dict | list` would be built anew for each of a million values
AS_IT_IS = COPY.format(file="it")


@dataclass(frozen=True)
class Index:
    """The content of model.safetensors.index.json."""

    files: Mapping[str, str]
    """File of each tensor."""
    total_size: int | None
    """What it claims as the sum of sizes, in bytes. Some are wrong by a factor of two: for messages
    alone, never for sums."""


def check_size(size_bytes: int, most: int, where: Where, *, do: str = "") -> None:
    """Refuse a file before it is read; `do`: what to do about one that is too large.

    Raises:
        SpecError: it is empty, or larger than such a file can be.
    """
    if size_bytes > most:
        raise _error(
            f"a file of at most {most // MIB} MiB",
            f"{size_bytes / MIB:.0f} MiB",
            where,
            do=do or "name the right file: weights and other data have no place in it",
        )
    if size_bytes <= 0:
        raise _error("a JSON object", "an empty file", where)


def parse_config(data: bytes, where: Where) -> Mapping[str, Any]:
    """The content of a config.json whose figures are possible and that generates text.

    A key that is null counts as absent and is left out. Which families are known is not judged.

    Raises:
        SpecError: it is not JSON as Hugging Face writes it, is no such model's, or a figure in it is
            not a possible number.
    """
    check_size(len(data), MAX_CONFIG_BYTES, where)
    config = _without_nulls(parse_object(data, where))
    _check_kind(config, where)
    check_figures(config, where)
    return config


def parse_index(data: bytes, where: Where) -> Index:
    """The content of a model.safetensors.index.json.

    Raises:
        SpecError: it is no such index, or names files elsewhere.
    """
    check_size(len(data), MAX_INDEX_BYTES, where)
    raw = parse_object(data, where)
    files = raw.get("weight_map")
    if not isinstance(files, Mapping) or not files:
        found = "none" if files is None else f"{brief(files)}"
        raise _error("`weight_map`, which names the file of each tensor", found, where)
    for tensor, file in files.items():
        plain = isinstance(file, str) and file.endswith(".safetensors") and file.isprintable()
        if not plain or "/" in file or "\\" in file or len(file) > MAX_NAME:
            raise _error(
                f"plain names of .safetensors files beside the index, of at most {MAX_NAME} characters",
                f"{brief(file)} for {brief(tensor)}",
                where,
            )
    metadata = raw.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    return Index(files, _claimed_bytes(total))


def _claimed_bytes(total: object) -> int | None:
    if isinstance(total, bool) or not isinstance(total, int | float):
        return None
    return int(total) if math.isfinite(total) and total >= 0 else None


def parse_object(data: bytes, where: Where) -> dict[str, Any]:
    """A JSON object, strictly: UTF-8 without a mark, no key twice, no NaN, bounded depth.

    Raises:
        SpecError: it is anything else.
    """
    text = _decode(data, where)
    if not text.strip():
        raise _error("a JSON object", "an empty file", where)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_no_duplicates,
            parse_constant=_constant,
            parse_int=_whole,
            parse_float=_real,
        )
    except json.JSONDecodeError as error:
        place = Where(where.path, error.lineno)
        state = "the file ends early" if error.pos >= len(text.rstrip()) else error.msg
        raise _error("JSON", f"{state}, column {error.colno}", place) from None
    except _RefusedError as error:
        raise _error(error.needed, error.found, where) from None
    except RecursionError:
        raise _error(f"at most {MAX_DEPTH} levels", "hundreds", where) from None
    if not isinstance(value, dict):
        kinds: dict[type, str] = {list: "a list", str: "text"}
        kind = kinds.get(type(value), "a single value")
        raise _error("a JSON object", kind, where)
    _check_depth(value, where)
    return value


class _RefusedError(Exception):
    """What a hook of the JSON parser found; it knows no place."""

    def __init__(self, needed: str, found: str) -> None:
        self.needed, self.found = needed, found
        super().__init__(needed)


def _error(needed: str, found: str, where: Where, *, do: str = AS_IT_IS) -> SpecError:
    return SpecError(needed, found=found[:200], do=do, where=where)


def _decode(data: bytes, where: Where) -> str:
    marks = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\xef\xbb\xbf": "a byte-order mark"}
    mark = next((name for begin, name in marks.items() if data.startswith(begin)), "")
    if mark:
        raise _error("UTF-8 without a byte-order mark", mark, where, do="save it as plain UTF-8")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte {error.object[error.start]:#04x} at offset {error.start}"
        raise _error("UTF-8", found, where, do="save it as plain UTF-8") from None
    if "\0" in text:
        raise _error("text", "a NUL byte", where)
    return text


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen and seen[key] != value:
                raise _RefusedError(f"{brief(key)} once", "it again, with another value")
            seen[key] = value
    return out


def _constant(name: str) -> float:
    if name == "NaN":
        raise _RefusedError("numbers", "NaN")
    return math.inf if name == "Infinity" else -math.inf


def _whole(text: str) -> int:
    if len(text) > 20:
        raise _RefusedError("whole numbers of at most 19 digits", f"one of {len(text)} digits")
    return int(text)


def _real(text: str) -> float:
    if len(text) > 40:
        raise _RefusedError("numbers of at most 40 digits", f"one of {len(text)}")
    return float(text)


def _check_depth(value: object, where: Where) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inside = (part.values() if isinstance(part, dict) else part for part in level)
        level = [item for items in inside for item in items if isinstance(item, _HOLDS)]
        if not level:
            return
    raise _error(f"at most {MAX_DEPTH} levels", "more", where)


def _without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_nulls(item) if isinstance(item, dict) else item
        for key, item in value.items()
        if item is not None
    }


# ── what the file is of ───────────────────────────────────────────────────────────────────────────
OTHER_FILES = {
    "_diffusers_version": "an image model's pipeline",
    "peft_type": "a LoRA adapter",
    "tokenizer_class": "a tokenizer",
    "added_tokens_decoder": "a tokenizer",
    "image_processor_type": "an image processor",
    "weight_map": "an index of tensors",
}
"""Keys that give another kind of file away, where no architecture is named."""
WRITERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""What names of classes that write text usually end with."""
NO_TEXT = {
    "MaskedLM": "an encoder, which fills gaps",
    "SequenceClassification": "a classifier",
    "TokenClassification": "a classifier of tokens",
    "QuestionAnswering": "an extractor of answers",
    "ImageClassification": "an image classifier",
    "ObjectDetection": "an object detector",
    "SemanticSegmentation": "an image segmenter",
    "CTC": "a speech recogniser",
    "AudioClassification": "an audio classifier",
    "RewardModel": "a reward model",
}
ENCODERS = {
    "bert", "roberta", "xlm-roberta", "distilbert", "electra", "deberta", "deberta-v2", "modernbert",
    "nomic_bert", "albert", "mpnet",
}  # fmt: skip
"""Model types that embed or classify, and never write."""
SEERS = {
    "vit": "an image model", "clip": "an image model", "siglip": "an image model",
    "dinov2": "an image model", "sam": "an image model", "swin": "an image model",
    "whisper": "a speech model", "wav2vec2": "a speech model", "hubert": "a speech model",
    "t5": "an encoder and decoder", "mt5": "an encoder and decoder",
}  # fmt: skip
GENERATES = "the config.json of a model that answers in text"


def _check_kind(config: Mapping[str, Any], where: Where) -> None:
    names = config.get("architectures")
    if names is not None and (
        not isinstance(names, list) or not all(isinstance(name, str) for name in names)
    ):
        raise _error("`architectures` as a list of names", brief(names), where)
    if not names:
        for key, thing in OTHER_FILES.items():
            if key in config:
                _refuse_kind(f"the file of {thing}", where)
    kind = config.get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise _error("`model_type` as text", brief(kind), where)
    for name in names or ():
        task = next((what for part, what in NO_TEXT.items() if name.endswith(part)), "")
        if task:
            _refuse_kind(f"{brief(name)}, {task}", where)
    writes = any(name.endswith(WRITERS) for name in names or ())
    if kind in SEERS:
        _refuse_kind(f"`{kind}`, {SEERS[kind]}", where)
    if kind in ENCODERS and not writes:
        _refuse_kind(f"`{kind}`, an encoder", where)
    if not names and kind is None and "num_hidden_layers" not in config:
        _refuse_kind("neither `architectures` nor `model_type`", where)
    if "text_config" in config and not isinstance(config["text_config"], Mapping):
        raise _error("`text_config` as an object", brief(config["text_config"]), where)


def _refuse_kind(found: str, where: Where) -> NoReturn:
    raise _error(GENERATES, found, where, do="name the config.json in the checkpoint's own folder")
