"""What went wrong with a hub, in words that help?

Texts of other libraries are not repeated: a token or a signed URL may be in them.
"""

from __future__ import annotations

import errno
import os
import re
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import constants, errors, hf_hub_url

from rayserve.errors import HostError, RayserveError, SpecError, Where
from rayserve.hub.bounds import AGAIN, CHECK, STEP_S, RefusedAnswerError

INSTEAD: Final = "copy config.json of the checkpoint here and name it in `config`"
HOST: Final = re.compile(r"[\w-]{1,63}(\.[\w-]{1,63}){0,30}\.?|[0-9a-f:.]{2,45}")
"""Name or address; a longer label is none (RFC 1035, 2.3.4)."""
LOG_IN: Final = "set HF_TOKEN, or log in with `hf auth login`"
TOKENS: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""Asked for a token before its file is."""
FAILURES: Final = (
    OSError,
    ValueError,
    RuntimeError,
    httpx2.HTTPError,
    httpx2.InvalidURL,
    errors.OIDCError,
    RefusedAnswerError,
)
"""What huggingface_hub and its client raise."""


@dataclass(frozen=True)
class Asked:
    """What was asked for."""

    hf_id: str
    revision: str
    """Branch, tag or commit."""
    file: str
    endpoint: str
    where: Where
    """The place in the spec that names the id."""

    @property
    def host(self) -> str:
        """The hub, without a password that its URL may have."""
        return host_of(self.endpoint) or "the hub"

    @property
    def url(self) -> str:
        """Where the file is.

        Raises:
            RefusedAnswerError: the endpoint is none.
        """
        if not host_of(self.endpoint):
            raise RefusedAnswerError("HF_ENDPOINT is no URL", do="write it as https://host")
        return str(
            hf_hub_url(self.hf_id, self.file, revision=self.revision, endpoint=self.endpoint)
        )

    @property
    def place(self) -> str:
        """The file, for messages."""
        return f"{self.file} of {self.hf_id} at {self.revision}"


class UnreadError(Exception):
    """One of several files cannot be read: which one, and one of `FAILURES` why."""

    def __init__(self, asked: Asked, error: Exception) -> None:
        self.asked, self.error = asked, error
        super().__init__(asked.place)


def host_of(endpoint: str) -> str:
    """Name or address in the URL of a hub; empty: it is no such URL."""
    if not endpoint.isprintable():
        return ""
    try:
        parts = urlsplit(endpoint)
        host, _port = parts.hostname or "", parts.port  # either may raise
    except ValueError:
        return ""
    return host if parts.scheme in {"http", "https"} and HOST.fullmatch(host) else ""


def check_token_file() -> None:
    """Look at the token file before it is opened: a pipe would be waited for without end.

    Raises:
        RefusedAnswerError: it is none.
    """
    path = Path(constants.HF_TOKEN_PATH)
    if path == Path(os.devnull) or any(os.environ.get(name) for name in TOKENS):
        return  # it is not waited for, or not read at all
    try:
        plain = stat.S_ISREG(path.stat().st_mode) and os.access(path, os.R_OK)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError:
        plain = False
    if not plain:
        raise RefusedAnswerError(
            "a token file that cannot be read: a folder, a pipe, or not for this user",
            do="correct HF_TOKEN_PATH, or unset it",
        )


def refusal(error: Exception, asked: Asked) -> RayserveError:
    """The error of ours for one of `FAILURES`."""
    known = _of_the_id(error, asked)
    if known is not None:
        return known
    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else None
    found, do = _of_the_way(cause if isinstance(cause, Exception) else error)
    return HostError(
        f"{asked.place}, from {asked.host} or this machine's cache of it",
        found=found,
        do=f"{do}; or {INSTEAD}",
        where=asked.where,
    )


def _of_the_id(error: Exception, asked: Asked) -> RayserveError | None:
    """What is wrong with id, revision, file or access; None: something else is."""
    where, host = asked.where, asked.host
    if isinstance(error, errors.RevisionNotFoundError):
        return SpecError(
            f"a branch, tag or commit of {asked.hf_id} on {host}",
            found=f"no `{asked.revision}`",
            do="correct `revision`",
            where=where,
        )
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return SpecError(
            asked.place,
            found=f"no such file on {host}",
            do="name a checkpoint in the format of Transformers; GGUF and others have none",
            where=where,
        )
    if not isinstance(error, errors.HfHubHTTPError):
        return None
    status = error.response.status_code
    token = "authorization" in error.response.request.headers
    gated = isinstance(error, errors.GatedRepoError)
    if gated or status in {httpx2.codes.UNAUTHORIZED, httpx2.codes.FORBIDDEN}:
        kind = "a gated model" if gated else "a private model, or none of this name"
        sent = "a token that may not read it" if token else "no token"
        renew = "use a token of an account that may read it" if token else LOG_IN
        accept = f"accept its conditions on its page on {host}, then {renew}"
        return HostError(
            f"access to {asked.hf_id} on {host}",
            found=f"HTTP {status}: {kind}; {sent}",
            do=f"{accept if gated else f'correct the id, or {renew}'}; or {INSTEAD}",
            where=where,
        )
    if isinstance(error, errors.RepositoryNotFoundError) or status == httpx2.codes.NOT_FOUND:
        return SpecError(
            f"a model {asked.hf_id} on {host}",
            found=f"HTTP {status}: none of this name" + ("" if token else ", or a private one"),
            do="correct the id" + ("" if token else f", or {LOG_IN}"),
            where=where,
        )
    return None


def _of_the_way(error: Exception) -> tuple[str, str]:
    """What lies between this machine and the hub: found, do."""
    if isinstance(error, RefusedAnswerError):
        return error.found, error.do
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, and it is not in the cache", "unset HF_HUB_OFFLINE"
    if isinstance(error, errors.HfHubHTTPError):
        return f"HTTP {error.response.status_code}", AGAIN
    if isinstance(error, errors.FileMetadataError):
        return "an answer that is not a model hub's", CHECK
    if isinstance(error, httpx2.TimeoutException):
        return (
            f"no answer in {STEP_S:.0f} s",
            "check network, proxies and HF_ENDPOINT, and try again",
        )
    if isinstance(error, httpx2.ConnectError):
        return _unconnected(error), "check network, proxies and HF_ENDPOINT, and try again"
    if isinstance(error, httpx2.UnsupportedProtocol | httpx2.InvalidURL):
        return "a redirect to what is no URL of a hub", CHECK  # HF_ENDPOINT is one: Asked.url
    if isinstance(error, PermissionError):
        return "the cache cannot be written", "set HF_HOME to a folder that can be written"
    if isinstance(error, httpx2.LocalProtocolError | UnicodeError):
        return _unsendable(error)
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return str(error.strerror), "free some space in the folder of HF_HOME"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({type(error).__name__})", "check the folder of HF_HOME"
    return f"an answer that broke off or was wrong ({type(error).__name__})", AGAIN


def _unsendable(error: Exception) -> tuple[str, str]:
    """Characters that neither a header nor a file of the cache can have: found, do."""
    if isinstance(error, UnicodeDecodeError):
        return (
            "a file of the cache or of the token that is no text",
            "look at refs/ of the model in the folder of HF_HOME, and at the token file",
        )
    named = sorted(
        name
        for name, value in os.environ.items()
        if name.startswith("HF_") and not (value.isascii() and value.isprintable())
    )
    if named:
        return f"characters in {', '.join(named)[:200]} that no header has", "correct it"
    return "a token with characters that no token has", "correct HF_TOKEN or the token file"


def _unconnected(error: BaseException) -> str:
    """Why there is no connection, in the words of the system, which know no URL."""
    cause: BaseException | None = error
    for _ in range(8):  # as deep as client, transport and socket are
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"a certificate that is not trusted here: {cause.verify_message[:80]}"
        if isinstance(cause, OSError) and cause.strerror and not isinstance(cause, ssl.SSLError):
            return cause.strerror[:80]
        if cause is not None:
            cause = cause.__cause__ or cause.__context__
    return "no connection"
