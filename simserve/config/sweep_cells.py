"""How the values of a sweep combine, and what each combination is called."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import product
from math import prod
from typing import NamedTuple

from pydantic import JsonValue

from simserve.config.document import KeyPath
from simserve.config.sweep import Grid, OneAtATime, Scenarios, Sweep, Zip

__all__ = ["Cell", "cell_name", "cells", "num_cells", "short_names", "swept_keys"]

_UNUSUAL = re.compile(r"[^\w.+=,-]+", re.ASCII)
_MAX_NAME = 120


class Cell(NamedTuple):
    """One combination."""

    scenario: str | None
    picks: Mapping[str, KeyPath]
    """For each dotted key that is set, where in the sweep's section its value stands."""


def cells(sweep: Sweep) -> Iterator[Cell]:
    """All combinations, in the order in which they are run and listed."""
    if isinstance(sweep, Zip):
        for index in range(num_cells(sweep)):
            yield Cell(None, {key: ("parameters", key, index) for key in sweep.parameters})
    elif isinstance(sweep, Grid):
        yield from (Cell(None, picks) for picks in _combinations(sweep.parameters))
    elif isinstance(sweep, OneAtATime):
        yield Cell("base", {})
        for key, values in sweep.parameters.items():
            yield from (Cell(None, {key: ("parameters", key, i)}) for i in range(len(values)))
    else:
        for name, settings in sweep.scenarios.items():
            own: dict[str, KeyPath] = {key: ("scenarios", name, key) for key in settings}
            yield from (Cell(name, own | picks) for picks in _combinations(sweep.parameters))


def num_cells(sweep: Sweep) -> int:
    """How many combinations there are."""
    lengths = [len(values) for values in sweep.parameters.values()]
    if isinstance(sweep, Zip):
        return lengths[0]
    if isinstance(sweep, OneAtATime):
        return 1 + sum(lengths)
    num_scenarios = len(sweep.scenarios) if isinstance(sweep, Scenarios) else 1
    return num_scenarios * prod(lengths)


def swept_keys(sweep: Sweep) -> list[str]:
    """Every dotted key that some combination sets, in the order of the file."""
    settings = sweep.scenarios.values() if isinstance(sweep, Scenarios) else ()
    return list(dict.fromkeys([*(key for one in settings for key in one), *sweep.parameters]))


def cell_name(cell: Cell, settings: Mapping[str, JsonValue], keys: Iterable[str]) -> str:
    """A file name for the point: its scenario, and `key=value` for each parameter set.

    A list or mapping is named by its number in the list of values.

    >>> key = "scheduler.max_num_seqs"
    >>> cell_name(Cell("no cache", {key: ("parameters", key, 0)}), {key: 64}, [key])
    'no_cache,max_num_seqs=64'
    """
    short = short_names(keys)
    parts = [] if cell.scenario is None else [cell.scenario]
    for key, place in cell.picks.items():
        if place[0] == "parameters":
            parts.append(f"{short[key]}={_value_name(settings[key], place)}")
    text = _UNUSUAL.sub("_", ",".join(parts)).lstrip(".") or "_"
    if len(text) <= _MAX_NAME:
        return text
    return f"{text[:_MAX_NAME]}-{sha256(text.encode()).hexdigest()[:8]}"


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """For each dotted key the last of its parts, as many as tell it from the others.

    >>> short_names(["scheduler.kind", "executor.cost.kind", "seed"])
    {'scheduler.kind': 'scheduler.kind', 'executor.cost.kind': 'cost.kind', 'seed': 'seed'}
    """
    paths = [key.split(".") for key in keys]
    names = {}
    for path in paths:
        others = [other for other in paths if other != path]
        count = 1
        while count < len(path) and any(other[-count:] == path[-count:] for other in others):
            count += 1
        names[".".join(path)] = ".".join(path[-count:])
    return names


def _value_name(value: JsonValue, place: Sequence[str | int]) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | dict):
        return str(int(place[-1]) + 1)
    return str(value)


def _combinations(parameters: Mapping[str, Sequence[JsonValue]]) -> Iterator[dict[str, KeyPath]]:
    for indices in product(*(range(len(values)) for values in parameters.values())):
        yield {
            key: ("parameters", key, index) for key, index in zip(parameters, indices, strict=True)
        }
