"""Is each body that could hurt the engine refused, and each that could not let through?"""

from __future__ import annotations

import json

import pytest

from rayserve.serving.limits import (
    MAX_BAD_WORDS_BYTES,
    MAX_CONTAINERS,
    MAX_DEPTH,
    count_containers,
    count_prompts,
    parse,
    read_body,
)
from rayserve.serving.replies import Refusal
from rayserve.serving.routes import ALLOWED
from tests.unit.door_client import CHAT, plan

COMPLETIONS = "/v1/completions"


def verdict(path, body, **changes):
    """What the limits say of a body sent to a path."""
    return read_body(json.dumps(body).encode(), ALLOWED[path]["POST"], plan(**changes))


REFUSED_FIELDS = [
    ("max_tokens", 101),
    ("max_tokens", 1e9),
    ("max_tokens", 1.5),
    ("max_tokens", "100"),
    ("max_tokens", True),
    ("max_tokens", [1]),
    ("max_completion_tokens", 101),
    ("max_output_tokens", 2**63),
    ("n", 5),
    ("n", 5.0),
    ("n", "2"),
    ("n", {}),
    ("best_of", 5),
    ("logit_bias", {str(token): 1 for token in range(1025)}),
    ("allowed_token_ids", list(range(1025))),
    ("stop_token_ids", list(range(65))),
    ("logprob_token_ids", list(range(129))),
    ("bad_words", ["a"] * 65),
    ("bad_words", ["é" * (MAX_BAD_WORDS_BYTES // 2 + 1)]),
    ("prompt_logprobs", 0),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", False),
    ("chat_template", "{{ 1 }}"),
    ("chat_template", ""),
    ("chat_template_kwargs", {"chat_template": "{{ 1 }}"}),
    ("mm_processor_kwargs", {"num_crops": 9999}),
    ("media_io_kwargs", {"video": {"num_frames": 9999}}),
    ("prompt_embeds", "AAAA"),
    ("kv_transfer_params", {"remote_host": "10.0.0.1"}),
    ("ec_transfer_params", {}),
    ("vllm_xargs", {"kv_transfer_params": "x"}),
    ("priority", -1),
    ("priority", "0"),
    ("priority", True),
    ("background", True),
    ("background", "yes"),
    ("request_id", "a\nforged log line"),
    ("request_id", "a" * 129),
    ("request_id", ""),
    ("request_id", 7),
    ("session_id", "a b"),
    ("session_id", "é"),
]


@pytest.mark.parametrize("name,value", REFUSED_FIELDS)
def test_a_value_that_could_hurt_is_refused(name, value):
    """The refusal is a 400 that names the field and does not repeat the value."""
    refusal = verdict(CHAT, {"model": "m", name: value})
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.reason) == (400, "request")
    assert refusal.param.startswith(name)
    assert name.split(".")[0] in refusal.message or "template" in refusal.message
    assert len(refusal.message) < 200


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"max_tokens": 100, "max_completion_tokens": None, "n": None},
        {"max_tokens": 100.0},
        {"max_tokens": -1},
        {"n": 0},
        {"logit_bias": {"1": 2.0}, "stop_token_ids": [1], "bad_words": ["no"]},
        {"logit_bias": "not a map: the engine's business"},
        {"bad_words": [1, 2]},
        {"prompt_logprobs": None, "chat_template": None, "vllm_xargs": None},
        {"chat_template_kwargs": {"enable_thinking": False, "chat_template": None}},
        {"priority": 0, "background": False, "echo": False},
        {"request_id": "chat-1:2", "session_id": "s" * 128},
        {"logprobs": True, "top_logprobs": 5, "seed": 1, "stop": ["a"], "cache_salt": "s"},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}},
        {"metadata": {"prompt_logprobs": 1, "n": 100}},
    ],
)
def test_a_harmless_body_is_one_sequence(body):
    """Absent, null and in-range values pass, as does what the engine itself judges."""
    assert verdict(CHAT, {"messages": [{"role": "user", "content": "x"}], **body}) == 1


@pytest.mark.parametrize(
    "path,body,refused",
    [
        (COMPLETIONS, {"prompt": "a", "echo": True}, False),
        (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": None}, False),
        (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 0}, True),
        (COMPLETIONS, {"prompt": "a", "echo": "yes", "logprobs": 5}, True),
        (COMPLETIONS, {"prompt": "a", "echo": False, "logprobs": 5}, False),
        (CHAT, {"messages": [], "echo": True}, True),
        (CHAT, {"messages": [], "echo": False, "logprobs": True}, False),
    ],
)
def test_echo_is_refused_where_it_means_prompt_log_probabilities(path, body, refused):
    """`echo` alone repeats text; with log probabilities, or in chat, it costs the prompt's logits."""
    assert isinstance(verdict(path, body), Refusal) == refused


@pytest.mark.parametrize(
    "path,body,sequences",
    [
        (CHAT, {"n": 3}, 3),
        (CHAT, {"messages": [{"role": "user"}] * 9, "n": 2.0}, 2),
        (COMPLETIONS, {"prompt": "a"}, 1),
        (COMPLETIONS, {"prompt": [1, 2, 3, 4, 5, 6]}, 1),
        (COMPLETIONS, {"prompt": ["a", "b"]}, 2),
        (COMPLETIONS, {"prompt": [[1], [2]], "n": 2}, 4),
        (COMPLETIONS, {"prompt": []}, 1),
        ("/v1/responses", {"input": [{"role": "user"}] * 9}, 1),
        ("/v1/embeddings", {"input": ["a", "b", "c"]}, 3),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": "a"}] * 9}, 1),
        ("/v1/embeddings", {"messages": [[{"role": "user"}], [{"role": "user"}]]}, 2),
        ("/rerank", {"query": "a", "documents": ["b", "c"]}, 2),
        ("/score", {"text_1": "a", "text_2": ["b", "c"]}, 3),
        ("/score", {"queries": "a", "documents": [{"content": []}, {"content": []}]}, 3),
        ("/v1/messages/count_tokens", {"messages": []}, 1),
    ],
)
def test_prompts_times_n_are_sequences(path, body, sequences):
    """A batch cannot hide behind one request."""
    assert verdict(path, body) == sequences


@pytest.mark.parametrize(
    "body,changes",
    [
        ({"prompt": ["a"] * 5}, {}),
        ({"prompt": [[1]] * 3, "n": 2}, {}),
        ({"prompt": ["a"] * 3}, {"key_max_in_flight": 2}),
    ],
)
def test_a_batch_that_can_never_run_is_400(body, changes):
    """More sequences than may ever run at once is a wrong request, not a full queue."""
    assert verdict(COMPLETIONS, body, **changes).status == 400


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b"null",
        b'"text"',
        b"1",
        b"{} {}",
        b"{'a': 1}",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1' + b"0" * 5000 + b"}",
        b'{"a": "\\ud800"}',
        b'{"a": ["x \\uDFFF\\ud83d y"]}',
        b'{"\\udc00": 1}',
        b'{"a": "\xff"}',
        b'{"a": "line\nbreak"}',
        '{"a": 1}'.encode("utf-16"),
        b"\xef\xbb\xbf{}",
        b'{"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}",
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b"[" * 1_000_000,
        b'{"a":[' + b"[]," * MAX_CONTAINERS + b"[]]}",
    ],
)
def test_what_is_no_plain_json_object_is_refused(raw):
    """Broken, huge, deep or foreign JSON is a 400, never an exception."""
    refusal = parse(raw)
    assert isinstance(refusal, Refusal)
    assert refusal.status == 400


def test_a_number_that_python_cannot_make_is_named():
    """Thousands of digits are told as such, not as broken JSON."""
    refusal = parse(b'{"a": 1' + b"0" * 5000 + b"}")
    assert isinstance(refusal, Refusal)
    assert "4300 digits" in refusal.message


def test_nesting_up_to_the_limit_passes():
    """The body counts as one level, and brackets within strings as none."""
    inner = MAX_DEPTH - 1
    assert parse(b'{"a":' + b"[" * inner + b"]" * inner + b"}") == {
        "a": json.loads("[" * inner + "]" * inner)
    }
    text = '[{"' * (MAX_CONTAINERS + 1)
    raw = json.dumps({"a": text, "b": [[]]}).encode()
    assert parse(raw) == {"a": text, "b": [[]]}
    assert count_containers(raw) == 3


def test_the_body_may_be_utf_8_with_any_text():
    """Text of any script passes."""
    assert parse('{"a": "日本語 🦙"}'.encode()) == {"a": "日本語 🦙"}


def test_whole_integers_and_characters_pass():
    """Integers of any size that a schema may name, and both halves of a surrogate pair are fine."""
    raw = b'{"a": [340282366920938463463374607431768211455, 0.12345678901234567890123]}'
    assert parse(raw) == {"a": [2**128 - 1, 0.12345678901234567890123]}
    text = {"a": "\U0001f999", "b": "\\ud800 as text", "c": "1180591620717411303424"}
    assert parse(json.dumps(text).encode()) == text


@pytest.mark.parametrize(
    "value,prompts",
    [
        (None, 0),
        ("", 0),
        ("a", 1),
        ([], 1),
        ([1, 2], 1),
        (["a"], 1),
        (["a", "b"], 2),
        ([[1], [2]], 2),
        ({"a": 1}, 1),
        ([{"role": "user"}, {"role": "user"}], 1),
        ([{"content": []}, {"content": []}], 2),
    ],
)
def test_prompts_are_counted_by_shape(value, prompts):
    """Strings, token lists and conversations are one prompt; lists of these are many."""
    assert count_prompts(value) == prompts
