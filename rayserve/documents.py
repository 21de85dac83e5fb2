"""What does a hand-written YAML file say, and on which line?

Stricter than YAML: one document, a mapping with text keys, no duplicate key, no anchor or alias, no
tag, no templating braces (Ansible would expand them) and a bounded size. So what a person reads is
what the program reads, and a hostile file costs nothing.
"""

from __future__ import annotations

import math
import re
import reprlib
import unicodedata
from dataclasses import dataclass, field
from typing import Any

import yaml

from rayserve.errors import SpecError, Where

MAX_BYTES = 256 * 1024
MAX_DEPTH = 16
MAX_BITS = 63
PLAIN_NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]*)(\.[0-9]*)?([eE][-+]?[0-9]+)?")
OPENED = {
    "while scanning a quoted scalar": ("close the quote that opens on this line", True),
    "while scanning a simple key": (
        "write `key: value` on this line, or put the text in quotes",
        True,
    ),
    "while parsing a flow mapping": ("close the brace, or add the missing comma", False),
    "while parsing a flow sequence": ("close the bracket, or add the missing comma", False),
}
"""What PyYAML was at when it met a mistake: what to do, and whether the mistake is where that began."""
TEMPLATE_MARKS = ("{{", "{%", "{#")
Loc = tuple[str | int, ...]

# The C parser is ten times as fast; PyYAML may be built without it.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Document:
    """The content of a file and where each of its keys stands."""

    path: str
    data: dict[str, Any] = field(default_factory=dict)
    lines: dict[Loc, int] = field(default_factory=dict)
    """Line (1-based) of each key or list item, by its location."""

    def where(self, loc: Loc) -> Where:
        """The place of a key; of its nearest parent when the key is absent."""
        for end in range(len(loc), -1, -1):
            if loc[:end] in self.lines:
                return Where(self.path, self.lines[loc[:end]], dotted(loc) or None)
        return Where(self.path, None, dotted(loc) or None)


def brief(value: object) -> str:
    """A value as a message shows it: at most 80 characters, and cheap however large it is."""
    short = reprlib.Repr()
    short.maxlevel, short.maxlist, short.maxdict = 3, 4, 4
    short.maxstring = short.maxother = short.maxlong = 80
    try:
        return short.repr(value)[:80]
    except ValueError:  # an integer with more digits than Python writes
        return f"a {type(value).__name__}"


def dotted(loc: Loc) -> str:
    """A location as people write it: `node_pools[0].gpu`."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def load_document(text: str, path: str) -> Document:
    """The document in `text`.

    Raises:
        SpecError: the text is not one plain YAML mapping within the limits above.
    """
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise SpecError(
            f"a file of at most {MAX_BYTES // 1024} KiB",
            found=f"{len(text) // 1024} KiB",
            do="keep model data and templates in their own files",
            where=Where(path),
        )
    try:
        _check_events(text, path)
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise _syntax_error(error, text, path) from None
    if not isinstance(node, yaml.MappingNode):
        raise SpecError(
            "a YAML mapping",
            found="an empty file"
            if node is None
            else "a list"
            if isinstance(node, yaml.SequenceNode)
            else "a single value",
            do="start from inventories/example/group_vars/all/cluster.yml",
            where=Where(path, None if node is None else _line(node)),
        )
    lines: dict[Loc, int] = {(): _line(node)}
    data = _Builder(path, lines).mapping(node, ())
    return Document(path, data, lines)


def _line(item: yaml.Node | yaml.Event) -> int:
    return int(item.start_mark.line) + 1 if item.start_mark is not None else 1


def _check_events(text: str, path: str) -> None:
    depth = documents = 0
    for event in yaml.parse(text, Loader=_Loader):
        line = _line(event)
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.DocumentStartEvent):
            documents += 1
        if depth > MAX_DEPTH or documents > 1:
            what = f"nesting of at most {MAX_DEPTH} levels" if documents == 1 else "one document"
            raise SpecError(what, found="more", do="remove the rest", where=Where(path, line))
        anchor = getattr(event, "anchor", None)
        if isinstance(event, yaml.AliasEvent) or anchor:
            raise SpecError(
                "values written out where they stand",
                found=f"a YAML anchor or alias ({anchor})",
                do="repeat the value, so that a reader and a diff see it",
                where=Where(path, line),
            )
        tag = getattr(event, "tag", None)
        if tag and isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent):
            raise SpecError(
                "plain YAML without tags",
                found=f"the tag {tag}",
                do="remove the tag; a secret belongs in secrets.yml, encrypted as a whole",
                where=Where(path, line),
            )


def _syntax_error(error: yaml.YAMLError, text: str, path: str) -> SpecError:
    mark = getattr(error, "problem_mark", None)
    line = mark.line + 1 if mark is not None else None
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    position = getattr(error, "position", None)
    if line is None and isinstance(position, int):
        line = text.count("\n", 0, position) + 1
    do = "check the indentation and quotes of this line and the one before"
    context, opened = getattr(error, "context", None) or "", getattr(error, "context_mark", None)
    start = opened.line + 1 if opened is not None else line
    if start != line and context in OPENED:
        # What is never closed is noticed far below: the line to correct is where it opens.
        problem, do, at_start = f"{problem} on line {line}, {context}", *OPENED[context]
        problem += "" if at_start else f" that begins on line {start}"
        line = start if at_start else line
    if line is not None and "\t" in text.splitlines()[min(line, len(text.splitlines())) - 1]:
        do = "indent with spaces; this line has a tab"
    return SpecError("YAML", found=problem, do=do, where=Where(path, line))


def _unclear(value: object, text: str) -> tuple[str, str, str] | None:
    """What is needed, found and to do where a scalar does not say to everyone what it says to YAML."""
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        needed = f"whole numbers of at most {MAX_BITS} bits"
        return needed, text[:60], "write a smaller number, or put it in quotes if it is text"
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number", text, "write a number, or leave the key out"
    if isinstance(value, int | float) and not isinstance(value, bool) and not _plain(text):
        # YAML 1.1 reads 010 as eight and 1:30 as ninety.
        return "a number in plain decimal", f"{text}, which YAML reads as {value}", f"write {value}"
    if isinstance(value, str) and any(unicodedata.category(sign) == "Cc" for sign in value):
        if all(sign in "\n\t" for sign in value if unicodedata.category(sign) == "Cc"):
            return None
        return "text without control characters", brief(value), "remove them"
    return None


def _plain(text: str) -> bool:
    return PLAIN_NUMBER.fullmatch(text) is not None


class _Builder:
    """Turns YAML nodes into plain data, and notes the line of each key."""

    def __init__(self, path: str, lines: dict[Loc, int]) -> None:
        self.path = path
        self.lines = lines
        # Only the resolver of scalars is used: no text is parsed by this instance.
        self.scalars = yaml.SafeLoader("")

    def mapping(self, node: yaml.MappingNode, loc: Loc) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node)
            here = (*loc, key)
            line = _line(key_node)
            if key in out:
                raise SpecError(
                    f"`{dotted(here)}` once",
                    found=f"it again; first on line {self.lines[here]}",
                    do="remove one of the two",
                    where=Where(self.path, line, dotted(here)),
                )
            self.lines[here] = line
            out[key] = self._value(value_node, here)
        return out

    def _key(self, node: yaml.Node) -> str:
        line = _line(node)
        if not isinstance(node, yaml.ScalarNode):
            raise self._template_error("a key that is itself a mapping, as unquoted `{{` is", line)
        self._refuse_template(node.value, line)
        if node.tag != "tag:yaml.org,2002:str":
            raise SpecError(
                "keys that are text",
                found=f"{node.value[:60]} (YAML reads it as {node.tag.rpartition(':')[2]})",
                do=f'write "{node.value[:60]}" in quotes, or another key',
                where=Where(self.path, line),
            )
        return str(node.value)

    def _value(self, node: yaml.Node, loc: Loc) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, loc)
        if isinstance(node, yaml.SequenceNode):
            items = []
            for index, child in enumerate(node.value):
                self.lines[(*loc, index)] = _line(child)
                items.append(self._value(child, (*loc, index)))
            return items
        return self._scalar(node, loc)

    def _scalar(self, node: yaml.Node, loc: Loc) -> Any:
        self._refuse_template(node.value, _line(node))
        try:
            value = self.scalars.construct_object(node)
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            needed, found = "a value that YAML can read", f"{brief(node.value)} ({error})"
            do = "put it in quotes if it is text"
        else:
            problem = _unclear(value, node.value)
            if problem is None:
                return value
            needed, found, do = problem
        raise SpecError(
            needed, found=found, do=do, where=Where(self.path, _line(node), dotted(loc))
        )

    def _refuse_template(self, text: str, line: int) -> None:
        for mark in TEMPLATE_MARKS:
            if mark in text:
                raise self._template_error(f"`{mark}` in {text[:60]!r}", line)

    def _template_error(self, found: str, line: int) -> SpecError:
        return SpecError(
            "plain values, since Ansible would expand a template here",
            found=found,
            do="write the value itself; a chat template is a file, named in chat.template_file",
            where=Where(self.path, line),
        )
