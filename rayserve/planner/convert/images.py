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
UNREAD = {"wrong_value", "not_seen", "ambiguous"}
"""Findings of a value that was left out as a whole, beside which no more is to tell."""
SOURCE = f"vllm/config/multimodal.py of {VLLM_VERSION}"
MOST = 999
"""Items of a kind in one request where vLLM is told no number (BaseDummyOptions, get_limit_per_prompt)."""
WRITE = f"write `{KEY}`: the most images that one request may bring"


def _limit(draft: Draft, setting: Setting) -> None:
    """Carry the number of images; leave out, and tell, what is no number of images."""
    paired = setting.tree is None and "=" in setting.text and not setting.text.startswith("{")
    limits = _pairs(setting.text) if paired else mapping(setting)
    counts = {name: _count(value) for name, value in limits.items()}
    sizes = _sizes(limits.get("image"))
    if paired:
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
            "serve sound and video by another way",
        )


def _pairs(text: str) -> dict[str, Any]:
    """The form of earlier releases: image=4,video=1."""
    pairs = [item.partition("=") for item in text.split(",")]
    return {name.strip(): whole(count, human=False) for name, _, count in pairs}


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
    """Tell where the command line lets requests bring images, and the cluster.yml none."""
    setting = draft.given.get(FLAG)
    if draft.get("engine_args.language_model_only") is True:
        _undone(draft)
        return
    kinds = _kinds(draft.context.config)
    if draft.get(KEY) is not None or (kinds is None and setting is None) or kinds == "":
        return
    if setting is not None and any(
        item.flag == setting.written and item.kind in UNREAD for item in draft.findings
    ):
        return
    version = draft.context.version
    known = version is None or version == Version.parse(VLLM_VERSION)
    allowed = (
        f"vLLM {VLLM_VERSION} allows {MOST} of each kind where no number is written, or as many as the model takes"
        if known
        else f"what vLLM {version} allows where no number is written is not known here"
    )
    seen = kinds != "sound"
    what = "images" if seen else "sound"
    draft.find(
        "warning",
        "not_the_same",
        setting if setting is not None else "",
        f"the plan serves no {what}; "
        + (
            f"{setting.written} gives no number of them"
            if setting is not None
            else f"the model takes {what}, and the command line gives no number of them"
        ),
        why=f"{allowed}; `{KEY}` is 0 where it is missing",
        do=WRITE if seen else "serve sound and video by another way",
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


def _kinds(config: Mapping[str, Any]) -> str | None:
    """`images`, `sound` or empty, as the plan reads config.json; None where it is not known."""
    if not config:
        return None
    try:
        profile = read_profile(config, Where("config.json"))
    except SpecError:
        return None  # the plan says what is wrong with it
    if not profile.multimodal:
        return ""
    sound = isinstance(config.get("audio_config"), Mapping)
    return "sound" if sound and not isinstance(config.get("vision_config"), Mapping) else "images"


HANDLERS: dict[str, Handler] = {FLAG: _limit}
"""The flag that is read here."""
