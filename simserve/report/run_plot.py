"""The picture of a run: how long users waited, and what the engine did meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from simserve.metrics.arrow import column
from simserve.metrics.quantiles import Sample, percentiles
from simserve.metrics.result import RunResult
from simserve.metrics.tables import token_times
from simserve.report.style import COLOURS, Look, dress, legend_above, log_ticks, looks, png, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_run"]

MAX_POINTS = 1_500
"""Points of a curve: about two per pixel of its width."""

MAX_SLICES = 400
"""Slices of time over which a per-step value is drawn as mean and range."""

MAX_CLASSES = 6
"""With more, curves could not be told apart: all are drawn as one."""

Floats = NDArray[np.float64]


def draw_run(result: RunResult) -> bytes:
    """A PNG of 1600 x 1000 pixels: TTFT and ITL distributions, queues, KV cache, batches."""
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=(16, 10), dpi=100)
        left = figure.add_gridspec(2, 1, left=0.05, right=0.47, bottom=0.07, top=0.9, hspace=0.3)
        right = figure.add_gridspec(3, 1, left=0.55, right=0.98, bottom=0.07, top=0.9, hspace=0.25)
        ttft, itl = (figure.add_subplot(left[row]) for row in range(2))
        queues, cache, batch = (figure.add_subplot(right[row]) for row in range(3))
        figure.suptitle(_headline(result), x=0.05, y=0.97, ha="left", fontsize=15)
        _draw_distributions(result, ttft, itl)
        _draw_queues(result, queues)
        _draw_cache(result, cache)
        _draw_batch(result, batch)
        return png(figure)


def _headline(result: RunResult) -> str:
    summary = result.summary_dict
    name = summary.get("label") or summary.get("model_id") or summary.get("backend")
    text = f"{name}: {summary['completed']} of {summary['num_prompts']} requests completed"
    rate = summary.get("output_throughput")
    return text if rate is None else f"{text}, {rate:,.0f} output tokens/s"


def _draw_distributions(result: RunResult, ttft: Axes, itl: Axes) -> None:
    """Cumulative distributions over completed requests, one curve a class if there are classes."""
    requests = result.requests_table
    completed = np.array(requests["status"].to_pylist(), dtype=object) == "completed"
    classes = np.array(requests["class"].to_pylist(), dtype=object)
    names = sorted({name for name in classes if name is not None})
    groups = [(name, completed & (classes == name)) for name in names]
    if not 2 <= len(names) <= MAX_CLASSES:
        groups = [("all", completed)]
    times = token_times(requests, result.steps_table)
    waits = column(requests, "ttft_ms")
    for (name, mask), look in zip(groups, looks(len(groups)), strict=True):
        _draw_cdf(ttft, Sample.of(waits[mask & ~np.isnan(waits)]), name, look)
        _draw_cdf(itl, times.itl(mask).scaled(1000.0), name, look)
    dress(ttft, "Time to first token (TTFT)", "ms", "share of requests")
    dress(itl, "Inter-token latency (ITL)", "ms", "share of gaps")
    for axes in (ttft, itl):
        _finish_cdf(axes)


def _draw_cdf(axes: Axes, sample: Sample, name: str, look: Look) -> None:
    if not sample.size:
        return
    order = np.argsort(sample.values, kind="stable")
    values, ranks = sample.values[order], np.cumsum(sample.weights[order])
    if len(values) > MAX_POINTS:
        # Evenly spaced ranks, and the tail, where the interesting gaps are, in full.
        even = np.searchsorted(ranks, np.linspace(0, ranks[-1], MAX_POINTS), side="right")
        tail = np.arange(len(values) - MAX_POINTS // 4, len(values))
        kept = np.unique(np.concatenate((np.minimum(even, len(values) - 1), tail)))
        values, ranks = values[kept], ranks[kept]
    share = ranks / ranks[-1]
    p99 = percentiles(sample, [99.0])[0] or 0.0
    axes.step(
        np.concatenate((values[:1], values)),
        np.concatenate(([0.0], share)),
        where="post",
        color=look.colour,
        linestyle=look.dashes,
        label=f"{name}: p99 {p99:,.0f} ms" if p99 >= 100 else f"{name}: p99 {p99:.3g} ms",
    )


def _finish_cdf(axes: Axes) -> None:
    axes.set_ylim(0.0, 1.02)
    if not axes.lines:
        _say_empty(axes)
        return
    points = np.concatenate([np.asarray(line.get_xdata()) for line in axes.lines])
    smallest, largest = float(points.min()), float(points.max())
    if smallest > 0 and largest > 20 * smallest:
        log_ticks(axes, sparse=largest > 500 * smallest)
    axes.axhline(0.99, color="#888888", linewidth=0.8, linestyle=":")
    if len(axes.get_legend_handles_labels()[0]) <= 2:
        legend_above(axes)
        return
    middle = axes.transScale + axes.transLimits
    is_left = middle.transform((float(np.median(points)), 0.5))[0] < 0.5
    axes.legend(loc="lower right" if is_left else "upper left", bbox_to_anchor=(0, 0, 1, 0.98))


def _draw_queues(result: RunResult, axes: Axes) -> None:
    dress(axes, "Requests in the engine", "", "requests")
    _draw_steps(result, axes, "num_running", "running", COLOURS[0])
    _draw_steps(result, axes, "num_waiting", "waiting", COLOURS[1])
    axes.tick_params(labelbottom=False)
    _finish_steps(axes)


def _draw_cache(result: RunResult, axes: Axes) -> None:
    dress(axes, "KV cache in use", "", "share of blocks")
    _draw_steps(result, axes, "kv_cache_usage", "KV cache", COLOURS[2])
    preempted = column(result.steps_table, "num_preempted") > 0
    if preempted.any():
        when = column(result.steps_table, "start_s")[preempted]
        when = np.unique(when[:: max(1, len(when) // MAX_POINTS)])
        level = np.full(len(when), 1.04)
        axes.plot(when, level, "|", color=COLOURS[1], markersize=7, label="preemption")
    axes.set_ylim(0.0, 1.09)
    axes.tick_params(labelbottom=False)
    _finish_steps(axes)


def _draw_batch(result: RunResult, axes: Axes) -> None:
    dress(axes, "Tokens per step", "time (s)", "tokens")
    _draw_steps(result, axes, "num_tokens", "all", COLOURS[0])
    _draw_steps(result, axes, "num_decode_tokens", "decode", COLOURS[4])
    _finish_steps(axes)


def _draw_steps(result: RunResult, axes: Axes, name: str, label: str, colour: str) -> None:
    """A per-step value over time: its range within each pixel, and its mean as a line."""
    start_s = column(result.steps_table, "start_s")
    values = column(result.steps_table, name).astype(np.float64)
    if not len(values):
        return
    when, low, middle, high = _envelope(start_s, values)
    axes.fill_between(when, low, high, step="post", color=colour, alpha=0.25, linewidth=0)
    axes.step(when, middle, where="post", color=colour, label=label)


def _envelope(start_s: Floats, values: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Times and minimum, mean and maximum of at most `MAX_SLICES` slices of time."""
    span = start_s[-1] - start_s[0]
    if len(values) <= MAX_SLICES or span <= 0:
        return start_s, values, values, values
    slices = np.minimum((start_s - start_s[0]) / span * MAX_SLICES, MAX_SLICES - 1).astype(int)
    heads = np.flatnonzero(np.diff(slices, prepend=-1))
    counts = np.diff(heads, append=len(values))
    return (
        start_s[heads],
        np.minimum.reduceat(values, heads),
        np.add.reduceat(values, heads) / counts,
        np.maximum.reduceat(values, heads),
    )


def _finish_steps(axes: Axes) -> None:
    if not axes.lines:
        _say_empty(axes)
        return
    axes.set_ylim(bottom=0.0)
    legend_above(axes)


def _say_empty(axes: Axes) -> None:
    axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center")
