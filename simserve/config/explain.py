"""What a validator found, said to a user: where it stands, what is wrong, what was likely meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from simserve.config.document import Document, KeyPath, dotted
from simserve.config.keys import Schema, kinds_at, known_keys, paths_by_key
from simserve.errors import Problem, did_you_mean

__all__ = ["explain"]

_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "finite_number": "a finite number",
}
_LIMIT = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def explain(
    errors: Sequence[Mapping[str, Any]], document: Document, schema: Schema
) -> list[Problem]:
    """Problems for the errors of a pydantic ValidationError, without those already reported."""
    problems: list[Problem] = []
    for error in errors:
        if error["type"] == "too_short" and _has_faulty_items(error["loc"], errors):
            continue
        path = _path_in(document, error)
        if document.is_faulty(path):
            continue
        message = _message(error, path, document, schema)
        problem = _place(document, error, path, message)
        if problem not in problems:
            problems.append(problem)
    return problems


def _has_faulty_items(loc: tuple[int | str, ...], errors: Sequence[Mapping[str, Any]]) -> bool:
    """Faulty items are not counted, so that a list of them seems to be empty as well."""
    return any(len(one["loc"]) > len(loc) and one["loc"][: len(loc)] == loc for one in errors)


def _path_in(document: Document, error: Mapping[str, Any]) -> KeyPath:
    """The error's location without the names of union members, which no file contains."""
    node, path = document.root, list[str | int]()
    last = len(error["loc"]) - 1
    for place, key in enumerate(error["loc"]):
        inner, kind = node.child(key), node.child("kind")
        is_member = place < last and kind is not None and kind.value == key
        if inner is not None and not is_member:
            node = inner
            path.append(key)
    if error["type"] == "missing":
        path.append(error["loc"][-1])
    if error["type"] == "union_tag_invalid":
        path.append(_discriminator(error))
    return tuple(path)


def _place(document: Document, error: Mapping[str, Any], path: KeyPath, message: str) -> Problem:
    place = document.place_of(path)
    if error["type"] == "extra_forbidden":
        parent = document.root
        for key in path[:-1]:
            parent = parent.child(key) or parent
        place = parent.keys.get(str(path[-1]), place)
    return place.problem(path, message)


def _discriminator(error: Mapping[str, Any]) -> str:
    return str(error["ctx"]["discriminator"]).strip("'")


def _message(error: Mapping[str, Any], path: KeyPath, document: Document, schema: Schema) -> str:
    kind, context, value = error["type"], error.get("ctx", {}), error.get("input")
    if kind == "extra_forbidden":
        return "unknown key" + _suggest_key(path, document, schema)
    if kind == "missing":
        return "is required"
    if kind == "union_tag_not_found":
        key = "type" if _discriminator(error) == "type" else "kind"
        return f"needs a {key}: {', '.join(kinds_at(schema, path))}"
    if kind == "union_tag_invalid":
        return _not_one_of(context["tag"], _names(context["expected_tags"]))
    if kind == "literal_error":
        return _not_one_of(value, _names(context["expected"]))
    if kind in _LIMIT:
        name, words = _LIMIT[kind]
        limit = context[name]
        return f"must be {words} {limit if isinstance(limit, int) else f'{limit:g}'}, not {value}"
    if kind == "string_too_short":
        return "must not be empty"
    if kind == "string_unicode":
        return "is not UTF-8 text"
    if kind == "too_short":
        return f"must have at least {context['min_length']} entry, not {context['actual_length']}"
    if kind in _WANTED:
        return f"must be {_WANTED[kind]}, not {_describe(value)}"
    if kind == "value_error":
        return str(context["error"])
    return str(error["msg"])


def _names(listed: str) -> list[str]:
    """The names in `'a', 'b' or 'c'`."""
    return [part.strip("' ") for part in listed.replace(" or ", ", ").split(",")]


def _not_one_of(value: Any, choices: list[str]) -> str:
    if not isinstance(value, str):
        return f"must be one of {', '.join(choices)}, not {_describe(value)}"
    hint = did_you_mean(value, choices)
    if len(choices) == 1:
        return f"must be {choices[0]}, not '{value}'{hint}"
    return f"'{value}' is not one of {', '.join(choices)}{hint}"


def _describe(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text '{value if len(value) <= 40 else value[:37] + '...'}'"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return str(value)


def _suggest_key(path: KeyPath, document: Document, schema: Schema) -> str:
    """What an unknown key probably is: one that belongs elsewhere, or a misspelt one."""
    key = str(path[-1])
    here = known_keys(schema, path[:-1], document.root.plain())
    places = paths_by_key(schema)
    if len(places.get(key, ())) == 1:
        if places[key][0] == path:
            return f": '{key}' goes with another kind"
        where = dotted(places[key][0][:-1])
        return f": '{key}' belongs {'under ' + where if where else 'at the top level'}"
    if hint := did_you_mean(key, here):
        return hint
    unique = {name: paths[0] for name, paths in places.items() if len(paths) == 1}
    if near := get_close_matches(key, unique, n=1, cutoff=0.75):
        return f" (did you mean '{dotted(unique[near[0]])}'?)"
    return f"; there are {', '.join(here)}"
