"""Does a cluster.yml serve the images that its command line let requests bring, or is it told?"""

from __future__ import annotations

import json
from typing import Any

import pytest

from rayserve.planner.convert import Conversion, Finding, convert
from tests.bad_specs import CONFIG
from tests.unit.converted import at, kinds, spec_of

TEXT: dict[str, Any] = json.loads(CONFIG.read_text(encoding="utf-8"))
SEES = {**TEXT, "vision_config": {"hidden_size": 64}}
HEARS = {**TEXT, "audio_config": {"hidden_size": 64}}
SILENT = "the plan serves no images"
KEY = "limits.max_images"


def converted(flags: str, version: str = "0.32.0", config: Any = None) -> Conversion:
    """What a command line with these flags becomes."""
    return convert(f"vllm serve /srv/m {flags}", version=version, config=config)


def silent(found: Conversion) -> list[Finding]:
    """The findings that the plan serves no images."""
    return [item for item in found.findings if item.what.startswith(SILENT)]


@pytest.mark.parametrize(
    "flags",
    [
        """--limit-mm-per-prompt '{"image": {"width": 512}}'""",
        """--limit-mm-per-prompt '{"video": 1}'""",
        "--limit-mm-per-prompt '{}'",
        "--limit-mm-per-prompt.image.width 512",
        "",
    ],
)
def test_no_number_of_images_is_told(flags):
    """Where vLLM allows any number, the file holds none, and the finding names the key that does."""
    found = converted(flags, config=SEES)
    assert at(spec_of(found.cluster_yml), KEY) is None
    (told,) = silent(found)
    assert (told.severity, told.kind, told.certainty) == ("warning", "not_the_same", "read")
    assert "999" in told.why
    assert KEY in told.do
    assert told.flag.startswith("--limit-mm-per-prompt" if flags else "")


@pytest.mark.parametrize("flags", ["--limit-mm-per-prompt '{}'", ""])
def test_an_unread_default_is_not_claimed(flags):
    """Of a release whose default was not read the finding says that it is not known."""
    (told,) = silent(converted(flags, version="0.8.5", config=SEES))
    assert "999" not in told.why
    assert "what vLLM 0.8.5 allows where no number is written is not known" in told.why
    assert told.certainty == ""


@pytest.mark.parametrize(
    "flags, config",
    [
        ("", None),
        ("", TEXT),
        ("--limit-mm-per-prompt '{}'", TEXT),
        ("""--limit-mm-per-prompt '{"image": 0}'""", SEES),
        ("""--limit-mm-per-prompt '{"image": 3}'""", SEES),
        ("--language-model-only", SEES),
    ],
)
def test_what_is_the_same_is_not_told(flags, config):
    """A text model, a written number and an engine for text alone need no finding."""
    assert silent(converted(flags, config=config)) == []


@pytest.mark.parametrize(
    "flags, config, what",
    [
        ("", HEARS, "no sound"),
        ("", {**SEES, "video_token_id": 7}, "no images and no video"),
        ("""--limit-mm-per-prompt '{"image": 3}'""", {**SEES, "video_token_id": 7}, "no video"),
        ("""--limit-mm-per-prompt '{"image": 3, "video": 0}'""", {**SEES, **HEARS}, "no sound"),
    ],
)
def test_each_kind_that_the_model_takes_is_told(flags, config, what):
    """What config.json shows the model to take, and no number is written of, is told by its name."""
    found = converted(flags, config=config)
    (told,) = [item for item in found.findings if item.what.startswith("the plan serves")]
    assert told.what.startswith(f"the plan serves {what};")
    assert (KEY in told.do) is ("images" in what)


def test_the_size_of_an_image_is_told():
    """The number is carried, and the size beside it is told to be left out."""
    found = converted(
        """--limit-mm-per-prompt '{"image": {"count": 2, "width": 9, "height": 9}}'"""
    )
    assert at(spec_of(found.cluster_yml), KEY) == 2
    assert any("height and width of image" in item.what for item in found.findings)
    assert silent(found) == []


@pytest.mark.parametrize(
    "value",
    [
        '{"image": {"depth": 2}}',
        '{"image": {"count": {}}}',
        '{"image": null}',
        '{"image": true}',
        '{"image": -1}',
        "image=x",
        "",
    ],
)
def test_what_is_no_number_of_images_is_refused(value):
    """An option that an image does not have, and what is no number, are wrong values."""
    found = converted(f"--limit-mm-per-prompt '{value}'")
    assert "wrong_value --limit-mm-per-prompt" in kinds(found)
    assert at(spec_of(found.cluster_yml), KEY) is None
    assert silent(found) == []


@pytest.mark.parametrize(
    "version, severity, piece",
    [
        ("0.32.0", "error", "JSON alone"),
        ("", "error", "JSON alone"),
        ("0.8.5", "warning", "not known"),
    ],
)
def test_pairs_are_told_to_be_no_json(version, severity, piece):
    """image=4 is carried as it is meant, and an error of the release whose parser was read."""
    found = converted("--limit-mm-per-prompt image=4", version=version)
    assert at(spec_of(found.cluster_yml), KEY) == 4
    (told,) = [item for item in found.findings if item.kind == "wrong_value"]
    assert told.severity == severity
    assert piece in told.why


def test_the_switch_of_text_alone_undoes_a_number():
    """Beside --language-model-only the number is 0, whichever of the two comes first."""
    flags = ["""--limit-mm-per-prompt '{"image": 2}'""", "--language-model-only"]
    for pair in (flags, flags[::-1]):
        found = converted(" ".join(pair))
        assert at(spec_of(found.cluster_yml), KEY) == 0
        assert "contradiction --limit-mm-per-prompt" in kinds(found)


@pytest.mark.parametrize(
    "flags, images, repeated",
    [
        ("--limit-mm-per-prompt.image 2 --limit-mm-per-prompt.image 5", 5, True),
        ("--limit-mm-per-prompt.image 2 --limit-mm-per-prompt.image.count 5", 5, True),
        ("""--limit-mm-per-prompt '{"image": 2}' --limit-mm-per-prompt.image 5""", 5, True),
        ("""--limit-mm-per-prompt.image 5 --limit-mm-per-prompt '{"image": 2}'""", 5, True),
        ("""--limit-mm-per-prompt '{"image": 2}' --limit-mm-per-prompt.video 1""", None, True),
        ("--limit-mm-per-prompt.image 5 --limit-mm-per-prompt.video 0", 5, False),
        ("--limit-mm-per-prompt.image.count 5 --limit-mm-per-prompt.image.width 9", 5, False),
    ],
)
def test_a_dotted_flag_that_replaces_is_repeated(flags, images, repeated):
    """What vLLM's parser would overwrite is told as repeated, and what it joins is not."""
    found = converted(flags)
    assert at(spec_of(found.cluster_yml), KEY) == images
    assert any(item.kind == "repeated" for item in found.findings) is repeated
