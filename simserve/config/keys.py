"""Which keys a configuration may have where, read from the JSON Schema of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from simserve.config.document import KeyPath

__all__ = ["Schema", "kinds_at", "known_keys", "paths_by_key"]

Schema = Mapping[str, Any]
_KIND_KEYS = ("kind", "type")


def known_keys(schema: Schema, path: KeyPath, data: Any) -> list[str]:
    """Keys of the mapping at `path`; of a choice of mappings, those of the kind that `data` has."""
    options = [schema]
    for key in path:
        options = [one for option in options for one in _step(schema, option, key, data)]
        data = _entry(data, key)
    found = [variant for option in options for variant in _variants(schema, option, data)]
    return list(dict.fromkeys(key for one in found for key in one.get("properties", {})))


def kinds_at(schema: Schema, path: KeyPath) -> list[str]:
    """Names among which the mapping at `path` has to choose by its `kind` or `type`."""
    options = [schema]
    for key in path:
        options = [one for option in options for one in _step(schema, option, key, None)]
    names = []
    for option in options:
        for variant in _variants(schema, option, None):
            constants = (variant.get("properties", {}).get(key, {}) for key in _KIND_KEYS)
            names += [one["const"] for one in constants if "const" in one]
    return list(dict.fromkeys(names))


def paths_by_key(schema: Schema) -> dict[str, list[KeyPath]]:
    """Every key that exists, and where. Lists are passed over."""
    found: dict[str, list[KeyPath]] = {}
    for path in _walk(schema, schema, ()):
        places = found.setdefault(str(path[-1]), [])
        if path not in places:
            places.append(path)
    return found


def _walk(root: Schema, schema: Schema, path: KeyPath) -> Iterator[KeyPath]:
    for variant in _variants(root, schema, None):
        for key, inner in variant.get("properties", {}).items():
            yield (*path, key)
            yield from _walk(root, inner, (*path, key))


def _step(root: Schema, schema: Schema, key: str | int, data: Any) -> Iterator[Schema]:
    for variant in _variants(root, schema, data):
        if isinstance(key, int) and "items" in variant:
            yield variant["items"]
        elif key in variant.get("properties", {}):
            yield variant["properties"][key]


def _entry(data: Any, key: str | int) -> Any:
    if isinstance(data, dict):
        return data.get(key)
    if isinstance(data, list) and isinstance(key, int):
        return data[key]
    return None


def _variants(root: Schema, schema: Schema, data: Any) -> Iterator[Schema]:
    """The plain schemas that `schema` refers to or chooses from, those that `data` chose if any."""
    if "$ref" in schema:
        yield from _variants(root, root["$defs"][schema["$ref"].rsplit("/", 1)[-1]], data)
        return
    choices = [one for key in ("oneOf", "anyOf") for one in schema.get(key, ())]
    if not choices:
        yield schema
        return
    variants = [one for choice in choices for one in _variants(root, choice, data)]
    chosen = [one for one in variants if _is_chosen(one, data)]
    yield from chosen or variants


def _is_chosen(variant: Schema, data: Any) -> bool:
    if not isinstance(data, dict):
        return False
    constants = {key: variant.get("properties", {}).get(key, {}).get("const") for key in _KIND_KEYS}
    return any(value is not None and data.get(key) == value for key, value in constants.items())
