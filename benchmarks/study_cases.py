"""Cases of the studies, and how numbers of a case become cells of a table."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import simserve
from simserve.config.sweep_loader import Point, load_points, load_sweep
from simserve.metrics.result import RunResult

CONFIGS = Path(__file__).resolve().parents[1] / "configs" / "studies"


class Case(NamedTuple):
    """One point of a study."""

    scenario: str | None
    values: Mapping[str, Any]
    result: RunResult

    def number(self, key: str) -> Any:
        return self.result.summary_dict.get(key)


Cases = Sequence[Case]
Column = Callable[[Case], str]


@cache
def run(name: str) -> Cases:
    """Simulate every point of a configuration."""
    points = load_points(load_sweep(CONFIGS / f"{name}.yaml"))
    return [simulated(point) for point in points]


def simulated(point: Point) -> Case:
    """A point, simulated unless an equal one was."""
    assert point.loaded is not None
    key = point.loaded.config.model_dump_json()
    if key not in _results:
        _results[key] = simserve.run(point.loaded)
    return Case(point.scenario, point.values, _results[key])


_results: dict[str, RunResult] = {}
"""By configuration, in full."""


def key(name: str, digits: int = 0, factor: float = 1.0) -> Column:
    """A number of the summary."""

    def column(case: Case) -> str:
        value = case.number(name)
        return "–" if value is None else f"{value * factor:,.{digits}f}"

    return column


def setting(name: str) -> Column:
    return lambda case: shown(case.values[name])


def shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def scenario(case: Case) -> str:
    return case.scenario or ""


def table(columns: Mapping[str, Column], cases: Cases) -> list[list[str]]:
    """A row a case."""
    return [list(columns), *([column(case) for column in columns.values()] for case in cases)]


def share(part: str) -> Column:
    """Of all steps' time, in percent, what the parts with this word in their name took."""

    def column(case: Case) -> str:
        steps = case.result.steps
        parts = [name for name in steps if re.fullmatch(rf"parts\.({part})_s", name)]
        return f"{100 * steps[parts].sum().sum() / steps['duration_s'].sum():.1f} %"

    return column
