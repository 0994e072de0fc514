"""The page of a sweep: percentiles against the load, heatmaps, trade-offs, and every point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from simserve.report.curves import LATENCIES, is_wide
from simserve.report.page import Chart, Page, plain
from simserve.report.sweep_points import (
    Line,
    SweepPoints,
    colour_range,
    grid,
    lines,
    pareto_front,
    setting,
    short_names,
)

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["sweep_page"]

PERCENTILES = ("p50", "p95", "p99")
HEATMAPS = ("p99_ttft_ms", "p99_itl_ms", "output_throughput")
TRADE_OFFS = ("p99_ttft_ms", "p99_itl_ms")
MAX_TICKS = 8
"""Values on the x axis that each get a tick of their own."""
SHOWN = (
    "completed",
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
"""Columns of the table of points, after what was swept."""


def sweep_page(points: SweepPoints) -> str:
    """HTML of a sweep."""
    frame, failed = points.frame, points.failed
    page = Page(points.name, _subtitle(points))
    if len(failed):
        page.text(f"{len(failed)} of {len(frame) + len(failed)} points failed.", "note")
        message = failed["failure"] if "failure" in failed else failed["status"]
        rows = [[str(a), str(b)] for a, b in zip(failed["point"], message, strict=True)]
        page.table(["point that failed", "why"], rows)
    if points.load_key is not None:
        page.heading(f"Latencies against {points.load_key}")
        page.charts(_percentile_charts(points, points.load_key))
    if points.grid_keys is not None:
        page.heading(" × ".join(points.grid_keys))
        page.charts([_heatmap(points, *points.grid_keys, v) for v in HEATMAPS if v in frame])
    page.heading("Trade-offs")
    page.charts([_pareto(points, less) for less in TRADE_OFFS if less in frame])
    page.heading("Points")
    page.table(*_table(points))
    return page.render()


def _subtitle(points: SweepPoints) -> str:
    frame = points.frame
    same = [
        str(frame[key].iloc[0])
        for key in ("model_id", "gpu", "decisions", "timing")
        if key in frame and frame[key].nunique(dropna=False) == 1 and frame[key].notna().all()
    ]
    return " · ".join([f"{len(frame)} points over {', '.join(points.keys)}", *same])


def _percentile_charts(points: SweepPoints, x: str) -> list[Chart]:
    by = [key for key in points.free if key != x]
    every = list(lines(points.frame, x, by))
    places = np.unique(np.concatenate([line.x for line in every]))
    ticks = {"ticks": plain(places)} if len(places) <= MAX_TICKS else {}
    if len(every) == 1:
        named = [(percentile, every[0], percentile) for percentile in PERCENTILES]
    else:
        named = [(f"{line.name}: p99", line, "p99") for line in every]
    return [
        {
            "title": title,
            "hover": "points",
            "x": {"label": x, "pad": True, **ticks},
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


def _heatmap(points: SweepPoints, x: str, y: str, value: str) -> Chart:
    xs, ys, cells, depth = grid(points.frame, x, y, value)
    low, high = colour_range(cells)
    shades = (cells - low) / (high - low) if high > low else np.zeros_like(cells)
    return {
        "title": value if depth <= 1 else f"{value}, mean of up to {depth} points",
        "value": value,
        "x": {"label": short_names([x, y])[x], "values": xs},
        "y": {"label": short_names([x, y])[y], "values": ys},
        "cells": [plain(row) for row in cells],
        "shades": [plain(row) for row in shades],
    }


def _pareto(points: SweepPoints, less: str) -> Chart:
    more = "output_throughput"
    frame = points.frame.dropna(subset=[more, less])
    a, b = _numbers(frame, more), _numbers(frame, less)
    texts = [_settings(points, row) for row in frame.to_dict("records")]
    front = pareto_front(a, b)
    others = np.setdiff1d(np.arange(len(a)), front)
    series = [
        {
            "name": name,
            "colour": colour,
            "shape": shape,
            "x": plain(a[places]),
            "y": plain(b[places]),
            "text": [texts[place] for place in places.tolist()],
        }
        for name, colour, shape, places in (
            ("points", 6, "points", others),
            ("no other is better", 1, "front", front),
        )
        if len(places)
    ]
    return {
        "title": f"Throughput against {less}",
        "hover": "points",
        "x": {"label": "output tokens/s", "pad": True},
        "y": {"label": less, "pad": True, "log": is_wide([b])[0]},
        "series": series,
    }


def _table(points: SweepPoints) -> tuple[list[str], list[list[object]]]:
    frame = points.frame
    columns = [*points.keys, *(key for key in SHOWN if key in frame and frame[key].notna().any())]
    rows = [[_plain(value) for value in row] for row in frame[columns].itertuples(index=False)]
    return list(short_names(columns).values()), rows


def _settings(points: SweepPoints, row: dict[str, Any]) -> str:
    return "\n".join(setting(name, row[key]) for key, name in short_names(points.keys).items())


def _numbers(frame: pd.DataFrame, key: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    values: np.ndarray[Any, np.dtype[np.float64]] = frame[key].to_numpy(dtype=np.float64)
    return values


def _plain(value: object) -> object:
    """A value of a frame as Python has it."""
    return value.item() if isinstance(value, np.generic) else value
