"""The picture of a trace: how long requests are, and when they come."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from simserve.errors import TraceError
from simserve.report.curves import is_wide
from simserve.report.style import COLOURS, log_ticks, png, styled
from simserve.workload.stats import TraceColumns

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_trace"]

_PROMPT, _OUTPUT, _HIT = COLOURS[:3]


def plot_trace(columns: TraceColumns, path: Path, title: str = "") -> None:
    """Draw lengths (histogram and CDF), arrivals and tokens over time into a PNG file.

    Raises:
        ValueError: there are no requests.
    """
    from matplotlib.figure import Figure

    stats = columns.stats()
    with styled():
        figure = Figure(figsize=(13, 8), dpi=100, layout="constrained")
        axes = figure.subplots(2, 2)
        _draw_histogram(axes[0, 0], columns)
        _draw_cdf(axes[0, 1], columns)
        _draw_arrivals(axes[1, 0], columns, stats.rate_rps)
        _draw_tokens(axes[1, 1], columns, stats.prefix_hit_share)
        last_s = float(columns.arrival_s[-1] - columns.arrival_s[0])
        waits = " or later" if columns.waits.any() else ""
        headline = f"{title}: {stats.num_requests:,} requests over {last_s:,.1f} s{waits}"
        figure.suptitle(headline, x=0.01, ha="left", fontsize=15)
        picture = png(figure)
    try:
        path.write_bytes(picture)
    except OSError as error:
        raise TraceError(f"{path}: cannot write the picture: {error.strerror}") from error


def _draw_histogram(axis: Axes, columns: TraceColumns) -> None:
    every = _every_length(columns)
    low, high = int(every.min()), int(every.max()) + 1
    if is_wide([every])[0]:
        edges = np.geomspace(low, high, 41)
    else:
        edges = np.linspace(low, high, min(41, high - low + 1))
    lengths = (("prompt", columns.prompt_len, _PROMPT), ("output", columns.output_len, _OUTPUT))
    for label, values, colour in lengths:
        axis.hist(values, bins=edges.tolist(), alpha=0.6, color=colour, label=label)
    _set_length_axis(axis, every)
    axis.set(ylabel="requests", title="Lengths")
    axis.legend()


def _draw_cdf(axis: Axes, columns: TraceColumns) -> None:
    lengths = (("prompt", columns.prompt_len, _PROMPT), ("output", columns.output_len, _OUTPUT))
    for label, values, colour in lengths:
        axis.ecdf(values, color=colour, label=label)
    _set_length_axis(axis, _every_length(columns))
    axis.set(ylabel="share of requests", title="Lengths, cumulative", ylim=(0, 1.02))
    axis.legend(loc="best")


def _every_length(columns: TraceColumns) -> NDArray[np.int64]:
    return np.concatenate((columns.prompt_len, columns.output_len))


def _set_length_axis(axis: Axes, every: NDArray[np.int64]) -> None:
    wide, sparse = is_wide([every])
    if wide:
        log_ticks(axis, "x", sparse=sparse)
    axis.set_xlabel("length (tokens)")


def _draw_arrivals(axis: Axes, columns: TraceColumns, rate_rps: float | None) -> None:
    edges_s = _time_edges(columns)
    width_s = float(edges_s[1] - edges_s[0])
    rates = np.histogram(columns.arrival_s[~columns.waits], edges_s)[0] / width_s
    axis.stairs(rates, edges_s, fill=True, alpha=0.6, color=_PROMPT)
    if rate_rps is not None:
        label = f"mean: {rate_rps:.3g}/s"
        axis.axhline(rate_rps, color="0.3", linestyle="--", linewidth=1, label=label)
        axis.legend(loc="upper right")
    which = ", without turns that wait" if columns.waits.any() else ""
    axis.set(ylabel="requests per second", title=f"Arrivals{which} ({width_s:.3g} s bins)")
    _set_limits(axis, edges_s, float(rates.max()))


def _draw_tokens(axis: Axes, columns: TraceColumns, prefix_hit_share: float) -> None:
    edges_s = _time_edges(columns)
    width_s = float(edges_s[1] - edges_s[0])
    seen = f"of it, seen before ({columns.block_size}-token blocks): {100 * prefix_hit_share:.1f} %"
    layers = (
        ("prompt", columns.prompt_len, _PROMPT, 0.6),
        (seen, columns.hit_len, _HIT, 0.9),
    )
    highest = 0.0
    for label, values, colour, alpha in layers:
        rates = np.histogram(columns.arrival_s, edges_s, weights=values)[0] / width_s
        axis.stairs(rates, edges_s, fill=True, alpha=alpha, color=colour, label=label)
        highest = max(highest, float(rates.max()))
    when = ", at the earliest" if columns.waits.any() else ""
    title = f"Prompt tokens and the prefix-hit bound{when}"
    axis.set(ylabel="prompt tokens per second", title=title)
    axis.legend(loc="upper right")
    _set_limits(axis, edges_s, highest)


def _set_limits(axis: Axes, edges_s: NDArray[np.float64], highest: float) -> None:
    """The whole time axis, and room above the bars for the legend."""
    axis.set(xlabel="time (s)", xlim=(edges_s[0], edges_s[-1]), ylim=(0, 1.3 * highest))


def _time_edges(columns: TraceColumns) -> NDArray[np.float64]:
    """Bin edges over the span; a second if all requests come at once."""
    start_s, end_s = float(columns.arrival_s[0]), float(columns.arrival_s[-1])
    return np.linspace(start_s, end_s if end_s > start_s else start_s + 1, _num_bins(columns) + 1)


def _num_bins(columns: TraceColumns) -> int:
    """Fewer for few requests, so that a bin holds more than one."""
    return int(np.clip(len(columns.arrival_s) // 5, 10, 60))
