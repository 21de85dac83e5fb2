"""Is a schema, expression or grammar refused that would unroll to more than the host's memory?"""

from __future__ import annotations

import json
import time

import pytest

from rayserve.serving.limits import read_body
from rayserve.serving.replies import Refusal
from rayserve.serving.routes import ALLOWED
from rayserve.serving.schemas import MAX_ITEMS, MAX_TURNS, constrains_every_tool
from tests.unit.door_client import CHAT, plan

ENDLESS = {"type": "array", "minItems": 10**9}
NESTED = "(((ab){1000}){1000}){1000}"
UUID = '[0-9a-f]{8} "-" [0-9a-f]{4} "-" [0-9a-f]{4} "-" [0-9a-f]{4} "-" [0-9a-f]{12}'
LARK_UUID = '/[0-9a-f]{8}/ ("-" /[0-9a-f]{4}/)~3 "-" /[0-9a-f]{12}/'
DATE_TIME = (
    '[0-9]{4} "-" [0-9]{2} "-" [0-9]{2} "T" [0-9]{2} ":" [0-9]{2} ":" [0-9]{2}'
    ' ("." [0-9]{1,9})? ("Z" | [+-] [0-9]{2} ":" [0-9]{2})'
)
JSON_GRAMMAR = f"""
root ::= value  # whatever JSON has
value ::= object | array | string | "null"
object ::= "{{" (pair ("," pair)*)? "}}"
array ::= "[" (value ("," value){{0,9}})? "]"
pair ::= string ":" value
string ::= "\\"" (uuid | date | char*) "\\""
char ::= [^"\\\\\\x00-\\x1F] | "\\\\" (["\\\\bfnrt/] | "u" [0-9a-fA-F]{{4}})
uuid ::= {UUID}
date ::= {DATE_TIME}
"""


def verdict(path, body):
    """What the limits say of a body sent to a path."""
    return read_body(json.dumps(body).encode(), ALLOWED[path]["POST"], plan())


def tool(schema, **more):
    """OpenAI's tool with a schema of parameters."""
    return {"type": "function", "function": {"name": "f", "parameters": schema, **more}}


def messages(*blocks):
    """A conversation with these blocks in its first message."""
    return [{"role": "user", "content": [{"type": "text", "text": "a"}, *blocks]}]


RESPONSE_TOOL = {"type": "function", "name": "f", "parameters": ENDLESS}
CLAUDE_TOOL = {"name": "f", "input_schema": ENDLESS}
ADDED = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": CLAUDE_TOOL}}


PLACES = [
    (CHAT, "response_format", {"type": "json_schema", "json_schema": {"schema": ENDLESS}}),
    (CHAT, "response_format", {"type": "structural_tag", "format": {"json_schema": ENDLESS}}),
    (CHAT, "response_format", {"structures": [{"begin": "a", "schema": ENDLESS, "end": "b"}]}),
    (CHAT, "structured_outputs", {"json": ENDLESS}),
    (CHAT, "structured_outputs", {"json": json.dumps(ENDLESS)}),
    (CHAT, "structured_outputs", {"structural_tag": json.dumps({"format": ENDLESS})}),
    (CHAT, "structured_outputs", {"regex": NESTED}),
    (CHAT, "structured_outputs", {"grammar": f"start: /{NESTED}/"}),
    ("/v1/completions", "structured_outputs", {"json": ENDLESS}),
    ("/v1/completions", "response_format", {"json_schema": {"schema": ENDLESS}}),
    ("/v1/responses", "text", {"format": {"type": "json_schema", "schema": ENDLESS}}),
    ("/v1/messages", "output_config", {"format": {"json_schema": ENDLESS}}),
]


@pytest.mark.parametrize("path,place,value", PLACES)
def test_every_place_of_a_body_is_bounded(path, place, value):
    """Wherever a dialect takes a schema, one of endless arrays is a 400 that names the field."""
    refusal = verdict(path, {"model": "m", place: value})
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.param) == (400, place)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "maxItems": MAX_ITEMS + 1},
        {"type": "array", "minItems": 1e9},
        {"type": "object", "minProperties": MAX_ITEMS + 1},
        {"type": "array", "contains": {}, "minContains": MAX_ITEMS + 1},
        {"anyOf": [{"type": "array", "maxItems": 1000}] * (MAX_ITEMS // 1000 + 1)},
        {"type": "string", "pattern": f"^.{{{MAX_TURNS + 2}}}$"},
        {"type": "string", "pattern": "^a{99999999999999999999999}$"},
        {"type": "object", "patternProperties": {NESTED: {}}},
        {"$ref": "#/default", "default": ENDLESS},
        {"type": "object", "properties": {"default": ENDLESS}},
        {"format": {"type": "repeat", "min": 0, "max": 10**6}},
    ],
)
def test_each_bound_of_a_schema_counts(schema):
    """Also a float, one of many, and one where a `$ref` may lead."""
    assert isinstance(verdict(CHAT, {"structured_outputs": {"json": schema}}), Refusal)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "9" * 5000, "9" * 400])
def test_a_schema_given_as_text_hides_no_number(number):
    """What JSON's reader does not take as a number is no way around the bound."""
    text = '{"type": "array", "minItems": ' + number + "}"
    assert isinstance(verdict(CHAT, {"structured_outputs": {"json": text}}), Refusal)


@pytest.mark.parametrize(
    "expression",
    [
        "((a{1000}){1000})",
        "(?:[^)]{1,1000}x){1,1000}",
        r"([\])]{1,1000}){1,1000}",
        "([[)]]a{1000}){1000}",
        "(?x)( # )\na{1000}){1000}",
        "a{1000}{1000}",
        "(a{,1000}){ 0 , 1000 }",
        "(\\p{L}{1000}){1000}",
    ],
)
def test_repeats_within_repeats_multiply(expression):
    """However an expression hides its groups from a reader of brackets."""
    assert isinstance(verdict(CHAT, {"structured_outputs": {"regex": expression}}), Refusal)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: A\nA: B{100}\nB: C{100}\nC: "ab"{100}',
        'start: a~1..1000\na: "b"~1000',
        'start: %json {"type": "array", "minItems": 1000000000}',
        'root ::= ("a"){0,1000000}',
        'root ::= ("a"){ 0 , 1000000 }',
        f"root ::= {NESTED}",
        'root ::= a{1000}\na ::= b{1000}\nb ::= "x" | c\nc ::= "(" b ")"',
        'c ::= "x"{1000}\nb ::= c{1000}\nroot ::= b',
        'root ::= b{1000} b ::= "c"{1000}',
        'a: b{1000} | c\nc: a\nb[stop="x"]: "c"{1000}',
        'start: A\nC: "x"{300} // A\nB: C{300}\nA: B{300} // C',
        'start: A\nA: /"/ (B{1000}){1000} /"/\nB: "b"',
        'start: A\nA.1: B{1000}\nB.-2: "b"{1000}',
        'root ::= ("' + "long " * 100 + '"){1000}',
    ],
)
def test_rules_of_a_grammar_multiply(grammar):
    """A rule may stand within another's repeat, and JSON within Lark."""
    assert isinstance(verdict(CHAT, {"structured_outputs": {"grammar": grammar}}), Refusal)


@pytest.mark.parametrize(
    "value",
    [
        {"json": {"type": "array", "items": {"type": "integer"}, "maxItems": 1000}},
        {"json": {"type": "string", "minLength": 10**7, "maxLength": 10**9}},
        {"json": {"type": "string", "pattern": r"^[\s\S]{1,65535}$"}},
        {"json": {"properties": {"maxItems": {"type": "integer"}, "max": {"type": "number"}}}},
        {"json": {"type": "integer", "minimum": 0, "maximum": 2**53}},
        {
            "json": {
                "type": "string",
                "pattern": r"^(?=.{1,253}$)([a-z\d-]{1,63}\.){1,8}[a-z]{2,63}$",
            }
        },
        {"json": {"type": "object", "default": {"type": "range", "max": 10**6}}},
        {"json": "not JSON: the engine says so"},
        {"regex": r"\w{1,64}@[\w.]{1,255}\.[a-z]{2,63}"},
        {"regex": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"},
        {"grammar": 'root ::= [0-9]{4} "-" [0-9]{2} "-" [0-9]{2}'},
        {"grammar": f'root ::= {UUID} " " {UUID}'},
        {"grammar": f'root ::= {UUID} " " {DATE_TIME}'},
        {
            "grammar": f"root ::= row{{1,100}}\nrow ::= uuid date\nuuid ::= {UUID}\ndate ::= {DATE_TIME}"
        },
        {
            "grammar": f"start: UUID UUID DATE\nUUID: {LARK_UUID}\nDATE: /[0-9]{{4}}(-[0-9]{{2}}){{2}}/"
        },
        {"grammar": JSON_GRAMMAR},
        {"grammar": f"root ::= (\n  hex{{8}} {UUID}\n  hex [0-9]{{8}}\n)\nhex ::= [0-9a-f]\n"},
    ],
)
def test_usual_schemas_pass(value):
    """Bounds that real tools write are no reason to refuse."""
    assert verdict(CHAT, {"structured_outputs": value}) == 1


@pytest.mark.parametrize(
    "path,body",
    [
        (CHAT, {"tools": [tool(ENDLESS)], "tool_choice": "required"}),
        (CHAT, {"tools": [tool(ENDLESS)], "tool_choice": {"type": "function", "function": {}}}),
        (CHAT, {"tools": [tool({}), tool(ENDLESS, strict=True)]}),
        (CHAT, {"tools": [tool(ENDLESS, strict="yes")], "tool_choice": "auto"}),
        ("/v1/responses", {"tools": [RESPONSE_TOOL], "tool_choice": "required"}),
        ("/v1/responses", {"tools": [RESPONSE_TOOL], "tool_choice": {"type": "function"}}),
        ("/v1/responses", {"tools": [RESPONSE_TOOL | {"strict": True}]}),
        ("/v1/responses", {"tools": [{"tools": [RESPONSE_TOOL | {"strict": True}]}]}),
        ("/v1/messages", {"tools": [CLAUDE_TOOL], "tool_choice": {"type": "any"}}),
        ("/v1/messages", {"tools": [CLAUDE_TOOL], "tool_choice": {"type": "tool", "name": "f"}}),
        ("/v1/messages", {"tools": [CLAUDE_TOOL | {"strict": True}]}),
        ("/v1/messages", {"messages": messages(ADDED), "tool_choice": {"type": "any"}}),
    ],
)
def test_tools_are_bounded_where_the_engine_builds_them(path, body):
    """A forced call or a strict tool, also one that a message adds, is built as a schema is."""
    refusal = verdict(path, body)
    assert isinstance(refusal, Refusal)
    assert refusal.param == "tools"


@pytest.mark.parametrize(
    "path,body",
    [
        (CHAT, {"tools": [tool(ENDLESS)]}),
        (CHAT, {"tools": [tool(ENDLESS, strict=False)], "tool_choice": "auto"}),
        (CHAT, {"tools": [tool(ENDLESS), tool({}, strict=True)], "tool_choice": None}),
        (CHAT, {"tools": [tool(ENDLESS)], "tool_choice": "none"}),
        ("/v1/responses", {"tools": [RESPONSE_TOOL], "tool_choice": "auto"}),
        ("/v1/messages", {"tools": [CLAUDE_TOOL], "tool_choice": {"type": "auto"}}),
        ("/v1/messages", {"messages": messages(ADDED), "tool_choice": {"type": "none"}}),
    ],
)
def test_tools_that_only_the_prompt_shows_may_be_large(path, body):
    """A schema that the engine does not build is text, unless its arguments make it build all."""
    assert verdict(path, body) == 1
    raw = json.dumps(body).encode()
    refusal = read_body(raw, ALLOWED[path]["POST"], plan(), every_tool=True)
    assert isinstance(refusal, Refusal)
    assert refusal.param == "tools"


def test_thirty_tools_with_lists_of_a_thousand_pass():
    """Bounds of a usual set of tools are not too large together, also where a call is forced."""
    tools = [tool({"properties": {"a": {"type": "array", "maxItems": 1000}}})] * 30
    assert verdict(CHAT, {"tools": tools, "tool_choice": "required"}) == 1


@pytest.mark.parametrize(
    "arguments,every",
    [
        ({}, False),
        ({"tool_strict_level": "function", "tool_call_parser": "hermes"}, False),
        ({"tool_strict_level": "parameter"}, True),
        ({"tool_call_parser": "cohere_command4"}, True),
        ({"reasoning_parser": "cohere_command3"}, True),
    ],
)
def test_the_engines_arguments_may_make_it_build_every_tool(arguments, every):
    """The strictest level of vLLM does, and Cohere's parser."""
    assert constrains_every_tool(arguments) is every


def test_bounds_in_a_conversation_are_data():
    """A message that quotes a schema is text to the engine."""
    call = {"type": "tool_use", "id": "a", "name": "f", "input": ENDLESS}
    assert verdict("/v1/messages", {"messages": messages(call)}) == 1


@pytest.mark.parametrize("part", ["(", "[a", "{1", "a{2}", "(a{9}", "\\p{", "[^", "~1..2", " "])
def test_long_expressions_are_judged_in_no_time(part):
    """The reader of expressions takes time in proportion to their length."""
    text = "(" + "a{1000}" * 2 + "{" + part * 100_000
    started_at = time.process_time()
    verdict(CHAT, {"structured_outputs": {"regex": text, "grammar": text}})
    rules = "".join(f"a{rule}: a{rule // 2}{{3}} a{rule + 1}{part[0]}\n" for rule in range(9000))
    verdict(CHAT, {"structured_outputs": {"grammar": rules}})
    assert time.process_time() - started_at < 3.0
