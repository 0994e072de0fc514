"""Overrides by dotted path: `scheduler.max_num_seqs=64`, values in YAML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from simserve.config.document import Document, KeyPath, Node, Place, dotted, from_python
from simserve.config.yaml_text import parse_yaml
from simserve.errors import ConfigError, Problem

__all__ = ["Overrides", "apply_overrides", "set_value"]

Overrides = Iterable[str] | Mapping[str, object]
"""`KEY=VALUE` strings, or values by dotted path. The last of several for one key wins."""


def apply_overrides(document: Document, overrides: Overrides) -> None:
    """Set values in `document`. Mappings on the way that are not there are made.

    Raises:
        ConfigError: an override is no `KEY=VALUE`, or leads through something that is no mapping;
            all of them at once. Or they are neither texts nor a mapping.
    """
    problems: list[Problem] = []
    for path, node in _read(overrides, problems):
        if problem := set_value(document.root, _key_path(path), node):
            problems.append(problem)
    if problems:
        raise ConfigError(problems)


def _key_path(path: KeyPath) -> KeyPath:
    """The keys that a dotted path leads through: those that a sweep varies are dotted themselves.

    >>> _key_path(("sweep", "parameters", "scheduler", "max_num_seqs"))
    ('sweep', 'parameters', 'scheduler.max_num_seqs')
    >>> _key_path(("sweep", "scenarios", "small", "scheduler", "max_num_seqs"))
    ('sweep', 'scenarios', 'small', 'scheduler.max_num_seqs')
    """
    begins: dict[KeyPath, int] = {("sweep", "parameters"): 2, ("sweep", "scenarios"): 3}
    begin = begins.get(path[:2], len(path))
    return path if len(path) <= begin else (*path[:begin], dotted(path[begin:]))


def _read(overrides: Overrides, problems: list[Problem]) -> list[tuple[KeyPath, Node]]:
    if isinstance(overrides, str):
        overrides = [overrides]
    found = []
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            _check_text(key)
            place = Place(f"override {key}")
            found.append((tuple(key.split(".")), from_python(value, place)))
        return found
    if not isinstance(overrides, Iterable):
        raise _no_overrides(overrides)
    for text in overrides:
        _check_text(text)
        try:
            text.encode()
            found.append(_parse(text))
        except UnicodeEncodeError:
            problems.append(Problem(path="", message="is not UTF-8 text", file=f"-o {text!a}"))
        except ConfigError as error:
            problems += error.problems
    return found


def _check_text(given: object) -> None:
    if not isinstance(given, str):
        raise _no_overrides(given)


def _no_overrides(given: object) -> ConfigError:
    return ConfigError(
        f"overrides are texts such as 'scheduler.max_num_seqs=64', or a mapping such as "
        f"{{'scheduler.max_num_seqs': 64}}, not {given!r}"
    )


def _parse(text: str) -> tuple[KeyPath, Node]:
    place = Place(f"-o {text}")
    key, equals, value = text.partition("=")
    path: KeyPath = tuple(key.strip().split("."))
    if not equals or "" in path:
        raise ConfigError(
            [place.problem((), "write KEY=VALUE, for example scheduler.max_num_seqs=64")]
        )
    try:
        document = parse_yaml(value, place.file or "")
    except ConfigError as error:
        raise ConfigError([place.problem(path, one.message) for one in error.problems]) from None
    if document.problems:
        raise ConfigError([place.problem(path, one.message) for one in document.problems])
    return path, _all_at(document.root, place)


def _all_at(node: Node, place: Place) -> Node:
    """The tree with every node at one place: within an argument, lines and columns are noise."""
    node.place = place
    node.keys = dict.fromkeys(node.keys, place)
    for _, inner in node.children:
        _all_at(inner, place)
    return node


def set_value(root: Node, path: KeyPath, value: Node) -> Problem | None:
    """Set the value at `path`. A problem: the path leads through something that is no mapping."""
    node, place = root, root.place
    for depth, key in enumerate(path[:-1]):
        inner = node.child(_index(node, key))
        if inner is None or inner.value is None:
            inner = Node({}, value.place)
            if not _put(node, key, inner):
                return _no_entry(path[:depth], key, value.place)
        node = inner
    if not _put(node, path[-1], value):
        return _no_entry(path[:-1], path[-1], value.place)
    root.place = place  # what the configuration lacks, its file does
    return None


def _index(node: Node, key: str | int) -> str | int:
    return int(key) if isinstance(node.value, list) and str(key).isdecimal() else key


def _put(node: Node, key: str | int, value: Node) -> bool:
    """Set an entry, and note where `node` was changed last; whether it can have the entry."""
    key = _index(node, key)
    if isinstance(node.value, dict):
        node.value[str(key)] = value
        node.keys[str(key)] = value.place
    elif isinstance(node.value, list) and isinstance(key, int) and key < len(node.value):
        node.value[key] = value
    else:
        return False
    node.place = value.place
    return True


def _no_entry(path: KeyPath, key: str | int, place: Place) -> Problem:
    return place.problem(path, f"is neither a mapping nor a list with an entry '{key}'")
