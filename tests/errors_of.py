"""Which of our errors does a call end with?"""

from __future__ import annotations

from collections.abc import Callable

from rayserve.errors import RayserveError


def error_of(call: Callable[..., object], *arguments: object) -> RayserveError | None:
    """Our error that the call ends with; None where it returns. Any other error goes on."""
    try:
        call(*arguments)
    except RayserveError as error:
        return error
    return None
