"""How many images may a request of the command line bring, and how many one of the cluster.yml?

vLLM allows any number where none is said; `limits.max_images` is a number, and 0 where it is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayserve.engine import VLLM_VERSION
from rayserve.engine.flags import Version
from rayserve.errors import SpecError, Where
from rayserve.planner.convert.draft import BadValueError, Draft, Setting, mapping, shown, whole
from rayserve.planner.convert.keys import Handler, unsaid
from rayserve.planner.profile import read_profile

FLAG = "limit_mm_per_prompt"
KEY = "limits.max_images"
COUNT = "count"
SIZES = {"width", "height"}
SOURCE = f"vllm/config/multimodal.py of {VLLM_VERSION}"
MOST = 999
"""Items of a kind in one request where vLLM is told no number (BaseDummyOptions, get_limit_per_prompt)."""
WORDS = {"image": "images", "video": "video", "audio": "sound"}
VIDEO_TOKENS = ("video_token_id", "video_token_index")
"""Keys of config.json by which models that take video name its place in a prompt."""
ELSEWHERE = "serve sound and video by another way"
WRITE = f"write `{KEY}`: the most images that one request may bring"


def _limit(draft: Draft, setting: Setting) -> None:
    """Carry the number of images; leave out, and tell, what is no number of images."""
    counts = _counts(setting)
    sizes = _sizes(_limits(setting).get("image"))
    if _paired(setting):
        _old_form(draft, setting)
    images = counts.pop("image", None)
    if images is not None:
        draft.carry(setting, KEY, images)
    else:
        draft.leave(setting)
    if sizes:
        unsaid(
            draft,
            setting,
            f"{' and '.join(sizes)} of image in {setting.written} {'is' if len(sizes) == 1 else 'are'} left out",
            f"`{KEY}` has the number alone; vLLM {VLLM_VERSION} profiles its memory with the rest",
            "nothing, unless clients send small images alone and memory is short",
        )
    others = sorted(str(name) for name, count in counts.items() if count != 0)
    if others:
        unsaid(
            draft,
            setting,
            f"{', '.join(others)[:100]} of {setting.written} is left out",
            "the toolkit takes images alone",
            ELSEWHERE,
        )


def _paired(setting: Setting) -> bool:
    """Whether the value has the form of earlier releases: image=4,video=1."""
    return (
        setting.tree is None and "=" in setting.text and not setting.text.lstrip().startswith("{")
    )


def _limits(setting: Setting) -> dict[str, Any]:
    """What is written of each kind."""
    if not _paired(setting):
        return mapping(setting)
    pairs = [item.partition("=") for item in setting.text.split(",")]
    return {name.strip(): whole(count, human=False) for name, _, count in pairs}


def _counts(setting: Setting) -> dict[str, int | None]:
    """The number of each kind that is written; None where options are, without a number.

    Raises:
        BadValueError: vLLM would not take the value.
    """
    limits = _limits(setting)
    _sizes(limits.get("image"))
    return {str(name): _count(value) for name, value in limits.items()}


def _count(value: Any) -> int | None:
    """How many; None where options are written without a number."""
    if isinstance(value, Mapping):
        if COUNT not in value:
            return None
        value = value[COUNT]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise BadValueError("numbers of at least 0")
    return value


def _sizes(options: Any) -> list[str]:
    """The sizes that are written of an image."""
    named = options.keys() - {COUNT} if isinstance(options, Mapping) else set()
    if not named <= SIZES:  # ImageDummyOptions forbids what it does not have
        raise BadValueError("of image a number, or count, width and height")
    return sorted(named)


def _old_form(draft: Draft, setting: Setting) -> None:
    old = draft.before(VLLM_VERSION)
    draft.find(
        "warning" if old else "error",
        "wrong_value",
        setting,
        f"{setting.written} takes JSON: vLLM {VLLM_VERSION} does not start with {shown(setting)}",
        why="its parser reads the value as JSON alone"
        + (f"; whether {draft.context.version} takes it is not known here" if old else ""),
        do="on a command line write '{\"image\": 4}'; here it is read as it is meant",
        certainty="read",
        source=f"vllm/engine/arg_utils.py of {VLLM_VERSION}",
    )


def judge_images(draft: Draft) -> None:
    """Tell of which kinds vLLM lets requests bring any number, and the plan none."""
    setting = draft.given.get(FLAG)
    if draft.get("engine_args.language_model_only") is True:
        _undone(draft)
        return
    kinds = _kinds(draft.context.config)
    if setting is None and kinds is None:
        return
    try:
        counts = _counts(setting) if setting is not None else {}
    except BadValueError:
        return  # told already, and left out as a whole
    missing = [kind for kind in (("image",) if kinds is None else kinds) if kind not in counts]
    if "image" in counts and counts["image"] is None and kinds != ():
        missing.insert(0, "image")
    if missing:
        _tell_missing(draft, setting, missing)


def _tell_missing(draft: Draft, setting: Setting | None, missing: list[str]) -> None:
    version = draft.context.version
    known = version is None or version == Version.parse(VLLM_VERSION)
    reasons = [
        f"vLLM {VLLM_VERSION} allows {MOST} of each kind where no number is written, or as many as the model takes"
        if known
        else f"what vLLM {version} allows where no number is written is not known here"
    ]
    if "image" in missing:
        reasons.append(f"`{KEY}` is 0 where it is missing")
    if missing != ["image"]:
        reasons.append("the toolkit takes images alone")
    by = setting.written if setting is not None else "the command line"
    draft.find(
        "warning",
        "not_the_same",
        setting if setting is not None else "",
        f"the plan serves no {' and no '.join(WORDS[kind] for kind in missing)}; {by} gives no number",
        why="; ".join(reasons),
        do=WRITE if "image" in missing else ELSEWHERE,
        **({"certainty": "read", "source": SOURCE} if known else {}),
    )


def _undone(draft: Draft) -> None:
    """The switch that turns all limits to 0, beside a number of images."""
    images, other = draft.get(KEY), draft.given["language_model_only"]
    if not images:
        return
    draft.put(KEY, 0)
    draft.find(
        "warning",
        "contradiction",
        draft.given.get(FLAG, other),
        f"{other.written} undoes the {images} images of {draft.given[FLAG].written}",
        why="it sets the limit of every kind to 0",
        do=f"`{KEY}` is 0 here; to take images remove {other.written}, and write `{KEY}`",
        certainty="read",
        source=SOURCE,
    )


def _kinds(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """What the model takes beside text, as config.json shows it; None where that is not known."""
    if not config:
        return None
    try:
        profile = read_profile(config, Where("config.json"))
    except SpecError:
        return None  # the plan says what is wrong with it
    if not profile.multimodal:
        return ()
    hears = isinstance(config.get("audio_config"), Mapping)
    sees = not hears or isinstance(config.get("vision_config"), Mapping)
    films = any(isinstance(config.get(key), int) for key in VIDEO_TOKENS)
    shown = (("image", sees), ("video", films), ("audio", hears))
    return tuple(kind for kind, takes in shown if takes)


HANDLERS: dict[str, Handler] = {FLAG: _limit}
"""The flag that is read here."""
