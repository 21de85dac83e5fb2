"""What the fields of a model mean, read from the source."""

from __future__ import annotations

from rayserve.described import Described, descriptions


class Base(Described):
    """A model whose fields another has too."""

    plain: int
    first: int
    """Of the base."""


class Model(Base):
    """A model of a test."""

    first: int
    """On one line,
    and on a second.
    """
    inner: Base
    """A model within, which
        keeps its indentation."""


def test_a_field_means_what_stands_below_it():
    """Texts below fields count, those of base classes too; a subclass may say it anew."""
    assert descriptions(Base) == {"first": "Of the base."}
    assert descriptions(Model) == {
        "first": "On one line,\nand on a second.",
        "inner": "A model within, which\nkeeps its indentation.",
    }


def test_a_schema_tells_what_fields_mean():
    """The JSON Schema describes the fields of a model and of those within it."""
    schema = Model.model_json_schema()
    assert schema["properties"]["first"]["description"] == "On one line,\nand on a second."
    assert schema["properties"]["inner"]["description"].startswith("A model within")
    assert "description" not in schema["properties"]["plain"]
    assert schema["$defs"]["Base"]["properties"]["first"]["description"] == "Of the base."
