"""May this request body reach the engine, and how many sequences does it ask for.

The engine answers most bad values with 400 by itself. Here stands what it does not bound, or bounds
only inside a worker, where the error ends the engine. Pydantic's lax mode behind the door turns
`"8"` into 8, so every capped number has to be a JSON number.

    field                                   decision
    max_tokens, max_completion_tokens,
    max_output_tokens                       <= plan.max_tokens
    n, best_of                              <= plan.max_n (the engine allows 16384)
    prompt, input, messages, … lists        times n: sequences, <= plan.max_in_flight
                                            and plan.key_max_in_flight
    logit_bias, allowed_token_ids           <= 1024 entries: more raises inside the GPU worker
    stop_token_ids                          <= 64 entries: with min_tokens, 128 with the model's own
    bad_words                               <= 64 entries, 448 bytes in all: 1024 tokens in the worker
    logprob_token_ids                       <= 128 entries
    prompt_logprobs, echo with logprobs     refused: logits of a whole prompt chunk are not in the
                                            memory profile
    chat_template, also within
    chat_template_kwargs                    refused: a template is a program
    mm_processor_kwargs, media_io_kwargs    refused: resize the preprocessing
    prompt_embeds                           refused: unpickles tensors, up to 2 GiB
    kv_transfer_params, ec_transfer_params  refused: name hosts and blocks inside the cluster
    vllm_xargs                              refused: reaches connectors and processors unchecked
    priority other than 0                   refused: jumps the queue
    half surrogate pairs, anywhere          refused: no tokenizer reads them, no answer can hold them
    integers of more than 64 bits           left to the engine: where one would have to reach its
                                            processes it is 400 (engine.MeteredEngine)
    numbers of thousands of digits          refused: Python makes none
    background                              refused: work that outlives its request is not counted
    request_id, session_id                  <= 128 visible characters: they reach the logs
    schemas, expressions and grammars of
    structured output, and of tools that
    the engine builds                       what they unroll to is bounded: schemas.py
    stop, top_logprobs, logprobs, seed,
    min_tokens                              left to the engine, which answers 400
    cache_salt, documents, user, metadata   harmless
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any, Final, NoReturn

from rayserve.plan import DoorPlan
from rayserve.serving.body import MAX_ID_CHARACTERS
from rayserve.serving.replies import Refusal
from rayserve.serving.routes import Route
from rayserve.serving.schemas import check_schemas

MAX_DEPTH: Final = 64
"""Deepest nesting of a body: JSON schemas of real tools stay below 20."""
MAX_CONTAINERS: Final = 50_000
"""Most arrays and objects of a body: each costs a hundred bytes of memory for two of the body."""
MAX_BAD_WORDS_BYTES: Final = 448

_TOKEN_FIELDS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_SEQUENCE_FIELDS: Final = ("n", "best_of")
_MAX_ENTRIES: Final = {
    "logit_bias": 1024,
    "allowed_token_ids": 1024,
    "stop_token_ids": 64,
    "bad_words": 64,
    "logprob_token_ids": 128,
}
_FORBIDDEN: Final = {
    "prompt_logprobs": "log probabilities of the prompt are not available here",
    "chat_template": "the chat template is the server's",
    "mm_processor_kwargs": "preprocessing is set by the server",
    "media_io_kwargs": "media loading is set by the server",
    "prompt_embeds": "prompts are text or token ids",
    "kv_transfer_params": "it is internal to the cluster",
    "ec_transfer_params": "it is internal to the cluster",
    "vllm_xargs": "it is internal to the server",
}
_SPECIAL: Final = (
    "background",
    "chat_template_kwargs",
    "echo",
    "priority",
    "request_id",
    "session_id",
)
_CHECKED: Final = frozenset(
    (*_TOKEN_FIELDS, *_SEQUENCE_FIELDS, *_MAX_ENTRIES, *_FORBIDDEN, *_SPECIAL)
)
_STRINGS: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_TOO_DEEP: Final = f"the body is nested more than {MAX_DEPTH} levels deep"
_ID: Final = re.compile(rf"[\x21-\x7e]{{1,{MAX_ID_CHARACTERS}}}")


def read_body(
    raw: bytes, route: Route, plan: DoorPlan, *, every_tool: bool = False
) -> int | Refusal:
    """How many sequences a body asks for, or why it is refused.

    Args:
        raw: the body as sent.
        route: where it was sent to.
        plan: the limits.
        every_tool: the engine builds each tool: `schemas.constrains_every_tool`.
    """
    body = parse(raw)
    if isinstance(body, Refusal):
        return body
    present = _CHECKED.intersection(body)
    refusal = _check_fields(body, present, plan) if present else None
    fault = None if refusal else check_schemas(body, every_tool=every_tool)
    if fault is not None:
        place, message = fault
        refusal = _bad(f"`{place}` is too large for the engine: {message}", place)
    return refusal or _sequences(body, route, plan)


def parse(raw: bytes) -> dict[str, Any] | Refusal:
    """A JSON object of bounded size and depth, or why it is refused."""
    openers = raw.count(b"[") + raw.count(b"{")
    # The plain count takes in brackets within strings: only a large one is worth the exact one.
    if openers > MAX_CONTAINERS and count_containers(raw) > MAX_CONTAINERS:
        return _bad(f"the body has more than {MAX_CONTAINERS} arrays and objects")
    try:
        body = json.loads(raw.decode(), parse_constant=_refuse_constant)
        if _SURROGATE.search(raw):
            json.dumps(body, ensure_ascii=False).encode()
    except RecursionError:
        return _bad(_TOO_DEEP)
    except UnicodeDecodeError:
        return _bad("the body is not UTF-8")
    except UnicodeEncodeError:
        return _bad("a text of the body has half of a surrogate pair, which is no character")
    except json.JSONDecodeError as error:  # whose own text quotes no input
        return _bad(f"the body is not valid JSON at character {error.pos}")
    except ArithmeticError as error:
        return _bad(f"the body is not valid JSON: {error}")
    except ValueError:
        return _bad(f"a number of the body has more than {sys.get_int_max_str_digits()} digits")
    if not isinstance(body, dict):
        return _bad("the body must be a JSON object")
    if openers > MAX_DEPTH and too_deep(body):
        return _bad(_TOO_DEEP)
    return body


def count_containers(raw: bytes) -> int:
    """Arrays and objects in a JSON text, without those that are only quoted in strings."""
    bare = _STRINGS.sub(b"", raw)
    return bare.count(b"[") + bare.count(b"{")


def too_deep(body: dict[str, Any]) -> bool:
    """Whether values nest more than MAX_DEPTH levels deep; the body is the first."""
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (list, dict))
        ]
        if not level:
            return False
    return True


def _refuse_constant(_: str) -> NoReturn:
    raise ArithmeticError("NaN and Infinity are none of its numbers")


def _bad(message: str, param: str | None = None) -> Refusal:
    return Refusal(400, "request", message, param)


def _check_fields(body: dict[str, Any], present: frozenset[str], plan: DoorPlan) -> Refusal | None:
    for name in sorted(present):
        value = body[name]
        if value is None:
            continue
        if name in _FORBIDDEN:
            return _bad(f"`{name}` is not accepted: {_FORBIDDEN[name]}", name)
        if name in _TOKEN_FIELDS:
            refusal = _check_number(name, value, plan.max_tokens)
        elif name in _SEQUENCE_FIELDS:
            refusal = _check_number(name, value, plan.max_n)
        elif name in _MAX_ENTRIES:
            refusal = _check_entries(name, value)
        else:
            refusal = _check_special(name, value, body)
        if refusal is not None:
            return refusal
    return None


def _check_number(name: str, value: object, limit: int) -> Refusal | None:
    # The engine reads 8.0 as 8, and infinity is no whole number.
    whole = value.is_integer() if isinstance(value, float) else type(value) is int
    if not whole or not isinstance(value, int | float):
        return _bad(f"`{name}` must be an integer", name)
    if value > limit:
        return _bad(f"`{name}` must be at most {limit}", name)
    return None


def _check_entries(name: str, value: object) -> Refusal | None:
    limit = _MAX_ENTRIES[name]
    if not isinstance(value, list | dict):
        return None  # the engine says what is wrong with it
    if len(value) > limit:
        return _bad(f"`{name}` must have at most {limit} entries", name)
    if name == "bad_words":
        size = sum(len(word.encode(errors="replace")) for word in value if isinstance(word, str))
        if size > MAX_BAD_WORDS_BYTES:
            return _bad(f"`{name}` must have at most {MAX_BAD_WORDS_BYTES} bytes in all", name)
    return None


def _check_special(name: str, value: object, body: dict[str, Any]) -> Refusal | None:
    if name == "chat_template_kwargs":
        if isinstance(value, dict) and value.get("chat_template") is not None:
            return _bad("the chat template is the server's", "chat_template_kwargs.chat_template")
    elif name == "echo":
        # With `echo` the engine turns both of these into log probabilities of the prompt; chat's
        # `top_logprobs` defaults to 0, which already costs the logits of the whole prompt.
        if value is not False and (body.get("logprobs") is not None or "messages" in body):
            return _bad("`echo` is not available here together with log probabilities", name)
    elif name == "priority":
        if isinstance(value, bool) or value != 0:
            return _bad("`priority` is not accepted: requests are served in order", name)
    elif name == "background":
        if value is not False:
            return _bad("`background` is not available here", name)
    elif not (isinstance(value, str) and _ID.fullmatch(value)):
        return _bad(f"`{name}` must be 1 to {MAX_ID_CHARACTERS} visible ASCII characters", name)
    return None


def _sequences(body: dict[str, Any], route: Route, plan: DoorPlan) -> int | Refusal:
    prompts = sum(count_prompts(body.get(name)) for name in route.prompts)
    sequences = max(1, prompts) * max(1, int(body.get("n") or 1))
    # Not 429: waiting would never help.
    limit = min(plan.max_in_flight, plan.key_max_in_flight or plan.max_in_flight)
    if sequences > limit:
        return _bad(f"the request asks for {sequences} sequences; at most {limit} may run at once")
    return sequences


def count_prompts(value: object) -> int:
    """Prompts in a field: a string, a list of token ids or of chat messages is one."""
    if not isinstance(value, list):
        return 1 if value else 0
    if not value or isinstance(value[0], int) or _is_message(value[0]):
        return 1
    return len(value)


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and "role" in value
