"""The JSON Schema of a configuration, which editors check and complete YAML files by."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator
from textwrap import dedent
from typing import Any

from simserve.config.base import StrictModel
from simserve.config.sweep import SweepConfig

__all__ = ["schema_text"]


def schema_text() -> str:
    """The schema as JSON text, ending in a newline."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **SweepConfig.model_json_schema(),
    }
    _describe(schema, SweepConfig)
    for cls in _all_models(StrictModel):
        if cls.__name__ in schema["$defs"]:
            _describe(schema["$defs"][cls.__name__], cls)
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _all_models(cls: type[StrictModel]) -> Iterator[type[StrictModel]]:
    for child in cls.__subclasses__():
        yield child
        yield from _all_models(child)


def _describe(schema: dict[str, Any], cls: type[StrictModel]) -> None:
    """Add the docstrings of fields, those inherited included.

    Pydantic can do it, but whenever a class is made: that would cost every start of the program.
    """
    for base in reversed(cls.__mro__):
        if not issubclass(base, StrictModel):
            continue
        (body,) = ast.parse(dedent(inspect.getsource(base))).body
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if not (isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)):
                continue
            if isinstance(text.value, ast.Constant) and isinstance(field.target, ast.Name):
                properties = schema.get("properties", {})
                if (name := field.target.id) in properties:
                    description = inspect.cleandoc(str(text.value.value))
                    properties[name] = {"description": description, **properties[name]}
