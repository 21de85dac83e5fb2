"""What does each field of a model mean? The text below it in the source, read when someone asks.

pydantic can read these texts itself (`use_attribute_docstrings`), but then parses the source of every
model as it is imported, also for the many commands that explain no field.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic_core import CoreSchema


class Described(BaseModel):
    """Base of models whose JSON Schema tells what their fields mean."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """The schema, with the description of each field."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in descriptions(cls).items():
            properties[name]["description"] = text
        return schema


@functools.cache
def descriptions(model: type[BaseModel]) -> Mapping[str, str]:
    """The docstring of each field that has one, those of base classes included."""
    texts: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, Described) and base is not Described:
            texts |= _docstrings(base)
    return {name: texts[name] for name in model.model_fields if name in texts}


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in itertools.pairwise(tree.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
