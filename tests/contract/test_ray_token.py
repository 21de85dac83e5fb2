"""Where is Ray's token found, and which file is refused as one?"""

from __future__ import annotations

import os

import pytest

from rayserve.clients import MAX_TOKEN, find_token, read_token
from rayserve.errors import HostError


def test_a_token_that_cannot_be_used_is_named(tmp_path):
    """A missing, empty or binary token file says which file, and what to do; a good one is read."""
    path = tmp_path / "token"
    with pytest.raises(HostError, match=str(path)):
        read_token(str(path))
    for content, told in (("\n", "empty"), ("a\nb", "one line"), ("ключ", "ASCII")):
        path.write_text(content)
        with pytest.raises(HostError, match=told):
            read_token(str(path))
    path.write_text("abc\n")
    assert read_token(str(path)) == "abc"


def test_a_token_file_that_is_a_pipe_or_too_long_is_refused_at_once(tmp_path):
    """A pipe may never answer, and no token is so long."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long").write_text("a" * (MAX_TOKEN + 1))
    with pytest.raises(HostError, match="not a regular file"):
        read_token(str(tmp_path / "pipe"))
    with pytest.raises(HostError, match="one line"):
        read_token(str(tmp_path / "long"))


def test_the_token_is_found_where_ray_finds_it(tmp_path, monkeypatch):
    """The file that is named, then the variable, then ~/.ray/auth_token by HOME; else there is none."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_token(None, {}) == ("", "")
    home = tmp_path / ".ray" / "auth_token"
    home.parent.mkdir()
    home.write_text("of-home")
    (tmp_path / "named").write_text("of-file")
    assert find_token(None, {}) == ("of-home", str(home))
    assert find_token(None, {"RAY_AUTH_TOKEN": "of-env"}) == ("of-env", "RAY_AUTH_TOKEN")
    named = str(tmp_path / "named")
    assert find_token(named, {"RAY_AUTH_TOKEN": "of-env"}) == ("of-file", named)
