"""Pictures of a table of runs, such as a sweep's summary. Each returns a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from simserve.report.curves import LATENCIES, is_wide
from simserve.report.style import (
    COLOURS,
    DASHES,
    dress,
    legend_below_title,
    log_ticks,
    looks,
    numeral,
    png,
    styled,
)
from simserve.report.sweep_points import (
    Line,
    Table,
    as_frame,
    colour_range,
    grid,
    lines,
    pareto_front,
    short_names,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_heatmap", "draw_pareto", "draw_percentiles"]

PERCENTILES = ("p50", "p95", "p99")
MAX_TICKS = 10
"""Values on the x axis that each get a tick of their own."""
MAX_LABELS = 12
"""Points of a front that are labelled; more would cover each other."""


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
        UnknownNameError: the table lacks a column.
    """
    from matplotlib.figure import Figure

    every = list(lines(table, x, by))
    if len(every) == 1:
        every = [every[0]._replace(name="")]
    with styled():
        size = (5.4 * len(metrics), 4.8)
        figure = Figure(figsize=size, dpi=100, layout="constrained")
        panels = figure.subplots(1, len(metrics), squeeze=False)[0]
        for axes, metric in zip(panels, metrics, strict=True):
            dress(axes, LATENCIES.get(metric, metric.upper()), x, "ms")
            _draw_lines(axes, every, metric)
        return png(figure)


def _draw_lines(axes: Axes, every: Sequence[Line], metric: str) -> None:
    if len(every) == 1:
        named = [(p, every[0], f"{p}_{metric}_ms") for p in PERCENTILES]
    else:
        named = [(f"{line.name}: p99", line, f"p99_{metric}_ms") for line in every]
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
        axes.set_ylim(bottom=0.0)
    places = np.unique(np.concatenate([line.x for line in every]))
    if len(places) <= MAX_TICKS:
        axes.set_xticks(places, [numeral(place) for place in places])
    if len(every) == 1:
        legend_below_title(axes)
    else:
        axes.legend(fontsize=8.5)


def draw_heatmap(
    table: Table,
    x: str = "scheduler.max_num_batched_tokens",
    y: str = "scheduler.long_prefill_token_threshold",
    *,
    value: str = "p99_ttft_ms",
) -> bytes:
    """A number over two settings, written into each cell; the mean where a cell has several points.

    Raises:
        UnknownNameError: the table lacks a column.
    """
    from matplotlib.figure import Figure

    xs, ys, cells, depth = grid(table, x, y, value)
    with styled():
        size = (max(6.0, 2.5 + 0.95 * len(xs)), max(3.6, 1.8 + 0.6 * len(ys)))
        figure = Figure(figsize=size, dpi=100, layout="constrained")
        axes = figure.subplots()
        title = value if depth <= 1 else f"{value}, mean of up to {depth} points"
        names = short_names([x, y])
        dress(axes, title, names[x], names[y])
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        low, high = colour_range(cells)
        colours: dict[str, Any] = {"cmap": "Blues", "vmin": low, "vmax": high}
        axes.imshow(cells, aspect="auto", origin="lower", **colours)
        axes.set_xticks(range(len(xs)), [numeral(v) for v in xs])
        axes.set_yticks(range(len(ys)), [numeral(v) for v in ys])
        axes.tick_params(length=0)
        for (row, place), number in np.ndenumerate(cells):
            if not np.isnan(number):
                dark = high > low and (number - low) / (high - low) > 0.55
                text = f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"
                ink = "white" if dark else "#333333"
                axes.text(place, row, text, ha="center", va="center", color=ink)
        return png(figure)


def draw_pareto(
    table: Table,
    more: str = "output_throughput",
    less: str = "p99_ttft_ms",
    *,
    label: str | None = None,
) -> bytes:
    """Points that have much of one number and little of another; those that no other beats stand
    out, with their value of the column `label` beside them.

    Raises:
        UnknownNameError: the table lacks a column.
    """
    from matplotlib.figure import Figure

    frame = as_frame(table, [more, less, *([label] if label else [])]).dropna(subset=[more, less])
    a, b = (frame[key].to_numpy(dtype=np.float64) for key in (more, less))
    front = pareto_front(a, b)
    with styled():
        figure = Figure(figsize=(8, 5.2), dpi=100, layout="constrained")
        axes = figure.subplots()
        dress(axes, f"{more} against {less}", more, less)
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
        if label:
            every = -(-len(front) // MAX_LABELS)
            for place in front[::every]:
                point = (a[place], b[place])
                text = str(frame[label].iloc[place])
                axes.annotate(text, point, (-6, 5), textcoords="offset points", ha="right")
        axes.margins(0.1)
        legend_below_title(axes)
        return png(figure)
