"""YAML text to a tree with positions: strict about duplicates, tags, ambiguity and recursion."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from simserve.config.document import MAX_DEPTH, Document, KeyPath, Node, Place
from simserve.config.scalars import AmbiguousScalarError, read_scalar
from simserve.errors import ConfigError, Problem

__all__ = ["parse_yaml"]

_LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
_MAX_NODES = 100_000
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse_yaml(text: str, file: str) -> Document:
    """Read one YAML document. Faults that leave the rest readable are collected in the result.

    Raises:
        ConfigError: a syntax error, more than one document, or nested too deep.
    """
    lines = _LINE_BREAK.split(text)
    if match := yaml.reader.Reader.NON_PRINTABLE.search(text):
        before = _LINE_BREAK.split(text[: match.start()])
        place = Place(file, len(before), len(before[-1]) + 1)
        raise ConfigError(
            [place.problem((), f"not YAML: the character {match[0]!r} is not allowed")]
        )
    try:
        return _Composer(yaml.parse(text, Loader=_LOADER), file, lines).document()
    except yaml.YAMLError as error:
        raise ConfigError([_syntax_problem(error, file, lines)]) from None


def _syntax_problem(error: yaml.YAMLError, file: str, lines: list[str]) -> Problem:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return Problem(path="", message=f"not YAML: {str(error).splitlines()[0]}", file=file)
    message = f"not YAML: {error.problem}" + (f" ({error.context})" if error.context else "")
    return _place(error.problem_mark, file, lines).problem((), message)


def _place(mark: Any, file: str, lines: list[str]) -> Place:
    source = lines[mark.line] if mark.line < len(lines) else ""
    # A tab would put the caret in the wrong column.
    return Place(file, mark.line + 1, mark.column + 1, source.replace("\t", " "))


class _Composer:
    """Builds the tree from parser events."""

    def __init__(self, events: Iterator[yaml.Event], file: str, lines: list[str]) -> None:
        self._events = events
        self._file = file
        self._lines = lines
        self._anchors: dict[str, Node | None] = {}
        """Nodes by anchor; None while a node is being built."""
        self._num_nodes = 0
        self._problems: list[Problem] = []

    def document(self) -> Document:
        root = Node(None, Place(self._file))
        num_documents = 0
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                num_documents += 1
                if num_documents > 1:
                    self._fail(event, (), "a second document begins here; only one is allowed")
                root = self._node(next(self._events), ())
        return Document(root, self._problems)

    def _at(self, event: yaml.Event) -> Place:
        return _place(event.start_mark, self._file, self._lines)

    def _report(self, event: yaml.Event, path: KeyPath, message: str) -> Node:
        place = self._at(event)
        self._problems.append(place.problem(path, message))
        return Node(None, place, faulty=True)

    def _fail(self, event: yaml.Event, path: KeyPath, message: str) -> None:
        raise ConfigError([*self._problems, self._at(event).problem(path, message)])

    def _check_extent(self, event: yaml.Event, path: KeyPath, count: int, depth: int) -> None:
        self._num_nodes += count
        if self._num_nodes > _MAX_NODES:
            self._fail(event, path[:3], f"more than {_MAX_NODES} values, aliases written out")
        if len(path) + depth > MAX_DEPTH:
            self._fail(event, path[:3], f"nested more than {MAX_DEPTH} levels deep")

    def _node(self, event: yaml.Event, path: KeyPath) -> Node:
        self._check_extent(event, path, 1, 0)
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, path)
        anchor: str | None = getattr(event, "anchor", None)
        if anchor is not None:
            self._anchors[anchor] = None
        if isinstance(event, yaml.ScalarEvent):
            node = self._scalar(event, path)
        elif isinstance(event, yaml.SequenceStartEvent):
            node = self._sequence(event, path)
        else:
            node = self._mapping(event, path)
        if (tag := getattr(event, "tag", None)) is not None:
            node = self._report(event, path, f"the tag {tag} is not allowed; quote text")
        if anchor is not None:
            self._anchors[anchor] = node
        return node

    def _alias(self, event: yaml.AliasEvent, path: KeyPath) -> Node:
        if event.anchor not in self._anchors:
            return self._report(event, path, f"no anchor &{event.anchor} stands before this alias")
        node = self._anchors[event.anchor]
        if node is None:
            return self._report(event, path, f"the alias *{event.anchor} contains itself")
        count, depth = _extent(node)
        self._check_extent(event, path, count - 1, depth)
        return node.copy()

    def _scalar(self, event: yaml.ScalarEvent, path: KeyPath) -> Node:
        if event.style not in (None, ""):
            return Node(event.value, self._at(event))
        try:
            return Node(read_scalar(event.value), self._at(event))
        except AmbiguousScalarError as error:
            return self._report(event, path, str(error))

    def _sequence(self, start: yaml.Event, path: KeyPath) -> Node:
        items: list[Node] = []
        for event in self._events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            items.append(self._node(event, (*path, len(items))))
        return Node(items, self._at(start))

    def _mapping(self, start: yaml.Event, path: KeyPath) -> Node:
        entries: dict[str, Node] = {}
        places: dict[str, Place] = {}
        for event in self._events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            key = self._key(event, path)
            node = self._node(next(self._events), path if key is None else (*path, key))
            if key is None:
                continue
            if key in entries:
                first = places[key].line
                self._report(event, (*path, key), f"this key stands already on line {first}")
                continue
            entries[key], places[key] = node, self._at(event)
        return Node(entries, self._at(start), places)

    def _key(self, event: yaml.Event, path: KeyPath) -> str | None:
        if not isinstance(event, yaml.ScalarEvent):
            self._node(event, path)
            self._report(event, path, "a key must be plain text")
            return None
        if event.value == "<<" and event.style in (None, ""):
            self._report(event, path, "merge keys (<<) are not allowed; write the keys out")
            return None
        if event.anchor is not None:
            self._anchors[event.anchor] = Node(event.value, self._at(event))
        return str(event.value)


def _extent(node: Node) -> tuple[int, int]:
    """Number of nodes in the tree of `node`, itself included, and levels below it."""
    count, depth, stack = 0, 0, [(node, 0)]
    while stack:
        one, level = stack.pop()
        count, depth = count + 1, max(depth, level)
        stack += [(inner, level + 1) for _, inner in one.children]
    return count, depth
