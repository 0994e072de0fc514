"""The picture of a calibration: measured against predicted step times, by regime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simserve.report.style import GRID, INK, dress, looks, numeral, png, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Regime", "draw_calibration"]

_NEAR, _FAR = 0.03, 0.10
"""Error bands: relative, to either side."""
_LARGEST_SHOWN = 0.25
_MARKS = "osD^v<>P"


class Regime(NamedTuple):
    """Steps of one kind: measured and predicted durations (s), shape [steps]."""

    name: str
    measured_s: NDArray[np.float64]
    predicted_s: NDArray[np.float64]

    @property
    def error(self) -> NDArray[np.float64]:
        """(predicted - measured) / measured."""
        return np.asarray(self.predicted_s / self.measured_s - 1.0)


def draw_calibration(regimes: Sequence[Regime], title: str) -> bytes:
    """A PNG of 1600 x 800 pixels: predicted over measured, and the error of each step."""
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=(16, 8), dpi=100)
        grid = figure.add_gridspec(1, 2, left=0.06, right=0.98, bottom=0.24, top=0.86, wspace=0.16)
        times, errors = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
        figure.suptitle(title, x=0.06, y=0.96, ha="left", fontsize=15)
        everything = np.concatenate([1e3 * one.measured_s for one in regimes])
        ends = np.array([0.8 * everything.min(), 1.25 * everything.max()])
        _draw_times(times, regimes, ends)
        _draw_errors(errors, regimes, ends)
        handles, labels = times.get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncols=3, bbox_to_anchor=(0.5, 0.01))
        return png(figure)


def _draw_times(axes: Axes, regimes: Sequence[Regime], ends: NDArray[np.float64]) -> None:
    for band, shade in ((_FAR, "#EEEEEE"), (_NEAR, GRID)):
        label = f"within {100 * band:.0f} %"
        axes.fill_between(ends, ends * (1 - band), ends * (1 + band), color=shade, label=label)
    axes.plot(ends, ends, color=INK, linewidth=0.8)
    for number, one in enumerate(regimes):
        _scatter(axes, number, 1e3 * one.measured_s, 1e3 * one.predicted_s, _label(one))
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: numeral(value))
    _finish(axes, ends, "Predicted over measured", "predicted (ms)")
    axes.set_ylim(*ends)


def _draw_errors(axes: Axes, regimes: Sequence[Regime], ends: NDArray[np.float64]) -> None:
    for band, shade in ((_FAR, "#EEEEEE"), (_NEAR, GRID)):
        axes.axhspan(-100 * band, 100 * band, color=shade, linewidth=0)
    axes.axhline(0.0, color=INK, linewidth=0.8)
    beyond = 0
    for number, one in enumerate(regimes):
        beyond += int((np.abs(one.error) > _LARGEST_SHOWN).sum())
        shown = 100 * one.error.clip(-_LARGEST_SHOWN, _LARGEST_SHOWN)
        _scatter(axes, number, 1e3 * one.measured_s, shown, None)
    outside = f"; {beyond} steps beyond are at the edge" if beyond else ""
    _finish(axes, ends, f"Error of each step{outside}", "(predicted − measured) / measured (%)")
    limit = 104 * _LARGEST_SHOWN
    axes.set_ylim(-limit, limit)


def _label(one: Regime) -> str:
    return f"{one.name}: {len(one.measured_s):,} steps, {100 * np.abs(one.error).mean():.1f} %"


def _scatter(axes: Axes, number: int, x: Any, y: Any, label: str | None) -> None:
    look = looks(number + 1)[-1]
    mark = _MARKS[number % len(_MARKS)]
    axes.scatter(x, y, s=16, marker=mark, color=look.colour, alpha=0.55, linewidths=0, label=label)


def _finish(axes: Axes, ends: NDArray[np.float64], title: str, ylabel: str) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: numeral(value))
    axes.set_xlim(*ends)
    dress(axes, title, "measured (ms)", ylabel)
