"""The points of a sweep as a table, and which of its columns make which picture.

A table has a row a point: swept settings under their dotted keys, then the keys of a summary. It
may be a pandas DataFrame or an Arrow table; that of a sweep directory is summary.parquet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from simserve.errors import RunDirectoryError, UnknownNameError, did_you_mean
from simserve.report.style import numeral

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

__all__ = [
    "Grid",
    "Grids",
    "Line",
    "SweepPoints",
    "Table",
    "as_frame",
    "colour_range",
    "grid",
    "grids",
    "lines",
    "pareto_front",
    "read_sweep",
    "setting",
    "shares_between",
    "short_names",
    "spreads_by_factors",
    "value_text",
    "with_unit",
]

Table: TypeAlias = "pd.DataFrame | pa.Table"
Floats = NDArray[np.float64]

_LEAST_RANGE = 0.05
"""Of colours, over the largest value."""
_CROWDED = 0.15
"""Share of an x axis that a number below it takes."""
_UNITS = {
    "rate": "requests/s",
    "offered_request_rate": "requests/s",
    "request_throughput": "requests/s",
    "request_goodput": "requests/s",
    "output_throughput": "tokens/s",
    "output_goodput": "tokens/s",
    "total_token_throughput": "tokens/s",
    "total_token_goodput": "tokens/s",
}
"""Of numbers whose names do not end in one, by the last parts of their keys."""

MAX_LINES = 6
MAX_GRIDS = 8
HEATMAPS = ("p99_ttft_ms", "p99_itl_ms", "output_throughput")
LOADS = ("rate", "max_concurrency", "speedup")
"""Last parts of keys that say how much comes in."""
SAYS_LITTLE = ("kind", "mean", "value")
"""Last parts of keys that say of nothing what it is."""
GRID_FIRST = ("max_num_batched_tokens", "long_prefill_token_threshold", "max_num_seqs")
"""Last parts of keys that people lay a grid over, the most usual first."""


class Line(NamedTuple):
    """Points that differ in x alone, sorted by it."""

    name: str
    x: Floats
    rows: pd.DataFrame

    @property
    def is_curve(self) -> bool:
        """Whether there is one point at each x; else a line through them would say nothing."""
        return len(np.unique(self.x)) == len(self.x)


class Grid(NamedTuple):
    """Values over two settings: cells[i, j] is that of ys[i] and xs[j]; NaN without a point."""

    xs: list[Any]
    ys: list[Any]
    cells: Floats
    depth: int
    """Most points of a cell; their mean is taken."""


class Grids(NamedTuple):
    """Grids over the same two settings, one for each combination of others."""

    grids: dict[str, Grid]
    """By the others' values, in words."""
    num_combinations: int
    """Of the others; of more than there are grids, those between have none."""


@dataclass(frozen=True, slots=True)
class SweepPoints:
    """A sweep."""

    name: str
    frame: pd.DataFrame
    """Points that have a summary."""
    failed: pd.DataFrame
    keys: tuple[str, ...]
    """Columns of what was swept and varies."""

    @property
    def free(self) -> tuple[str, ...]:
        """Keys that vary by themselves: of those that a scenario sets, only its name."""
        if "scenario" not in self.keys:
            return self.keys
        groups = self.frame.groupby("scenario")
        vary = (key for key in self.keys if (groups[key].nunique(dropna=False) > 1).any())
        return ("scenario", *vary)

    @property
    def numeric(self) -> tuple[str, ...]:
        """Free keys whose values are numbers."""
        return tuple(key for key in self.free if is_numeric(self.frame, key))

    @property
    def load_key(self) -> str | None:
        """The key to draw percentiles against: how much comes in, or the first number."""
        set_by_scenarios = [key for key in self.keys if is_numeric(self.frame, key)]
        loads = [key for key in self.numeric if key.rpartition(".")[2] in LOADS]
        return next(iter([*loads, *self.numeric, *set_by_scenarios]), None)

    @property
    def grid_keys(self) -> tuple[str, str] | None:
        """Two keys that span a grid."""
        usual = [key for last in GRID_FIRST for key in self.numeric if key.endswith(f".{last}")]
        keys = list(dict.fromkeys([*usual, *self.numeric]))
        if len(keys) < 2:
            return None
        cells = self.frame[keys[:2]].drop_duplicates()
        # One key at a time is no grid, however many values each has.
        spanned = len(cells) > sum(self.frame[key].nunique() for key in keys[:2]) - 1
        return (keys[0], keys[1]) if spanned else None

    @property
    def panel_keys(self) -> tuple[str, ...]:
        """Free keys but those that span a grid, such as the load: each combination of their values
        has a grid of its own, as percentiles of several have no mean."""
        return tuple(key for key in self.free if key not in (self.grid_keys or ()))

    @property
    def heatmaps(self) -> tuple[str, ...]:
        """Numbers to draw over the grid, if there is one."""
        if self.grid_keys is None:
            return ()
        return tuple(key for key in HEATMAPS if key in self.frame and self.frame[key].notna().any())


def read_sweep(path: Path) -> SweepPoints:
    """Read a sweep directory.

    Raises:
        RunDirectoryError: a file is missing or broken, or no point has a summary.
    """
    import pandas as pd
    import yaml

    try:
        if not (path / "summary.parquet").exists():
            raise ValueError("there is no summary.parquet in it")
        frame = pd.read_parquet(path / "summary.parquet")
        plain = yaml.safe_load((path / "sweep.yaml").read_text(encoding="utf-8"))
        section = plain["sweep"]
        swept = dict.fromkeys(section.get("parameters") or {})
        for scenario in (section.get("scenarios") or {}).values():
            swept |= dict.fromkeys(scenario)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise RunDirectoryError(
            f"{path}: is no directory of a finished sweep: {error}; `simserve sweep --resume` "
            "finishes one that was stopped"
        ) from error
    is_failed = frame["status"] == "failed"
    done = frame[~is_failed].reset_index(drop=True)
    if not len(done):
        raise RunDirectoryError(f"{path}: all {len(frame)} points failed; see *.failure.json there")
    keys = [key for key in ("scenario", *swept) if key in done and done[key].nunique() > 1]
    return SweepPoints(path.resolve().name, done, frame[is_failed], tuple(keys))


def as_frame(table: Table, needed: Sequence[str] = ()) -> pd.DataFrame:
    """The table as a DataFrame.

    Raises:
        UnknownNameError: it lacks one of the columns.
    """
    frame = table if hasattr(table, "iloc") else table.to_pandas()
    for name in needed:
        if name not in frame:
            near = did_you_mean(name, map(str, frame.columns))
            raise UnknownNameError(f"the table has no column '{name}'{near}")
    return frame


def is_numeric(frame: pd.DataFrame, key: str) -> bool:
    """Whether a column holds numbers."""
    return frame[key].dtype.kind in "iuf"


def lines(table: Table, x: str, by: Sequence[str] = ()) -> Iterator[Line]:
    """One line for each combination of values of `by`, as far as they can be told apart.

    Raises:
        UnknownNameError: a column is missing, or x holds something else than numbers.
    """
    frame = as_frame(table, [x, *by])
    if not is_numeric(frame, x):
        raise UnknownNameError(f"the column '{x}' does not hold numbers: name it in `by`")
    frame = frame[frame[x].notna()]
    groups = _groups(frame, by) if by else [((), frame)]
    if len(groups) > MAX_LINES:
        groups = [((), frame)]
    for values, rows in groups:
        ordered = rows.sort_values(x, kind="stable")
        name = _settings(by, values, [x, *by])
        yield Line(name, ordered[x].to_numpy(dtype=np.float64), ordered)


def _groups(frame: pd.DataFrame, by: Sequence[str]) -> list[tuple[Any, pd.DataFrame]]:
    """Rows by values of `by`, sorted; scenarios are in the order of the file, a baseline first."""
    return list(frame.groupby(list(by), dropna=False, sort="scenario" not in by))


def _settings(keys: Sequence[str], values: Sequence[object], among: Sequence[str]) -> str:
    """Settings in few words, by names that tell a key from those that it is `among`."""
    short = short_names(among)
    named = zip([short[key] for key in keys], values, strict=False)
    return ", ".join(setting(name, value) for name, value in named)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last parts of each key, as many as tell it from the others, and what it is.

    >>> list(short_names(["classes.0.output_len.value", "classes.1.output_len.value"]).values())
    ['0.output_len.value', '1.output_len.value']
    """
    return {key: _short(key.split("."), [one.split(".") for one in keys]) for key in keys}


def _short(path: list[str], paths: list[list[str]]) -> str:
    for count in range(2 if path[-1] in SAYS_LITTLE else 1, len(path)):
        if sum(one[-count:] == path[-count:] for one in paths) == 1:
            return ".".join(path[-count:])
    return ".".join(path)


def with_unit(key: str) -> str:
    """A key as an axis or a title has it.

    >>> with_unit("output_throughput"), with_unit("arrival.rate"), with_unit("p99_itl_ms")
    ('output_throughput (tokens/s)', 'arrival.rate (requests/s)', 'p99_itl_ms')
    """
    unit = _UNITS.get(key.rpartition(".")[2])
    return key if unit is None else f"{key} ({unit})"


def spreads_by_factors(places: Floats) -> bool:
    """Whether a logarithmic axis keeps sorted places apart that crowd on a linear one.

    >>> [spreads_by_factors(np.array(p)) for p in ([128.0, 256.0, 8192.0], [2.0, 4.0, 6.0])]
    [True, False]
    """
    if len(places) < 3 or places[0] <= 0:
        return False
    near, by_factors = shares_between(places).min(), shares_between(np.log(places)).min()
    return bool(near < _CROWDED and near < by_factors)


def shares_between(places: Floats) -> Floats:
    """Gaps between sorted places, as shares of their span.

    >>> shares_between(np.array([0.0, 3.0, 4.0])).tolist()
    [0.75, 0.25]
    """
    return np.diff(places) / (places[-1:] - places[:1])


def setting(name: str, value: object) -> str:
    """A setting in few words.

    >>> setting("max_num_seqs", 1024), setting("scenario", "calm")
    ('max_num_seqs 1,024', 'calm')
    """
    text = value_text(value)
    return text if name == "scenario" else f"{name} {text}"


def value_text(value: object) -> str:
    """A value as a reader sees it.

    >>> value_text(1024), value_text(True), value_text("fcfs")
    ('1,024', 'True', 'fcfs')
    """
    if isinstance(value, int | float | np.number) and not isinstance(value, bool):
        return numeral(float(value))
    return str(value)


def grid(table: Table, x: str, y: str, value: str) -> Grid:
    """Means of `value` over two columns.

    Raises:
        UnknownNameError: a column is missing.
    """
    (one,) = grids(table, x, y, value).grids.values()
    return one


def grids(table: Table, x: str, y: str, value: str, by: Sequence[str] = ()) -> Grids:
    """A grid for each combination of values of `by`; of too many, for some from the first to the
    last. All have the same xs and ys.

    Raises:
        UnknownNameError: a column is missing.
    """
    frame = as_frame(table, [x, y, value, *by])
    whole = _grid(frame, x, y, value)
    if not by:
        return Grids({"": whole}, 1)
    groups = _groups(frame[frame[value].notna()], by)
    few = min(len(groups), MAX_GRIDS)
    chosen = [groups[round(i)] for i in np.linspace(0, len(groups) - 1, few)]
    found = {
        _settings(by, values, [x, y, *by]): _grid(rows, x, y, value, whole)
        for values, rows in chosen
    }
    return Grids(found, len(groups))


def _grid(frame: pd.DataFrame, x: str, y: str, value: str, like: Grid | None = None) -> Grid:
    """Means of `value`; `like` another one has its xs and ys."""
    means = frame.pivot_table(index=y, columns=x, values=value, aggfunc="mean", dropna=False)
    counts = frame.pivot_table(index=y, columns=x, values=value, aggfunc="count")
    if like is not None:
        means = means.reindex(index=like.ys, columns=like.xs)
    cells = means.to_numpy(dtype=np.float64)
    return Grid(means.columns.tolist(), means.index.tolist(), cells, int(counts.max().max()))


def colour_range(cells: Floats) -> tuple[float, float]:
    """The least and the greatest value for colours, at least a twentieth apart: what hardly differs
    looks alike.

    >>> colour_range(np.array([[10.0, 20.0]])), colour_range(np.array([[199.0, 200.0]]))
    ((10.0, 20.0), (194.5, 204.5))
    """
    low, high = float(np.nanmin(cells)), float(np.nanmax(cells))
    missing = _LEAST_RANGE * max(abs(low), abs(high)) - (high - low)
    return (low - missing / 2, high + missing / 2) if missing > 0 else (low, high)


def pareto_front(more: Floats, less: Floats) -> NDArray[np.int64]:
    """Places of the points that no other beats: more of the one, less of the other; by the first.

    >>> pareto_front(np.array([1.0, 2.0, 3.0, 2.0]), np.array([5.0, 6.0, 9.0, 7.0])).tolist()
    [0, 1, 2]
    """
    order = np.lexsort((less, -more))
    front = []
    least = np.inf
    for place in order.tolist():
        if less[place] < least:
            front.append(place)
            least = less[place]
    return np.array(front[::-1], dtype=np.int64)
