"""Which bodies are too long to stand in tests/cases/bad_requests.yml?"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from rayserve.plan import Plan
from tests.bad_requests import BadRequest


def _length(plan: Plan) -> int:
    return int(plan.replica.engine_arguments()["max_model_len"])


def _with(**fields: Any) -> Callable[[Plan, BadRequest], bytes]:
    return lambda _, case: json.dumps({**case.good(), **fields}).encode()


def _large(plan: Plan, case: BadRequest) -> bytes:
    return json.dumps({**case.good(), "user": "x" * plan.door.max_body_bytes}).encode()


def _nested(depth: int) -> Callable[[Plan, BadRequest], bytes]:
    def make(_: Plan, case: BadRequest) -> bytes:
        head = json.dumps(case.good())[:-1]
        return f'{head}, "metadata": {"[" * depth}{"]" * depth}}}'.encode()

    return make


def _many_digits(_: Plan, case: BadRequest) -> bytes:
    return f'{json.dumps(case.good())[:-1]}, "seed": {"9" * 5000}}}'.encode()


def _many_prompts(plan: Plan, case: BadRequest) -> bytes:
    return json.dumps({**case.good(), "prompt": ["a"] * (plan.door.max_in_flight + 1)}).encode()


def _long_prompt(plan: Plan, case: BadRequest) -> bytes:
    return json.dumps({**case.good(), "prompt": [5] * (_length(plan) + 1)}).encode()


def _long_chat(plan: Plan, case: BadRequest) -> bytes:
    content = "word " * (2 * _length(plan))
    return json.dumps({**case.good(), "messages": [{"role": "user", "content": content}]}).encode()


def _long_together(plan: Plan, case: BadRequest) -> bytes:
    half = _length(plan) // 2 + 1
    return json.dumps({**case.good(), "prompt": [5] * half, "max_tokens": half}).encode()


BODIES: dict[str, Callable[[Plan, BadRequest], bytes]] = {
    "large": _large,
    "deep": _nested(100),
    "very_deep": _nested(24_000),
    "many_containers": _with(metadata=[[] for _ in range(60_000)]),
    "many_digits": _many_digits,
    "many_prompts": _many_prompts,
    "long_prompt": _long_prompt,
    "long_chat": _long_chat,
    "long_together": _long_together,
    "long_logit_bias": _with(logit_bias={str(token): 1 for token in range(1500)}),
    "long_stop_token_ids": _with(stop_token_ids=list(range(200))),
    "long_bad_words": _with(bad_words=[f"word{number}" for number in range(200)]),
    "long_stop": _with(stop=[f"stop {number}" for number in range(500)]),
    "utf16": lambda _, case: json.dumps(case.good()).encode("utf-16"),
}
