"""What is every section of cluster.yml made of? The base class and the types of its fields."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from rayserve.described import Described

Auto = Literal["auto"]
Count = Annotated[int, Field(ge=1)]
AutoCount = Annotated[int, Field(ge=1)] | Auto
Seconds = Annotated[float, Field(gt=0)]
NAME = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
MODEL_NAME = r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$"
HF_ID = r"^$|^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$"
COMMIT = re.compile(r"[0-9a-f]{40}")
"""A commit of a Hugging Face repository, which never moves, as a branch or tag may."""
PATTERNS = {
    NAME: "of lower-case letters, digits and inner hyphens, at most 63",
    MODEL_NAME: "of letters, digits and . _ - /, at most 128",
    HF_ID: "like organisation/name",
}
"""What each pattern asks for, in words."""
Name = Annotated[str, Field(pattern=NAME)]
"""Lower-case letters, digits and hyphens: safe in host groups, labels, paths and URLs."""
ModelName = Annotated[str, Field(pattern=MODEL_NAME)]
"""What clients put in `model`."""
Text = Annotated[str, Field(min_length=1)]
OptionalPath = str


class Section(Described):
    """Base of every section: unknown keys and wrong types are errors; values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
