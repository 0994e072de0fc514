"""The page of a sweep: percentiles against the load, heatmaps, trade-offs, and every point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from simserve.errors import counted
from simserve.report.curves import LATENCIES, is_wide
from simserve.report.outcomes import points_warnings
from simserve.report.page import Chart, Page, plain
from simserve.report.sweep_points import (
    Grid,
    Line,
    SweepPoints,
    colour_range,
    grids,
    lines,
    pareto_front,
    setting,
    short_names,
    spreads_by_factors,
    with_unit,
)

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["sweep_page"]

PERCENTILES = ("p50", "p95", "p99")
GAIN, TRADE_OFFS = "output_throughput", ("p99_ttft_ms", "p99_itl_ms")
TRADED = (GAIN, *TRADE_OFFS)
MAX_WARNINGS = 3
"""That stand at the beginning."""
SHOWN = (
    "completed",
    "rejected",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    *(
        f"{percentile}_{metric}_ms"
        for metric in ("ttft", "itl", "e2el")
        for percentile in PERCENTILES
    ),
    "num_preemptions",
    "total_cached_tokens",
    "max_kv_cache_usage",
)
"""Columns of the table of points, after what was swept; `rejected` if any was."""


def sweep_page(points: SweepPoints) -> str:
    """HTML of a sweep."""
    frame, failed = points.frame, points.failed
    page = Page(points.name, _subtitle(points))
    if len(failed):
        page.text(f"{len(failed)} of {len(frame) + len(failed)} points failed.", "note")
        message = failed["failure"] if "failure" in failed else failed["status"]
        rows = [[str(a), str(b)] for a, b in zip(failed["point"], message, strict=True)]
        page.table(["point that failed", "why"], rows)
    said = points_warnings(frame.to_dict("records"))
    for text in said[:MAX_WARNINGS]:
        page.text(text, "note")
    if points.load_key is not None:
        page.heading(f"Latencies against {points.load_key}")
        page.charts(_percentile_charts(points, points.load_key), one_legend=True)
    if points.grid_keys is not None and points.heatmaps:
        page.heading(" × ".join(points.grid_keys))
        _add_heatmaps(page, points, *points.grid_keys)
    page.heading("Trade-offs")
    numbers = _numbers_of_best(frame)
    page.charts([_pareto(points, less, numbers) for less in TRADE_OFFS if less in frame])
    if numbers:
        page.text("The numbered points, which no other beats:", "quiet")
        page.table(*_table(points, numbers, TRADED))
    page.heading("Points")
    page.table(*_table(points))
    if len(said) > MAX_WARNINGS:
        page.folded("all warnings", "\n".join(said))
    return page.render()


def _subtitle(points: SweepPoints) -> str:
    frame = points.frame
    same = [
        str(frame[key].iloc[0])
        for key in ("model_id", "gpu", "decisions", "timing")
        if key in frame and frame[key].nunique(dropna=False) == 1 and frame[key].notna().all()
    ]
    over = f" over {', '.join(points.keys)}" if points.keys else ""
    return " · ".join([counted(len(frame), "point") + over, *same])


def _percentile_charts(points: SweepPoints, x: str) -> list[Chart]:
    by = [key for key in points.free if key != x]
    every = list(lines(points.frame, x, by))
    places = np.unique(np.concatenate([line.x for line in every]))
    axis = {"ticks": plain(places), "log": spreads_by_factors(places)}
    if len(every) == 1:
        named = [(percentile, every[0], percentile) for percentile in PERCENTILES]
    else:
        named = [(line.name, line, "p99") for line in every]
    which = "" if len(every) == 1 else ", p99"
    return [
        {
            "title": title + which,
            "hover": "points",
            "x": {"label": with_unit(x), "pad": True, **axis},
            "y": {"label": f"{metric.upper()} (ms)", "zero": True, **_scale(named, metric)},
            "series": [
                _line(points, line, f"{percentile}_{metric}_ms", name, place)
                for place, (name, line, percentile) in enumerate(named)
            ],
        }
        for metric, title in LATENCIES.items()
        if f"p99_{metric}_ms" in points.frame
    ]


def _scale(named: Sequence[tuple[str, Line, str]], metric: str) -> dict[str, Any]:
    """Of the values that are drawn, as for the figure."""
    values = [_numbers(line.rows, f"{percentile}_{metric}_ms") for _, line, percentile in named]
    values = [column[~np.isnan(column)] for column in values]
    return {"log": is_wide(values)[0]}


def _line(points: SweepPoints, line: Line, key: str, name: str, place: int) -> dict[str, Any]:
    rows = line.rows[line.rows[key].notna()]
    series: dict[str, Any] = {
        "name": name,
        "colour": place,
        "dash": place % 2 == 1,
        "shape": "dots" if line.is_curve else "points",
        "x": plain(line.x[line.rows[key].notna().to_numpy()]),
        "y": plain(_numbers(rows, key)),
        "text": [f"{name}\n{_settings(points, row)}" for row in rows.to_dict("records")],
    }
    if f"{key}_ci95_low" in rows and rows[f"{key}_ci95_low"].notna().all():
        for side in ("low", "high"):
            series[side] = plain(_numbers(rows, f"{key}_ci95_{side}"))
    return series


def _add_heatmaps(page: Page, points: SweepPoints, x: str, y: str) -> None:
    """A chart a number; if more varies than the two settings, a row of charts a number."""
    by = points.panel_keys
    found = {value: grids(points.frame, x, y, value, by) for value in points.heatmaps}
    rows = [
        [_heatmap(one, x, y, value, name) for name, one in of_value.grids.items()]
        for value, of_value in found.items()
    ]
    if not by:
        page.charts([chart for row in rows for chart in row])
        return
    count, few = max((one.num_combinations, len(one.grids)) for one in found.values())
    some = f" ({few} of {count} combinations)" if few < count else ""
    page.text(f"By {' × '.join(by)}{some}; colours compare the cells of one chart.", "quiet")
    for row in rows:
        page.charts(row)


def _heatmap(one: Grid, x: str, y: str, value: str, name: str) -> Chart:
    xs, ys, cells, depth = one
    low, high = colour_range(cells)
    shades = (cells - low) / (high - low) if high > low else np.zeros_like(cells)
    mean = "" if depth <= 1 else f", mean of up to {depth} points"
    return {
        "title": ", ".join(filter(None, (with_unit(value), name))) + mean,
        "value": value,
        "x": {"label": with_unit(short_names([x, y])[x]), "values": xs},
        "y": {"label": with_unit(short_names([x, y])[y]), "values": ys},
        "cells": [plain(row) for row in cells],
        "shades": [plain(row) for row in shades],
    }


def _front(frame: pd.DataFrame, less: str) -> pd.DataFrame:
    """Rows of the points that no other beats in throughput and in `less`."""
    known = frame.dropna(subset=[GAIN, less])
    return known.iloc[pareto_front(_numbers(known, GAIN), _numbers(known, less))]


def _numbers_of_best(frame: pd.DataFrame) -> dict[int, int]:
    """Rows of the points on a front, numbered by throughput: a point has one in all charts."""
    fronts = [_front(frame, less) for less in TRADE_OFFS if less in frame]
    rows = {row for front in fronts for row in front.index.tolist()}
    ordered = frame.loc[sorted(rows)].sort_values(GAIN, kind="stable").index.tolist()
    return {row: number for number, row in enumerate(ordered, 1)}


def _pareto(points: SweepPoints, less: str, numbers: Mapping[int, int]) -> Chart:
    front = _front(points.frame, less)
    known = points.frame.dropna(subset=[GAIN, less])
    series = [
        {
            "name": name,
            "colour": colour,
            "shape": shape,
            "x": plain(_numbers(rows, GAIN)),
            "y": plain(_numbers(rows, less)),
            "text": [_settings(points, row) for row in rows.to_dict("records")],
        }
        for name, colour, shape, rows in (
            ("points", 6, "points", known.drop(front.index)),
            ("no other is better", 1, "front", front),
        )
        if len(rows)
    ]
    if len(front):
        series[-1]["numbers"] = [numbers[row] for row in front.index.tolist()]
    return {
        "title": f"{less} against throughput",
        "hover": "points",
        "x": {"label": "output tokens/s", "pad": True},
        "y": {"label": less, "pad": True, "log": is_wide([_numbers(known, less)])[0]},
        "series": series,
    }


def _table(
    points: SweepPoints, numbers: Mapping[int, int] | None = None, shown: Sequence[str] = SHOWN
) -> tuple[list[str], list[list[object]]]:
    """Settings and numbers of points: of those in `numbers`, after these, or of all."""
    frame = points.frame if numbers is None else points.frame.loc[list(numbers)]
    known = [key for key in shown if key in frame and frame[key].notna().any()]
    columns = [*points.keys, *(key for key in known if key != "rejected" or frame[key].any())]
    rows = [[_plain(value) for value in row] for row in frame[columns].itertuples(index=False)]
    header = list(short_names(columns).values())
    if numbers is None:
        return header, rows
    return ["number", *header], [[n, *row] for n, row in zip(numbers.values(), rows, strict=True)]


def _settings(points: SweepPoints, row: dict[str, Any]) -> str:
    return "\n".join(setting(name, row[key]) for key, name in short_names(points.keys).items())


def _numbers(frame: pd.DataFrame, key: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    values: np.ndarray[Any, np.dtype[np.float64]] = frame[key].to_numpy(dtype=np.float64)
    return values


def _plain(value: object) -> object:
    """A value of a frame as Python has it."""
    return value.item() if isinstance(value, np.generic) else value
