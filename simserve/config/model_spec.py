"""How a configuration names a model: by a preset, or by a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from simserve.config import presets
from simserve.config.base import OneOf, StrictModel

__all__ = ["ModelFile", "ModelSpec", "plain_spec"]


class ModelFile(StrictModel):
    """A model described by a Hugging Face config.json."""

    config: Annotated[str, Field(min_length=1)]
    """The config.json, relative to this configuration file."""


def _name_or_file(value: Any) -> str:
    return "file" if isinstance(value, dict | ModelFile) else "name"


_OR_FILE = ", or a Hugging Face file as {config: path/to/config.json}"
ModelSpec = Annotated[
    Annotated[str, OneOf("model preset", presets.model_names, _OR_FILE), Tag("name")]
    | Annotated[ModelFile, Tag("file")],
    Discriminator(_name_or_file),
]


def plain_spec(spec: str | ModelFile) -> str | Mapping[str, Any]:
    """What `presets.load_model` takes."""
    return {"config": spec.config} if isinstance(spec, ModelFile) else spec
