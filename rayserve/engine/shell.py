"""Which words does a pasted command line hold? A reader of shell text that runs nothing.

text ──(clean)──> plain characters ──(split)──> commands of words, and notes on what was mended

It knows what people paste: prompt signs, typographic quotes and dashes, comments after a backslash,
backslashes that trailing blanks disarm, lines that lost theirs. What a shell would run or look up
beside the command is refused or left as it stands; nothing is executed, expanded or read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from rayserve.errors import InputError, Where

MAX_CHARS = 64 * 1024
MAX_WORDS = 2000
MOST_NAME = 80
"""Characters of a variable's name."""
SEPARATORS = ("\n", ";", "&&", "||", "|", "&")
_QUOTES = str.maketrans(
    dict.fromkeys("\u201c\u201d\u201e\u00ab\u00bb", '"') | dict.fromkeys("\u2018\u2019\u201a", "'")
)
_SPACES = str.maketrans(dict.fromkeys("\u00a0\u2007\u202f\u3000", " "))
_INVISIBLE = str.maketrans(dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad"))
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
_LONG_DASH = re.compile(rf"(?<![^\s\"'])[{_DASHES}]+-*(?=[A-Za-z])")
_FLAG = re.compile(rf"(?<!\S)--?[A-Za-z][\w.{_DASHES}-]*")
_HYPHENS = str.maketrans(dict.fromkeys(_DASHES, "-"))
_PROMPT = re.compile(
    r"[ \t]*(?:\([\w.-]+\)[ \t]*)?"
    r"(?:(?:[\w.-]+@[\w.-]+(?::[^\s$#]*)?[ \t]*|\[[^\]\n]*\])[$#]|[$\u276f%!])"
    r"(?:[ \t]+(?=\S)|(?<=!)(?=[a-z]))"
)
_FENCE = re.compile(r"[ \t]*(?:```.*|~~~.*|%%(?:bash|sh)\b.*)")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_BREAKS = re.compile(r"\r\n?|[\u2028\u2029]")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?[-=]([^{}$`]*))?\}|(\w+)|([@*#?$!]))")
_FLAG_AHEAD = re.compile(r"(?:[ \t]*+(?:#[^\n]*+)?\n)*+[ \t]*+(?:>[ \t]*+)?(?=--?[A-Za-z])")
_JOINED = re.compile(r"([\\^`])([ \t]*+)(#[^\n]*+)?(?:\n|$)")
_MORE = re.compile(r"[ \t]*+>[ \t]+(?=-)")
_REDIRECT = re.compile(r"&?[<>]+&?[ \t]*+\|?[ \t]*+")
_ESCAPED = {"n": "\n", "t": "\t", "\\": "\\", '"': '"'}
_ESCAPE = re.compile(r'\\([nt\\"])')
"""What $'…' spells out, as far as JSON needs it."""
_SUBSTITUTION = re.compile(
    r"\$\((?:[^()`'\"\n]|'[^'\n]*+'|\"[^\"\n]*+\"|\((?:[^()\n])*+\))*+\)|`[^`\n]*+`"
)
"""A command that a shell would run to fill in a value, on one line, at most two brackets deep."""
_PLACEHOLDER = re.compile(r"<[A-Za-z][^<>\n|;&]{0,60}>|\{[A-Za-z][\w./-]*(?: [\w./-]+){1,6}\}")


@dataclass(frozen=True)
class Note:
    """Something in the text that was mended or left out; `line` is 1-based."""

    kind: str
    what: str
    line: int


@dataclass(frozen=True)
class Word:
    """One word, quotes removed; `variables` in it stand between NUL characters until `fill`."""

    text: str
    line: int
    dashed: bool = False
    """It began with a dash that no quote or backslash hid: a flag."""

    def fill(self, values: dict[str, str]) -> Word:
        """The word with the variables whose values are known; others stand as ${NAME}."""
        if "\0" not in self.text:
            return self
        parts = self.text.split("\0")
        for index in range(1, len(parts), 2):
            name, given, default = parts[index].partition("\1")
            parts[index] = values.get(name, default if given else f"${{{name}}}")
        text = "".join(parts)
        return Word(text, self.line, self.dashed or text.startswith("-"))


@dataclass(frozen=True)
class Simple:
    """One command of a text, and what stands between it and the next."""

    words: tuple[Word, ...]
    after: str


@dataclass
class _State:
    words: list[Word] = field(default_factory=list)
    commands: list[Simple] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def note(self, kind: str, what: str, line: int) -> None:
        if all(note.kind != kind for note in self.notes):
            self.notes.append(Note(kind, what, line))

    def end(self, separator: str) -> None:
        if self.words:
            self.commands.append(Simple(tuple(self.words), separator))
            self.words = []


def refuse(needed: str, found: str, do: str, line: int | None = None) -> InputError:
    """The error of a text that cannot be read as a command line."""
    return InputError(needed, found=found, do=do, where=Where("command", line))


def split(text: str) -> tuple[list[Simple], list[Note]]:
    """The commands in `text`, and notes on what was mended.

    Raises:
        InputError: the text is too long, holds control characters, an unclosed quote, or what a shell
            would run to fill it in.
    """
    state = _State()
    plain = _clean(text, state)
    reader = _Reader(plain, state)
    reader.run()
    state.end("\n")
    return state.commands, state.notes


def clean(text: str) -> str:
    """The text with plain quotes, dashes and line ends, as `split` reads it.

    Raises:
        InputError: it is too long, or holds control characters.
    """
    return _clean(text, _State())


def _clean(text: str, state: _State) -> str:
    if len(text) > MAX_CHARS:
        raise refuse(
            f"a command line of at most {MAX_CHARS // 1024} KiB",
            f"{len(text) // 1024} KiB",
            "paste the command alone",
        )
    text = _BREAKS.sub("\n", text)
    control = _CONTROL.search(text)
    if control is not None:
        line = text.count("\n", 0, control.start()) + 1
        raise refuse(
            "plain text",
            f"the control character {control[0]!r}",
            "paste it from a plain editor",
            line,
        )
    lines = []
    for number, row in enumerate(text.split("\n"), 1):
        mended = row.translate(_INVISIBLE).translate(_SPACES).translate(_QUOTES)
        mended = _LONG_DASH.sub(_long_dash, mended)
        mended = _FLAG.sub(lambda match: match[0].translate(_HYPHENS), mended)
        if mended != row:
            state.note(
                "typography", "typographic quotes, dashes or blanks, as web pages put them", number
            )
        if _FENCE.fullmatch(mended):
            mended = ""
        prompt = _PROMPT.match(mended)
        if prompt is not None:
            state.note("prompt", f"the prompt sign `{prompt[0].strip()[-1]}`", number)
            mended = mended[prompt.end() :]
        lines.append(mended)
    return "\n".join(lines)


def _long_dash(match: re.Match[str]) -> str:
    """A typographic dash before a flag stands for two; before a short form such as tp for one."""
    rest = match.string[match.end() :]
    short = re.match(r"(tp|pp|dp|q|O\d?)(?=[\s=]|$)", rest)
    return "-" if short else "--"


class _Reader:
    """Reads characters into words and separators, as a shell does, and mends what people break."""

    def __init__(self, text: str, state: _State) -> None:
        self.text = text
        self.state = state
        self.at = 0
        self.line = 1
        self.count = 0

    def run(self) -> None:
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t":
                self.at += 1
            elif char == "\n":
                self._newline()
            elif char == "#":
                self._comment()
            elif self._continuation():
                continue
            elif _PLACEHOLDER.match(self.text, self.at):
                self._word()
            elif char in ";&|<>()":
                self._operator()
            else:
                self._word()

    def _newline(self) -> None:
        self.at += 1
        self.line += 1
        if not self.state.words:
            return
        # A comment or a lost backslash ends the command for a shell; a line that begins with a flag
        # can only go on with it.
        ahead = _FLAG_AHEAD.match(self.text, self.at)
        if ahead is None:
            self.state.end("\n")
            return
        self.state.note(
            "broken_line",
            "a line that does not end in a backslash, with flags below it: a shell ends the command "
            "there and drops the rest",
            self.line - 1,
        )
        self.line += ahead[0].count("\n")
        self.at = ahead.end()

    def _comment(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def _continuation(self) -> bool:
        """Skip a backslash (or cmd's ^, PowerShell's `) that is meant to join two lines."""
        match = _JOINED.match(self.text, self.at)
        if match is None or (match[1] == "`" and match[3]):
            return False
        if match[1] != "\\":
            self.state.note(
                "foreign_shell", f"`{match[1]}` at a line's end, as Windows has it", self.line
            )
        elif match[2] or match[3]:
            what = "a comment" if match[3] else "blanks"
            self.state.note(
                "broken_continuation",
                f"{what} after a backslash: a shell takes the backslash for the blank, ends the command "
                "there and drops the rest",
                self.line,
            )
        self.at = match.end()
        self.line += match[0].count("\n")
        # A flag behind > can only be a continuation prompt; anything else there is a redirection.
        lead = _MORE.match(self.text, self.at)
        if lead is not None:
            self.at = lead.end()
        return True

    def _operator(self) -> None:
        two = self.text[self.at : self.at + 2]
        char = two[:1]
        if two in {"&&", "||"}:
            self.at += 2
            self.state.end(two)
        elif two in {"<(", ">("} or char in "()":
            raise refuse(
                "one plain command", f"a subshell, `{char}`", "write what it would give", self.line
            )
        elif two == "<<":
            raise refuse("one plain command", "a here-document, `<<`", "paste the flags", self.line)
        elif char in "<>" or two == "&>":
            self._redirect()
        else:
            self.at += 1
            self.state.end(char)

    def _redirect(self) -> None:
        if self.state.words and self.state.words[-1].text in {"1", "2"}:
            touching = self.text[self.at - 1] in "12"
            if touching:
                self.state.words.pop()
        match = _REDIRECT.match(self.text, self.at)
        assert match is not None
        self.state.note("redirection", "where the output goes", self.line)
        self.at = match.end()
        for _ in self._parts():
            pass  # the file's name is read as a word, and dropped

    def _substitution(self) -> InputError:
        return refuse(
            "values written out",
            "a command that the shell would run to fill one in, $(…) or `…`",
            "write what it would give; nothing is run here",
            self.line,
        )

    def _word(self) -> None:
        line, start = self.line, self.at
        parts = list(self._parts())
        dashed = self.text[start : start + 1] == "-"
        self.state.words.append(Word("".join(parts), line, dashed))
        self.count += 1
        if self.count > MAX_WORDS:
            raise refuse(f"at most {MAX_WORDS} words", "more", "paste the command alone", line)

    def _parts(self) -> Iterator[str]:
        start = self.at
        while self.at < len(self.text):
            char = self.text[self.at]
            placeholder = _PLACEHOLDER.match(self.text, self.at)
            if placeholder is not None:
                self.at = placeholder.end()
                yield placeholder[0]
            elif char in " \t\n;&|<>" or (char in "()" and not self._inside()):
                return
            elif char in "'\"":
                yield from self._quoted(char, start)
            elif self.text.startswith("$'", self.at):
                self.at += 1
                yield _ESCAPE.sub(lambda match: _ESCAPED[match[1]], "".join(self._quoted("'")))
            elif self.text.startswith('$"', self.at):
                self.at += 1
                yield from self._quoted('"')
            elif char == "\\":
                if self._continuation():
                    return
                self.at += 2
                yield self.text[self.at - 1 : self.at]
            elif char in "$`":
                yield self._assigned(start) or self._dollar()
            else:
                self.at += 1
                yield char

    def _assigned(self, start: int) -> str:
        """A variable that a command would fill, `NAME=$(…)`: passed over, and its value not known."""
        if start < 0 or self.at - start > MOST_NAME:
            return ""
        named = re.fullmatch(r"([A-Za-z_]\w*)=\"?", self.text[start : self.at])
        end = _SUBSTITUTION.match(self.text, self.at)
        if named is None or end is None or self.text.startswith("$(pwd)", self.at):
            return ""
        self.at = end.end()
        self.line += end[0].count("\n")
        return f"\0{named[1]}\0"

    def _inside(self) -> bool:
        """Whether a bracket stands inside a word, as in --allowed-origins=(a): kept as it is."""
        return self.at > 0 and self.text[self.at - 1] not in " \t\n;&|"

    def _quoted(self, quote: str, start: int = -1) -> Iterator[str]:
        start_line = self.line
        self.at += 1
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "\n":
                self.line += 1
            if char == quote:
                self.at += 1
                return
            if (
                quote == '"'
                and char == "\\"
                and self.text[self.at + 1 : self.at + 2] in set('"\\$`\n')
            ):
                self.line += self.text[self.at + 1] == "\n"
                yield "" if self.text[self.at + 1] == "\n" else self.text[self.at + 1]
                self.at += 2
            elif quote == '"' and char in "$`":
                yield self._assigned(start) or self._dollar()
            else:
                self.at += 1
                yield char
        raise refuse(
            f"a closing {quote}",
            f"none after the one on line {start_line}",
            "close the quote",
            start_line,
        )

    def _dollar(self) -> str:
        if self.text.startswith(("$(pwd)", "`pwd`"), self.at):
            self.at += 6 if self.text[self.at] == "$" else 5
            return "\0PWD\0"
        if self.text[self.at] == "`" or self.text.startswith("$(", self.at):
            raise self._substitution()
        match = _VARIABLE.match(self.text, self.at)
        if match is None:
            self.at += 1
            return "$"
        self.at = match.end()
        name = match[1] or match[3] or match[4]
        return f"\0{name}\1{match[2]}\0" if match[2] is not None else f"\0{name}\0"
