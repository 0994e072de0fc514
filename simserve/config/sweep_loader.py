"""From a file with a `sweep` section to its points, each a validated configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import JsonValue, ValidationError

from simserve.config.document import Document, Node
from simserve.config.explain import explain
from simserve.config.keys import Schema
from simserve.config.loader import (
    ConfigSource,
    LoadedConfig,
    read_document,
    resolve_document,
    validate,
)
from simserve.config.overrides import Overrides, apply_overrides, set_value
from simserve.config.sweep import Scenarios, Sweep, SweepConfig, SweepSection
from simserve.config.sweep_cells import Cell, cell_name, cells, num_cells, swept_keys
from simserve.errors import CapacityError, ConfigError, Problem

__all__ = ["LoadedSweep", "Point", "load_points", "load_sweep"]

_MAX_POINTS = 100_000
_FILES_BESIDE = ("sweep.yaml", "summary.csv", "summary.parquet", "report.html")
"""What else lies in a sweep's directory, where each point has a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run of a sweep."""

    name: str
    """Of its run directory."""
    scenario: str | None
    settings: dict[str, JsonValue]
    """What it changes in the configuration, by dotted key."""
    values: dict[str, JsonValue]
    """Value of every key that the sweep changes anywhere."""
    loaded: LoadedConfig | None
    """None: the values do not go together."""
    error: ConfigError | CapacityError | None = None
    """Why they do not."""


@dataclass(frozen=True, slots=True)
class LoadedSweep:
    """A sweep's file, read; points are made when they are asked for."""

    sweep: Sweep
    plain: dict[str, Any]
    """The file, with overrides applied."""
    keys: list[str]
    """The dotted keys that vary."""
    source: str | None
    _document: Document = field(repr=False)
    _section: Node = field(repr=False)
    _origin: ConfigSource = field(repr=False)
    _base_dir: Path | None = None

    def point(self, cell: Cell) -> Point:
        """The configuration of one combination.

        Raises:
            ConfigError: a key or value is wrong, whatever it is combined with.
        """
        document = Document(self._document.root.copy(), self._document.problems)
        settings = {}
        for key, place in cell.picks.items():
            node = self._section
            for part in place:
                node = node.child(part) or node
            settings[key] = node.plain()
            if problem := set_value(document.root, tuple(key.split(".")), node.copy()):
                raise ConfigError([problem])
        set_value(document.root, ("metrics", "plot"), Node(False))  # a report draws them together
        config = validate(document)
        loaded, error = None, None
        try:
            loaded = resolve_document(config, document, self._origin, self._base_dir)
        except (ConfigError, CapacityError) as found:
            error = found
        resolved = (loaded.config if loaded else config).model_dump(mode="json")
        return Point(
            name=cell_name(cell, settings, self.keys),
            scenario=cell.scenario,
            settings=settings,
            values={key: settings.get(key, _at(resolved, key)) for key in self.keys},
            loaded=loaded,
            error=error,
        )


def load_sweep(
    source: ConfigSource, overrides: Overrides = (), base_dir: Path | None = None
) -> LoadedSweep:
    """Read a configuration with a `sweep` section. Arguments as for `load_config`.

    Raises:
        ConfigError: the file or its section is wrong, with positions.
    """
    overrides = list(overrides) if not isinstance(overrides, str | Mapping) else overrides
    document = read_document(source)
    apply_overrides(document, overrides)
    sweep = _validate_section(document)
    plain = document.root.plain()
    keys = swept_keys(sweep)
    _check_keys(keys, sweep, document, overrides)
    section = document.root.child("sweep")
    assert section is not None  # validated above
    assert isinstance(document.root.value, dict)
    del document.root.value["sweep"]
    name = str(source) if isinstance(source, str | Path) else None
    return LoadedSweep(sweep, plain, keys, name, document, section, source, base_dir)


def load_points(loaded: LoadedSweep) -> list[Point]:
    """All points, in order.

    Raises:
        ConfigError: all keys and values that are wrong; two points that are the same; too many.
    """
    if (count := num_cells(loaded.sweep)) > _MAX_POINTS:
        raise ConfigError(
            f"{loaded.source or 'the sweep'}: {count} points are more than {_MAX_POINTS}; "
            "`simserve search --trials` looks at a part of them"
        )
    points: dict[str, Point] = {}
    problems: dict[Problem, None] = {}
    for cell in cells(loaded.sweep):
        try:
            point = loaded.point(cell)
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
            continue
        if point.name in _FILES_BESIDE:
            message = f"a point is called {point.name}, as is a file beside it: rename its scenario"
            problems[Problem(path="sweep", message=message, file=loaded.source)] = None
        if point.name in points:
            message = f"two points are called {point.name}: make their names or values differ"
            problems[Problem(path="sweep", message=message, file=loaded.source)] = None
        points[point.name] = point
    if problems:
        raise ConfigError(sorted(problems, key=lambda one: (one.line or 0, one.column or 0)))
    return list(points.values())


def _validate_section(document: Document) -> Sweep:
    section = document.root.child("sweep")
    if section is None:
        message = "has no `sweep` section that says which keys vary: see docs/sweeps.md"
        raise ConfigError([document.root.place.problem((), message)])
    try:
        return SweepSection.model_validate({"sweep": section.plain()}).sweep
    except ValidationError as error:
        problems = explain(error.errors(include_url=False), document, _schema())
        raise ConfigError(problems or document.problems) from None


@cache
def _schema() -> Schema:
    return SweepConfig.model_json_schema()


def _check_keys(
    keys: list[str], sweep: Sweep, document: Document, overrides: str | Iterable[str]
) -> None:
    """No key may contain another one, nor be set on the command line."""
    listed = [overrides] if isinstance(overrides, str) else overrides
    given = [text.partition("=")[0].strip() for text in listed]
    place = document.place_of(("sweep",))
    problems = [
        place.problem(("sweep",), f"{inner} is a part of {outer}; only one of them can vary")
        for outer in keys
        for inner in keys
        if inner.startswith(f"{outer}.")
    ]
    problems += [
        place.problem(("sweep",), f"{key} varies, so that -o {name} would change nothing")
        for key in keys
        for name in given
        if f"{name}.".startswith(f"{key}.")
    ]
    if isinstance(sweep, Scenarios):
        problems += [
            place.problem(("sweep",), f"{key} stands among the parameters and in scenario {name}")
            for name, settings in sweep.scenarios.items()
            for key in settings
            if key in sweep.parameters
        ]
    if problems:
        raise ConfigError(problems)


def _at(tree: Any, key: str) -> Any:
    """The value at a dotted key, or None."""
    for part in key.split("."):
        if isinstance(tree, list) and part.isdecimal() and int(part) < len(tree):
            tree = tree[int(part)]
        else:
            tree = tree.get(part) if isinstance(tree, dict) else None
    return tree
