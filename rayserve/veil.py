"""Which texts may be a key or a password, so that no message and no file repeats them?"""

from __future__ import annotations

import re

MIN_KEY_CHARACTERS = 16
"""Of an API key; a file with a shorter one is refused (rayserve.keyfile)."""
_ISSUED = (
    r"(?:(?:sk|pk|rk)-(?:(?=[\w-]*[A-Z0-9])[\w-]{12,}|[a-z]{16,}(?![\w-]))|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}"
    r"|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{16,}|AKIA[A-Z0-9]{12,}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)|(?<=://)[^/@\s:]+:[^/@\s]++(?=@)"
)
"""What providers begin their keys with, and a password in a URL."""
_ANYWHERE = re.compile(rf"(?<![\w.-]){_ISSUED}")
_IN_LOCATION = re.compile(rf"(?<![\w-]){_ISSUED}")
"""As a part of a dotted key."""
_NO_FOLDER = re.compile(rf"(?<![\w./-]){_ISSUED}")
"""As a value of its own: a folder of a path may begin like a key."""
_PREFIXED = re.compile(r"(?:sk|pk|rk)[-_][\w-]{8,}")
"""Where a path should stand, what begins like a provider's key is one, in whichever letters."""
_GENERATED = re.compile(
    rf"(?=.*[0-9A-Z])(?=.*[A-Za-z])[A-Za-z0-9+=_-][A-Za-z0-9+/=_-]{{{MIN_KEY_CHARACTERS - 1},}}"
)
HIDDEN = "(not shown)"


def veiled(text: str) -> str:
    """The text without what has the form of a key or a password."""
    return _ANYWHERE.sub(HIDDEN, text)


def veiled_location(key: str) -> str:
    """A dotted key of a file without the parts that have the form of a key or a password."""
    return _IN_LOCATION.sub(HIDDEN, key)


def holds_secret(text: str) -> bool:
    """Whether a value has the form of a provider's key, or a password in a URL."""
    return _NO_FOLDER.search(text) is not None


def may_be_key(text: str) -> bool:
    """Whether what should be the path of a file is rather a key: long, random, without folder or dot."""
    forms = (_PREFIXED, _GENERATED)
    return holds_secret(text) or any(form.fullmatch(text) is not None for form in forms)
