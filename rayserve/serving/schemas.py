"""How large may the machine become that the engine builds from a body's schemas and grammars?

The engine turns a JSON schema, an expression or a grammar into an automaton, in the server's own
process and before any limit of its own. What it unrolls it stores: a hundred bytes to two kilobytes
for each item of an array, and a hundred bytes for each turn of a repeated expression, where
expressions within each other multiply, also through the rules of a grammar. So a short number in a
body could take all memory of a host.

    in a field of a body                          at most
    items and properties, all together            MAX_ITEMS
    one expression or grammar, unrolled           MAX_TURNS
    all expressions and grammars, unrolled        MAX_TURNS
    one length of a string                        any: it is counted, not unrolled (fifty of 10^9
                                                  cost the engine what fifty of 1000 do, 44 MB)

Of a tool the engine builds a machine where a call is forced or the tool is strict; else its schema
only goes into the prompt, and may be of any size.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

MAX_ITEMS: Final = 40_000
"""Seventy megabytes and half a second in the engine: forty tools with arrays of a thousand items."""
MAX_TURNS: Final = 100_000
"""Ten megabytes; room for `.{0,65535}`, a usual bound of a text."""
_FEW: Final = 100
"""An expression with fewer turns, whatever its groups, is not worth reading."""
MAX_NESTED_TEXT: Final = 50_000
"""Most brackets in a schema that is given as text."""

PLACES: Final = ("output_config", "response_format", "structured_outputs", "text", "tools")
"""Fields of a body, in any dialect, below which a schema, expression or grammar may stand."""
_BUILDERS: Final = frozenset(("cohere_command3", "cohere_command4"))
"""Parsers of vLLM that put every tool into the grammar, whatever the request's `tool_choice`."""
_ITEMS: Final = frozenset(
    ("minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains")
)
_REPEAT: Final = frozenset(("min", "max"))
"""Bounds in a structural tag of `type: repeat`."""
_EXPRESSIONS: Final = frozenset(("pattern", "regex", "whitespace_pattern"))
_GRAMMARS: Final = frozenset(("grammar", "definition", "ebnf", "lark"))
_JSON_TEXTS: Final = frozenset(("json", "structural_tag", "schema", "json_schema"))

_ENDLESS: Final = {"maxItems": math.inf}
_COUNTS: Final = re.compile(r"\{\s*+(\d*+)\s*+(?:,\s*+(\d*+)\s*+)?\}")
_LARK_COUNTS: Final = re.compile(r"~\s*+(\d++)(?:\s*+\.\.\s*+(\d++))?")
_INLINE: Final = re.compile(r"\"\s*+:\s*+(\d[\d.eE+]*+)")
_ESCAPED: Final = re.compile(r"\\(?:[pPuUx]\{[^}]{0,64}\}|.)", re.DOTALL)
_RULE: Final = re.compile(r"(?:([\w.-]++)\s*+::=|\n[ \t]*+[?!]*+([\w-]++)(?:\.-?\d++)?\s*+:(?!:=))")
_ATTRIBUTES: Final = re.compile(
    r"^[ \t]*+[?!]*+[\w.-]++[ \t]*+(?:\[\s*+(?:\w++\s*+[=,\]]|#|//)|\{\s*+[A-Za-z_])", re.MULTILINE
)
"""A name at the start of a line with attributes or parameters: Lark's `name[stop="…"]: …`."""
_WORD: Final = re.compile(r"[\w.-]++")
_PLAIN_WORD: Final = re.compile(r"\w++")
_TEXT: Final = re.compile(r"\"[^\"\n]*+\"|'[^'\n]*+'")
_COMMENT: Final = re.compile(r"(?:#|//)[^\n]*+")
_CLASS: Final = re.compile(r"\[\^?(?:[^\[\]\\]|\\.)+\]", re.DOTALL)


def constrains_every_tool(arguments: Mapping[str, Any]) -> bool:
    """Whether an engine with these arguments builds every tool, also where a request forces none."""
    parsers = {arguments.get("tool_call_parser"), arguments.get("reasoning_parser")}
    return arguments.get("tool_strict_level") == "parameter" or not parsers.isdisjoint(_BUILDERS)


def check_schemas(body: dict[str, Any], *, every_tool: bool = False) -> tuple[str, str] | None:
    """The field at fault and what is wrong, or None where the engine may build all of them.

    Args:
        body: in any dialect.
        every_tool: the engine builds each tool: `constrains_every_tool`.
    """
    for place in PLACES:
        value = _built_tools(body, every=every_tool) if place == "tools" else body.get(place)
        fault = _check(value) if value else ""
        if fault:
            return place, fault
    return None


def _built_tools(body: dict[str, Any], *, every: bool) -> list[object]:
    """Tools of which the engine builds a machine, also those that a message adds."""
    tools = body.get("tools")
    known = [*(tools if isinstance(tools, list) else ()), *_added_tools(body.get("messages"))]
    choice = body.get("tool_choice")
    mode = choice.get("type") if isinstance(choice, dict) else choice
    if every or mode not in (None, "auto", "none"):
        return known
    return [tool for tool in known if _is_strict(tool)]


def _added_tools(messages: object) -> Iterator[object]:
    """Definitions in Anthropic's `tool_addition` blocks."""
    for message in messages if isinstance(messages, list) else ():
        blocks = message.get("content") if isinstance(message, dict) else None
        for block in blocks if isinstance(blocks, list) else ():
            if isinstance(block, dict) and block.get("type") == "tool_addition":
                yield block.get("tool")


def _is_strict(tool: object) -> bool:
    """Whether a tool, or one within it, asks for arguments that follow its schema.

    Whatever is not plainly false counts: Pydantic's lax mode reads `"yes"` as true.
    """
    if not isinstance(tool, dict):
        return False
    within = tool.get("tools")  # a namespace of the Responses API
    inner = [
        tool.get("function"),
        tool.get("definition"),
        *(within if isinstance(within, list) else ()),
    ]
    return bool(tool.get("strict")) or any(map(_is_strict, inner))


def _check(value: object) -> str:
    items = turns = 0.0
    for key, leaf in _leaves(value):
        if isinstance(leaf, str):
            turns += _turns(leaf, grammar=key in _GRAMMARS)
            items += sum(map(_number, _INLINE.findall(leaf))) if key in _GRAMMARS else 0
        else:
            items += max(0, min(leaf, MAX_ITEMS + 1))
        if items > MAX_ITEMS:
            return f"the bounds of items and properties must be at most {MAX_ITEMS} together"
        if turns > MAX_TURNS:
            return f"repeated parts of expressions must be at most {MAX_TURNS} when written out"
    return ""


def _leaves(value: object) -> Iterator[tuple[str, Any]]:
    """Each number and text that bounds a machine, with its keyword.

    Also below `default`, `enum` and the like: a `$ref` may point anywhere.
    """
    pending: list[object] = [value]
    while pending:
        outer = pending.pop()
        if isinstance(outer, list):
            pending.extend(outer)
        if not isinstance(outer, dict):
            continue
        for key, inner in outer.items():
            if isinstance(inner, str):
                if key in _EXPRESSIONS or key in _GRAMMARS:
                    yield key, inner
                elif key in _JSON_TEXTS:
                    pending.append(_parsed(inner))
            elif isinstance(inner, int | float):
                repeat = key in _REPEAT and outer.get("type") == "repeat"
                if repeat or key in _ITEMS:
                    yield key, inner
            else:
                pending.append(inner)
                if key == "patternProperties" and isinstance(inner, dict):
                    yield from (("pattern", name) for name in inner)


def _parsed(text: str) -> object:
    """A schema given as text; None where it is no JSON, which the engine says itself."""
    if text.count("[") + text.count("{") > MAX_NESTED_TEXT:
        return _ENDLESS
    try:
        return json.loads(text, parse_constant=lambda _: math.inf)
    except json.JSONDecodeError:
        return None
    except (ValueError, RecursionError):  # a number of 5000 digits; deeper than Python counts
        return _ENDLESS


def _turns(text: str, *, grammar: bool) -> float:
    """How many parts an expression or grammar gains when its repeats are written out.

    Args:
        text: any dialect of expressions, EBNF or Lark.
        grammar: it has rules, which the engine may write out within each other.
    """
    if grammar:
        text = _LARK_COUNTS.sub(r"{\1,\2}", text)
    counts = _COUNTS.findall(text)
    most = _product(max(1.0, *map(_number, pair)) for pair in counts)
    if most <= _FEW:
        return most if counts else 0
    return _rules_turns(text) if grammar else _unrolled(text, most)[0]


def _rules_turns(text: str) -> float:
    """Parts that all rules gain, each times the repeats of the rules that lead to it.

    Repeats side by side add up, in a rule and between rules. Rules that refer to each other in a
    circle count as one within another, in any order.
    """
    if _ATTRIBUTES.search(text):
        return math.inf  # Lark's attributes may hold what looks like another rule
    first, *pieces = _RULE.split("\n" + text)
    alternatives = {"": [first]}
    for ebnf, lark, body in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
        alternatives.setdefault(ebnf or lark, []).append(body)
    bodies = {name: "|".join(several) for name, several in alternatives.items()}
    gains = {name: _rule_turns(body) for name, body in bodies.items()}
    inner = {
        name: {word for word in _named(body) if word in bodies} for name, body in bodies.items()
    }
    outer: dict[str, set[str]] = {name: set() for name in bodies}
    for name, references in inner.items():
        for reference in references:
            outer[reference].add(name)
    done: set[str] = set()
    order = [name for start in bodies for name in _reached(inner, start, done)]
    times = dict.fromkeys(bodies, 1.0)
    total = 0.0
    done = set()
    for start in reversed(order):  # who refers before who is referred to, circles together
        circle = _reached(outer, start, done)
        if not circle:
            continue
        above = max(times[name] for name in circle)
        repeats = _product(1 + gains[name][0] for name in circle)
        within = above * (repeats if len(circle) > 1 else 1)
        for gained, written in (gains[name] for name in circle):
            total += within * (gained + written) - written
        for name in circle:
            for reference in inner[name]:
                times[reference] = max(times[reference], above * repeats)
    return total


def _named(body: str) -> set[str]:
    """Each word of a rule that may be the name of another, also within texts and comments."""
    return {*_WORD.findall(body), *_PLAIN_WORD.findall(body)}


def _reached(edges: dict[str, set[str]], start: str, done: set[str]) -> list[str]:
    """Names that are reached from one and not yet done, each after those reached from it."""
    found: list[str] = []
    pending = [(start, False)]
    while pending:
        name, left = pending.pop()
        if left:
            found.append(name)
        elif name not in done:
            done.add(name)
            pending.append((name, True))
            pending.extend((further, False) for further in edges[name] if further not in done)
    return found


def _rule_turns(body: str) -> tuple[float, float]:
    """As `_unrolled`, of one rule; the product of its repeats where its texts hide one of them."""
    counts = _COUNTS.findall(body)
    most = _product(max(1.0, *map(_number, pair)) for pair in counts)
    plain = _CLASS.sub("a", _ESCAPED.sub("a", body))
    plain = _TEXT.sub(lambda text: "(" + "a" * (len(text[0]) - 2) + ")", plain)
    plain = "".join(_COMMENT.sub("", plain).split())
    if len(_COUNTS.findall(plain)) != len(counts):
        return most, len(body)
    return _unrolled(plain, most)


def _unrolled(text: str, most: float) -> tuple[float, float]:
    """Parts that the repeats of an expression add by its groups, and parts as it is written.

    It adds `most` where dialects read its groups differently.
    """
    unread = most, len(text)
    if "(?" in text and re.search(r"\(\?[a-zA-Z]*x", text):
        return unread  # comments may hold brackets
    plain = _CLASS.sub("a", _ESCAPED.sub("a", text))
    if "[" in plain or "]" in plain:
        return unread
    groups, last, place, written = [0.0], 1.0, 0, 0
    while place < len(plain):
        count = _COUNTS.match(plain, place)
        if count:
            times = max(1.0, *map(_number, count.groups()))
            groups[-1] += last * (times - 1)
            last *= times
            place = count.end()
            continue
        character = plain[place]
        place += 1
        if character == "(":
            groups.append(0.0)
        elif character == ")":
            if len(groups) == 1:
                return unread
            last = max(1.0, groups.pop())
            groups[-1] += last
        elif character not in "*+?":
            last = 1.0
            written += 1
            groups[-1] += last
    return unread if len(groups) > 1 else (groups[0] - written, written)


def _product(factors: Iterable[float]) -> float:
    total = 1.0
    for factor in factors:
        total *= factor
    return total


def _number(digits: str | None) -> float:
    """A number however long; infinity where it is none."""
    try:
        return float(digits or 0)
    except ValueError:
        return math.inf
