"""A configuration as a tree that knows where each key and value stands, before it is validated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from simserve.config.scalars import Scalar
from simserve.errors import ConfigError, Problem

__all__ = ["MAX_DEPTH", "Document", "KeyPath", "Node", "Place", "dotted", "from_python"]

KeyPath = tuple[str | int, ...]
MAX_DEPTH = 64


class Place(NamedTuple):
    """A position in a file, or in an argument. Lines and columns count from 1."""

    file: str | None = None
    line: int | None = None
    column: int | None = None
    source: str | None = None
    """The whole line."""

    @property
    def is_argument(self) -> bool:
        """Whether it is an argument, such as `-o KEY=VALUE`: within one, nothing has a line."""
        return self.file is not None and self.line is None

    def problem(self, path: KeyPath, message: str) -> Problem:
        """A fault at this place."""
        return Problem(path=dotted(path), message=message, **self._asdict())


@dataclass(slots=True)
class Node:
    """A scalar, list or mapping, and where it stands."""

    value: Scalar | list[Node] | dict[str, Node]
    place: Place = Place()
    keys: dict[str, Place] = field(default_factory=dict)
    """Where the keys of a mapping stand."""
    faulty: bool = False
    """The value is missing because a problem with it has been reported already."""

    @property
    def children(self) -> Iterator[tuple[str | int, Node]]:
        """Entries of a mapping or list by key or index."""
        if isinstance(self.value, dict):
            yield from self.value.items()
        elif isinstance(self.value, list):
            yield from enumerate(self.value)

    def child(self, key: str | int) -> Node | None:
        """The entry under a key or index, or None."""
        if isinstance(self.value, dict):
            return self.value.get(str(key)) if isinstance(key, str) else None
        if isinstance(self.value, list) and isinstance(key, int) and 0 <= key < len(self.value):
            return self.value[key]
        return None

    def copy(self) -> Node:
        """An independent tree with the same places."""
        value = self.value
        if isinstance(value, dict):
            value = {key: node.copy() for key, node in value.items()}
        elif isinstance(value, list):
            value = [node.copy() for node in value]
        return Node(value, self.place, dict(self.keys), self.faulty)

    def plain(self) -> Any:
        """The same as dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value


@dataclass(slots=True)
class Document:
    """The root mapping of a configuration, and the faults found while reading it."""

    root: Node
    problems: list[Problem] = field(default_factory=list)

    def place_of(self, path: KeyPath) -> Place:
        """Where a value stands; of what is not there, its nearest enclosing key.

        A mapping that the file has right is wrong as a whole because of what was set in it.
        """
        node, place = self.root, self.root.place
        for key in path:
            inner = node.child(key)
            if inner is None:
                return place
            nested = isinstance(inner.value, dict | list)
            place = node.keys.get(str(key), inner.place) if nested else inner.place
            node = inner
        return node.place if node.place.is_argument else place

    def is_faulty(self, path: KeyPath) -> bool:
        """Whether a fault of the value at `path`, or of one around it, is known already."""
        node: Node | None = self.root
        for key in path:
            node = node.child(key) if node is not None else None
            if node is not None and node.faulty:
                return True
        return False


def dotted(path: KeyPath) -> str:
    """`("a", 0, "b")` as `a.0.b`."""
    return ".".join(str(key) for key in path)


def from_python(value: Any, place: Place = Place(), path: KeyPath = ()) -> Node:  # noqa: B008
    """A tree from dicts, lists, tuples and scalars (numpy's too, and paths).

    Raises:
        ConfigError: a key is no string, or something is of another type.
    """
    if len(path) > MAX_DEPTH:
        raise ConfigError([place.problem(path[:3], f"nested more than {MAX_DEPTH} levels deep")])
    if isinstance(value, Mapping):
        return _from_mapping(value, place, path)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return Node([from_python(one, place, (*path, i)) for i, one in enumerate(value)], place)
    if isinstance(value, Path):
        return Node(str(value), place)
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        value = value.item()
    if value is None or isinstance(value, str | int | float | bool):
        return Node(value, place)
    raise ConfigError([place.problem(path, f"a {type(value).__name__} is no configuration value")])


def _from_mapping(value: Mapping[Any, Any], place: Place, path: KeyPath) -> Node:
    for key in value:
        if not isinstance(key, str):
            raise ConfigError([place.problem(path, f"the key {key!r} is not a string")])
    return Node({key: from_python(one, place, (*path, key)) for key, one in value.items()}, place)
