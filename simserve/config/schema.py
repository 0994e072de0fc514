"""The JSON Schema of a configuration, which editors check and complete YAML files by."""

from __future__ import annotations

import json

from simserve.config.model import RunConfig

__all__ = ["schema_text"]


def schema_text() -> str:
    """The schema as JSON text, ending in a newline."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **RunConfig.model_json_schema(),
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
