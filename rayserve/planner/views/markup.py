"""How does text become HTML, without a name in it ever becoming markup?

Everything goes through `element`: a plain text is escaped, and only what `element` made stays as it is.
"""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterable, Sequence

VOID = frozenset({"meta"})
"""Elements without an end."""
REPLACED = frozenset({"Cc", "Cs", "Co", "Cn"})
"""Control characters, lone surrogates and what is no character: HTML cannot carry them."""
STEERING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""They turn the direction of what follows, and so what a reader takes it for."""


class Markup(str):
    """HTML: text that is escaped already."""

    __slots__ = ()


def escaped(text: str) -> Markup:
    """A text as HTML that shows it; HTML stays as it is."""
    if isinstance(text, Markup):
        return text
    return Markup(html.escape("".join(map(_shown, text))))


def _shown(sign: str) -> str:
    unseen = sign in STEERING or unicodedata.category(sign) in REPLACED
    return "\ufffd" if unseen and sign not in "\n\t" else sign


def element(name: str, *children: str, **attributes: str | float | None) -> Markup:
    """An element of HTML or SVG.

    `class_` is the attribute class, an underscore within a name is a hyphen; None leaves it out.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(_attribute(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Markup(f"<{name}{given}>")
    return Markup(f"<{name}{given}>{joined(children)}</{name}>")


def joined(children: Iterable[str]) -> Markup:
    """Several pieces, one after the other."""
    return Markup("".join(map(escaped, children)))


def _attribute(value: str | float) -> str:
    return value if isinstance(value, str) else f"{round(value, 2):g}"


def folded(name: str, content: Markup) -> Markup:
    """Content that opens at its name."""
    return element("details", element("summary", name), content)


def table(
    caption: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: frozenset[int] = frozenset(),
    kind: str = "",
    strong: int | None = None,
) -> Markup:
    """A table whose first column names its rows; the columns in `numbers` are set to the right.

    It scrolls by itself where the page is narrow; `kind: stack` puts the cells below each other.
    `strong` is the place of a row that stands out.
    """

    def cell(name: str, place: int, text: str, **attributes: str) -> Markup:
        right = "n" if place in numbers else None
        return element(name, text, class_=right, **attributes)

    head = [cell("th", place, text, scope="col") for place, text in enumerate(headings)]
    body = [
        element(
            "tr",
            cell("th", 0, row[0], scope="row"),
            *(cell("td", place, text) for place, text in enumerate(row[1:], 1)),
            class_="strong" if number == strong else None,
        )
        for number, row in enumerate(rows)
    ]
    whole = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *head)),
        element("tbody", *body),
        class_=kind or None,
    )
    return element("div", whole, class_="scroll", role="region", tabindex="0", aria_label=caption)
