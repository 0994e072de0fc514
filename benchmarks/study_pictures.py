"""Pictures of the studies: bars or lines of a number a case, and who got a first token when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from simserve.report.style import COLOURS, QUIET, dress, log_ticks, looks, png, styled


class Panel(NamedTuple):
    """One number for each series at each place of the x axis."""

    title: str
    ylabel: str
    series: Mapping[str, Sequence[float | None]]
    places: Sequence[str]
    xlabel: str = ""
    is_log: bool = False
    is_line: bool = False
    is_dense: bool = False
    """Ticks at 2 and 5 of a decade, too."""
    guide: tuple[str, Sequence[float]] | None = None
    """A line to compare with, which nobody measured, and its name."""


def draw_panels(panels: Sequence[Panel]) -> bytes:
    """Panels side by side; one legend, since all have the same series."""
    with styled():
        figure = Figure(figsize=(6.4 * len(panels), 4.4), dpi=100, layout="constrained")
        row = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, panel in zip(row, panels, strict=True):
            dress(axes, panel.title, panel.xlabel, panel.ylabel)
            at = np.arange(len(panel.places))
            width = 0.8 / len(panel.series)
            assert len(panel.series) <= len(COLOURS), "two series would have one colour"
            styles = looks(len(panel.series))
            for number, (name, values) in enumerate(panel.series.items()):
                heights = np.array(values, dtype=np.float64)
                colour, dashes = styles[number]
                if panel.is_line:
                    axes.plot(at, heights, color=colour, linestyle=dashes, marker="o", label=name)
                else:
                    left = at + (number - (len(panel.series) - 1) / 2) * width
                    axes.bar(left, heights, width * 0.92, color=colour, label=name)
            if panel.guide is not None:
                name, values = panel.guide
                axes.plot(at, values, color=QUIET, linestyle=":", label=name)
            axes.set_xticks(at, panel.places)
            if panel.is_log:
                log_ticks(axes, "y", sparse=not panel.is_dense)
            else:
                axes.set_ylim(bottom=0.0)
        if len(panels[0].series) > 1:
            legend_below(figure, row[0], 2 * len(panels))
        return png(figure)


def draw_first_tokens(columns: Mapping[str, Mapping[str, pd.DataFrame]]) -> bytes:
    """When each request got its first token: a panel a column, a row a setting."""
    with styled():
        rows = max(map(len, columns.values()))
        size = (5.6 * len(columns), 1.2 + 0.5 * rows)
        figure = Figure(figsize=size, dpi=100, layout="constrained")
        panels = figure.subplots(1, len(columns), squeeze=False, sharex=True)[0]
        for axes, (title, runs) in zip(panels, columns.items(), strict=True):
            dress(axes, title, "first token (s)", "")
            for place, requests in enumerate(runs.values()):
                for name, marker, colour in (("short", "o", COLOURS[0]), ("long", "D", COLOURS[1])):
                    times = requests.loc[requests["class"] == name, "first_token_s"]
                    label = name if place == 0 else None
                    axes.plot(
                        times, [place] * len(times), marker, color=colour, alpha=0.7, label=label
                    )
            axes.set_yticks(range(len(runs)), list(runs))
            axes.set_ylim(len(runs) - 0.5, -0.5)
        panels[0].set_xlim(left=0.0)
        legend_below(figure, panels[0], 2)
        return png(figure)


def draw_real_and_simulated(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
) -> bytes:
    """Points (real, simulated) in ms, a panel a number, a colour a study; the diagonal is equal."""
    with styled():
        figure = Figure(figsize=(5.8 * len(panels), 5.6), dpi=100, layout="constrained")
        row = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (title, groups) in zip(row, panels.items(), strict=True):
            dress(axes, title, "on the H200 (ms)", "simulated (ms)")
            for number, (name, points) in enumerate(groups.items()):
                turn, place = divmod(number, len(COLOURS))
                xy = np.array(points or [(np.nan, np.nan)]).T
                axes.plot(*xy, "osD"[turn], color=COLOURS[place], alpha=0.7, label=name)
            values = [value for points in groups.values() for point in points for value in point]
            bounds = (min(values) / 1.3, max(values) * 1.3)
            axes.plot(bounds, bounds, color="grey", linewidth=1, zorder=0)
            for axis in ("x", "y"):
                log_ticks(axes, axis, sparse=False)
            axes.set(xlim=bounds, ylim=bounds)
        legend_below(figure, row[0], 4)
        return png(figure)


def legend_below(figure: Figure, axes: Axes, num_columns: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=num_columns)
