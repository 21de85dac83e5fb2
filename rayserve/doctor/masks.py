"""Which parts of a log's line are keys and passwords, by their form or by the name before them?

Nothing of a masked value stays. Where it is not clear how far a value goes, more is masked than need be.
"""

from __future__ import annotations

import re

from rayserve.veil import HIDDEN, veiled

_NAME = (
    r"(?:api[_ -]?keys?|token|secret(?:[_-]?access)?(?:[_-]?key)?|passw(?:or)?d|passphrase"
    r"|access[_ -]?key(?:[_-]?id)?|private[_ -]?key|credentials?)"
)
"""How what holds a key or a password is named, at its end."""
_QUOTE = r"\\*[\"']"
_VALUE = (
    r"(?:\[[^\]]*(?:\]|$)|\\+[\"'][^\"']*(?:[\"']|$)"
    r"|\"(?:[^\"\\]|\\.)*(?:\"|\\?$)|'(?:[^'\\]|\\.)*(?:'|\\?$)|\S+)"
)
"""A list, a text in quotes (also escaped ones, also cut), or all up to the next space."""
_HEADER = re.compile(
    rf"(authorization(?:{_QUOTE})?\s*[:=,]\s*(?:b?{_QUOTE})?)[^\"']+|(\bbearer\s+)(?!tokens?\b)\S+",
    re.IGNORECASE,
)
_OPTION = re.compile(
    rf"((?<![\w-])--?(?:[\w-]*[_-])?{_NAME}(?:(?:{_QUOTE}),?\s*|=|\s+))(?!--){_VALUE}"
    rf"((?<=\S)(?:,?\s+(?!{_QUOTE}-|[-(]){_VALUE})*)",
    re.IGNORECASE,
)
"""`--api-key X Y`, also as a list of words; vLLM takes several."""
_NAMED = re.compile(
    rf"({_NAME}(?:{_QUOTE})?\s*[:=]+>?\s*)(?!{re.escape(HIDDEN)}){_VALUE}", re.IGNORECASE
)
"""`api_key=X`, `"api-key" : "X"`, `'api_key': ['X', 'Y']`."""
_SAID = re.compile(rf"(\b{_NAME}\s+(?:(?:is|was)\s+)?)({_VALUE})", re.IGNORECASE)
"""`token X`, `token is X`."""
_PLAIN = re.compile(r"[\W_]*(?:[a-z]{1,12}|[A-Za-z]{1,4}|\d{1,8})?[\W_]*")
"""What follows such a name in sentences about tokens: `token is invalid`, `token 128000`, `token IDs`."""
_FORM = re.compile(
    r"(?<=://)[^\s/:]*:[^\s/]*@"
    r"|(?<![\w-])(?:hf_\w{4,}|sk-[\w-]{4,}|eyJ[\w-]{5,}\.[\w-]+(?:\.[\w-]*)*)"
)
"""Name and password before a host; beginnings of keys, also where a log cut them; JSON web tokens."""


def masked(line: str) -> str:
    """A line of a log without keys and passwords."""
    line = _HEADER.sub(lambda match: f"{match[1] or match[2]}{HIDDEN}", line)
    line = _OPTION.sub(lambda match: f"{match[1]}{HIDDEN}", line)
    line = _NAMED.sub(lambda match: f"{match[1]}{HIDDEN}", line)
    line = _SAID.sub(_said, line)
    return veiled(_FORM.sub(lambda match: HIDDEN + "@" * match[0].endswith("@"), line))


def _said(match: re.Match[str]) -> str:
    if _PLAIN.fullmatch(match[2]) or HIDDEN.startswith(match[2]):
        return match[0]
    return f"{match[1]}{HIDDEN}"
