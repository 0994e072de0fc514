"""Pictures of a table of runs, such as a sweep's summary. Each returns a PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from simserve.report.curves import LATENCIES, is_wide
from simserve.report.page import shown
from simserve.report.style import (
    COLOURS,
    DASHES,
    dress,
    legend_below_title,
    legend_of_all,
    log_ticks,
    looks,
    numeral,
    png,
    styled,
)
from simserve.report.sweep_points import (
    Floats,
    Grid,
    Line,
    Table,
    as_frame,
    colour_range,
    grids,
    lines,
    pareto_front,
    shares_between,
    short_names,
    spreads_by_factors,
    value_text,
    with_unit,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_heatmap", "draw_pareto", "draw_percentiles"]

PERCENTILES = ("p50", "p95", "p99")
DIGIT = 0.0235
"""Share of the x axis of a panel of percentiles that a digit below it takes."""
MAX_COLUMNS = 3
"""Panels of heatmaps side by side."""
MAX_NUMBERS = 20
"""Points of a front that have a number; a key of more would be longer than the picture."""


def draw_percentiles(
    table: Table,
    x: str = "offered_request_rate",
    *,
    by: Sequence[str] = (),
    metrics: Sequence[str] = ("ttft", "itl", "e2el"),
) -> bytes:
    """Percentiles of latencies against a column, such as the load, one panel a metric.

    Without `by` the lines are p50, p95 and p99, with their intervals if runs were repeated; with
    columns in `by` they are the p99 of each combination of their values.

    Raises:
        UnknownNameError: the table lacks a column, or x does not hold numbers.
    """
    from matplotlib.figure import Figure

    every = list(lines(table, x, by))
    if len(every) == 1:
        every = [every[0]._replace(name="")]
    with styled():
        size = (5.4 * len(metrics), 4.8)
        figure = Figure(figsize=size, dpi=100, layout="constrained")
        panels = figure.subplots(1, len(metrics), squeeze=False)[0]
        which = "" if len(every) == 1 else ", p99"
        for axes, metric in zip(panels, metrics, strict=True):
            title = LATENCIES.get(metric, metric.upper()) + which
            dress(axes, title, with_unit(x), "ms")
            _draw_lines(axes, every, metric)
        if len(every) > 1:
            legend_of_all(figure)
        return png(figure)


def _draw_lines(axes: Axes, every: Sequence[Line], metric: str) -> None:
    if len(every) == 1:
        named = [(p, every[0], f"{p}_{metric}_ms") for p in PERCENTILES]
    else:
        named = [(line.name, line, f"p99_{metric}_ms") for line in every]
    drawn = []
    for (name, line, key), look in zip(named, looks(len(named)), strict=True):
        values = as_frame(line.rows, [key])[key].to_numpy(dtype=np.float64)
        drawn.append(values[~np.isnan(values)])
        dashes = look.dashes if line.is_curve else "none"
        style: dict[str, Any] = {
            "color": look.colour,
            "linestyle": dashes,
            "marker": "o",
            "markersize": 4,
        }
        axes.plot(line.x, values, label=name, **style)
        band = [f"{key}_ci95_{side}" for side in ("low", "high")]
        if all(column in line.rows for column in band):
            axes.fill_between(line.x, *(line.rows[c] for c in band), color=look.colour, alpha=0.2)
    wide, sparse = is_wide(drawn)
    if wide:
        log_ticks(axes, "y", sparse=sparse)
    else:
        axes.update_datalim([(0.0, 0.0)], updatex=False)  # room above is a share of all from 0
        axes.set_ylim(bottom=0.0)
    _set_places(axes, np.unique(np.concatenate([line.x for line in every])))
    if len(every) == 1:
        legend_below_title(axes)


def _set_places(axes: Axes, places: Floats) -> None:
    """The x axis: ticks where points are, if all have room."""
    by_factors = spreads_by_factors(places)
    if by_factors:
        log_ticks(axes, "x", sparse=is_wide([places])[1])
    labels = [numeral(place) for place in places]
    widths = np.array([DIGIT * (len(label) + 0.5) for label in labels])
    gaps = shares_between(np.log(places) if by_factors else places)
    if (gaps > (widths[1:] + widths[:-1]) / 2).all():
        axes.set_xticks(places, labels)


def draw_heatmap(
    table: Table,
    x: str = "scheduler.max_num_batched_tokens",
    y: str = "scheduler.long_prefill_token_threshold",
    *,
    value: str = "p99_ttft_ms",
    by: Sequence[str] = (),
) -> bytes:
    """A number over two settings, written into each cell; the mean where a cell has several points.

    With columns in `by`, such as the load, there is a panel for each combination of their values,
    with colours of its own: percentiles of several loads have no mean.

    Raises:
        UnknownNameError: the table lacks a column.
    """
    from matplotlib.figure import Figure

    found, num_combinations = grids(table, x, y, value, by)
    xs, ys = next(iter(found.values()))[:2]
    names = short_names([x, y, *by])
    with styled():
        num_rows = -(-len(found) // MAX_COLUMNS)
        num_columns = -(-len(found) // num_rows)
        width = max(6.0 if num_columns == 1 else 4.2, 2.5 + 0.95 * len(xs))
        size = (width * num_columns, max(3.6, 1.8 + 0.6 * len(ys)) * num_rows)
        figure = Figure(figsize=size, dpi=100, layout="constrained")
        panels = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
        for axes, (name, one) in zip(panels, found.items(), strict=False):
            mean = "" if one.depth <= 1 else f", mean of up to {one.depth} points"
            title = (name or with_unit(value)) + mean
            dress(axes, title, with_unit(names[x]), with_unit(names[y]))
            _draw_grid(axes, one)
        for axes in panels[len(found) :]:
            axes.set_axis_off()
        if by:
            some = "" if len(found) == num_combinations else f"{len(found)} of {num_combinations}; "
            title = f"{with_unit(value)}  ({some}each panel has its own colours)"
            figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        return png(figure)


def _draw_grid(axes: Axes, one: Grid) -> None:
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    low, high = colour_range(one.cells)
    colours: dict[str, Any] = {"cmap": "Blues", "vmin": low, "vmax": high}
    axes.imshow(one.cells, aspect="auto", origin="lower", **colours)
    axes.set_xticks(range(len(one.xs)), [value_text(v) for v in one.xs])
    axes.set_yticks(range(len(one.ys)), [value_text(v) for v in one.ys])
    axes.tick_params(length=0)
    for (row, place), number in np.ndenumerate(one.cells):
        if not np.isnan(number):
            dark = high > low and (number - low) / (high - low) > 0.55
            ink = "white" if dark else "#333333"
            axes.text(place, row, shown(number), ha="center", va="center", color=ink)


def draw_pareto(
    table: Table,
    more: str = "output_throughput",
    less: str = "p99_ttft_ms",
    *,
    by: Sequence[str] = (),
) -> bytes:
    """Points that have much of one number and little of another; those that no other beats stand
    out. With columns in `by` they have numbers, and a key tells their values of these columns.

    Raises:
        UnknownNameError: the table lacks a column.
    """
    from matplotlib.figure import Figure

    frame = as_frame(table, [more, less, *by]).dropna(subset=[more, less])
    a, b = (frame[key].to_numpy(dtype=np.float64) for key in (more, less))
    front = pareto_front(a, b)
    with styled():
        figure = Figure(figsize=(10.5 if by else 8, 5.2), dpi=100, layout="constrained")
        axes = figure.subplots()
        dress(axes, f"{less} against {more}", with_unit(more), with_unit(less))
        if len(front) < len(a):
            axes.plot(a, b, "o", color="#999999", markersize=5, label="points")
        where: dict[str, Any] = {
            "color": COLOURS[1],
            "linestyle": DASHES[0],
            "marker": "o",
            "markersize": 7,
        }
        axes.plot(a[front], b[front], drawstyle="steps-pre", label="no other is better", **where)
        wide, sparse = is_wide([b])
        if wide:
            log_ticks(axes, "y", sparse=sparse)
        axes.margins(0.1)
        legend_below_title(axes)
        if by and len(front):
            numbered = dict(list(enumerate(front, 1))[:: -(-len(front) // MAX_NUMBERS)])
            _draw_key(figure, frame[list(by)].iloc[list(numbered.values())], list(numbered))
            figure.draw_without_rendering()  # now the axes are where they stay
            _draw_numbers(axes, {number: (a[at], b[at]) for number, at in numbered.items()})
        return png(figure)


def _draw_key(figure: Figure, settings: pd.DataFrame, numbers: Sequence[int]) -> None:
    """Which point has which settings: beside the axes, under the settings' names."""
    from matplotlib.lines import Line2D

    rows = (" · ".join(map(value_text, row)) for row in settings.itertuples(index=False))
    figure.legend(
        [Line2D([], [], linestyle="none")] * len(numbers),
        [f"{number}:  {row:.60}" for number, row in zip(numbers, rows, strict=True)],
        title=" ·\n".join(short_names(list(settings.columns)).values()),
        loc="outside right upper",
        handlelength=0.0,
        handletextpad=0.0,
        alignment="left",
    )


def _draw_numbers(axes: Axes, points: Mapping[int, tuple[float, float]]) -> None:
    """Numbers below and to the right of points of a front, where nothing is; side by side where
    points are too near to each other."""
    taken: list[tuple[float, float]] = []
    for number, point in points.items():
        x, y = axes.transData.transform(point) * 72 / 100  # in points, as offsets are
        right = 5.0
        while any(abs(x + right - i) < 13 and abs(y - j) < 11 for i, j in taken):
            right += 1
        taken.append((x + right, y))
        offset: Any = {"xytext": (right, -5), "textcoords": "offset points", "va": "top"}
        axes.annotate(str(number), point, fontsize=9, annotation_clip=False, **offset)
