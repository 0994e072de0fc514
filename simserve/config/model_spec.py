"""How a configuration names a model: by a preset, or by a Hugging Face config.json.

A text that ends in `.json` or holds a `/` is a file's: no preset is called like that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema

from simserve.config import presets
from simserve.config.base import OneOf, StrictModel

__all__ = ["ModelFile", "ModelSpec", "is_path", "plain_spec"]


class ModelFile(StrictModel):
    """A model described by a Hugging Face config.json."""

    config: Annotated[str, Field(min_length=1)]
    """The config.json, relative to this configuration file."""


def is_path(text: str) -> bool:
    """Whether a text names a file, not a preset."""
    return text.endswith(".json") or "/" in text


def _form(value: Any) -> str:
    if isinstance(value, dict | ModelFile):
        return "file"
    return "path" if isinstance(value, str) and is_path(value) else "name"


_OR_FILE = ", or a Hugging Face file as path/to/config.json or {config: path/to/config.json}"
ModelSpec = Annotated[
    Annotated[str, OneOf("model preset", presets.model_names, _OR_FILE), Tag("name")]
    | Annotated[ModelFile, Tag("file")]
    | Annotated[
        ModelFile,
        BeforeValidator(lambda path: {"config": path}),
        WithJsonSchema({"type": "string", "pattern": r"/|\.json$"}),
        Tag("path"),
    ],
    Discriminator(_form),
]


def plain_spec(spec: str | ModelFile) -> str | Mapping[str, Any]:
    """What `presets.load_model` takes."""
    return {"config": spec.config} if isinstance(spec, ModelFile) else spec
