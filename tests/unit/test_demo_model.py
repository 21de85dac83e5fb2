"""The demo's model: the same bytes every time, and never half a model."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import jinja2
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from rayserve.demo import model
from rayserve.errors import HostError

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model made once for the tests that only look at it."""
    return model.make_model(tmp_path_factory.mktemp("demo") / "model")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def render(messages, **more):
    """The prompt that the chat template makes, with the settings that transformers uses."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(model.CHAT_TEMPLATE)
    return template.render(messages=messages, **more)


def test_the_same_bytes_twice(made, tmp_path):
    """Two models made apart are equal to the last byte."""
    assert contents(model.make_model(tmp_path / "again")) == contents(made)


def test_a_right_model_is_left_alone(tmp_path):
    """A second call writes nothing."""
    target = model.make_model(tmp_path / "model")
    before = {path: path.stat().st_mtime_ns for path in target.iterdir()}
    model.make_model(target)
    assert {path: path.stat().st_mtime_ns for path in target.iterdir()} == before


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "chat_template.jinja"])
def test_a_damaged_model_is_made_again(made, tmp_path, name):
    """One wrong byte in any file, and the model is made again."""
    target = model.make_model(tmp_path / "model")
    data = bytearray((target / name).read_bytes())
    data[-1] ^= 1
    (target / name).write_bytes(bytes(data))
    model.make_model(target)
    assert contents(target) == contents(made)


def test_a_missing_file_is_made_again(made, tmp_path):
    """A model without its tokenizer is made again."""
    target = model.make_model(tmp_path / "model")
    (target / "tokenizer.json").unlink()
    model.make_model(target)
    assert contents(target) == contents(made)


def test_a_foreign_folder_is_refused(tmp_path):
    """A folder with somebody's files is not replaced."""
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(HostError, match="other files"):
        model.make_model(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    """When the weights cannot be written, the message says why and no draft stays behind."""

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(model, "write_safetensors", fail)
    with pytest.raises(HostError, match="No space left on device"):
        model.make_model(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_the_inventory_plans_this_architecture():
    """inventories/demo plans with the config.json that the maker writes."""
    text = (REPOSITORY / "inventories/demo/model/config.json").read_text()
    assert json.loads(text) == model.CONFIG


def test_weights_have_the_shapes_that_the_config_says(made):
    """Every tensor is bfloat16, and their sizes add up to the architecture's parameters."""
    with safe_open(made / "model.safetensors", framework="numpy") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        kinds = {part.get_dtype() for part in slices.values()}
        sizes = {name: part.get_shape() for name, part in slices.items()}
    assert kinds == {"BF16"}
    assert len(sizes) == 3 + 4 * 9
    assert sizes["model.layers.3.self_attn.o_proj.weight"] == [256, 256]
    assert sizes["lm_head.weight"] == [2048, 256]


def test_everybody_may_read_the_model(made):
    """A service under another user can load it."""
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in made.iterdir())


def test_tokenizer_gives_back_what_it_is_given(made):
    """Byte-level: any text survives, and special tokens are single tokens."""
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    text = 'Héllo, 日本! {"a": [1, 2]}\n\tend'
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.encode("<|im_end|>").ids == [model.CONFIG["eos_token_id"]]
    assert len(tokenizer.encode("<tool_call>").ids) == 1


def test_every_token_that_may_be_chosen_is_readable(made):
    """Special tokens, unused ids and pieces of characters are banned; the rest is plain text."""
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    bias = model.token_bias(tokenizer, model.CONFIG)
    assert bias[0] == bias[1] == bias[2047] == model.BAN
    free = [tokenizer.decode([index]) for index in range(2048) if index not in bias]
    assert len(free) > 1200
    assert all(text.strip() and text.isascii() for text in free)


def test_the_end_is_preferred_to_white_space(made):
    """After a JSON answer a grammar allows both: the answer must end, not fill up with newlines."""
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    bias = model.token_bias(tokenizer, model.CONFIG)
    assert bias[tokenizer.token_to_id("\u010a")] == model.BLANK  # byte-level BPE's newline
    assert bias[model.CONFIG["eos_token_id"]] > model.BLANK > model.BAN


def test_template_writes_each_role():
    """System, user and assistant messages stand between their marks, in order."""
    prompt = render(
        [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": "Hello"},
        ],
        add_generation_prompt=True,
    )
    assert prompt == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("arguments", ['{"city": "Rome"}', {"city": "Rome"}])
def test_template_writes_tools_and_calls_as_the_parser_reads_them(arguments):
    """Tools come first as JSON; a call is a JSON object inside <tool_call>, however it was sent."""
    prompt = render(
        [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "weather", "arguments": arguments}}],
            },
            {"role": "tool", "content": "sunny"},
        ],
        tools=[{"type": "function", "function": {"name": "weather"}}],
    )
    assert prompt.startswith("<|im_start|>system\n")
    assert '<tools>\n{"function": {"name": "weather"}' in prompt
    call = prompt.split("<tool_call>\n")[-1].split("\n</tool_call>")[0]
    assert json.loads(call) == {"name": "weather", "arguments": {"city": "Rome"}}
    assert "<tool_response>\nsunny\n</tool_response>" in prompt
