"""One panel of a picture each: distributions, queues, KV cache and batches of a run, on axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from simserve.metrics.result import RunResult
from simserve.report.activity import decode_name, envelope, over_time, per_step, reach_of_batches
from simserve.report.curves import Distribution, is_wide, preemption_times
from simserve.report.style import COLOURS, dress, legend_above, legend_below_title, log_ticks, looks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_batches", "draw_cache", "draw_decodes", "draw_distributions", "draw_queues"]


def draw_distributions(
    axes: Axes, curves: Sequence[Distribution], title: str, what: str = "requests"
) -> None:
    """Staircases of latencies (ms), the p99 of each in the legend. `what` is counted."""
    dress(axes, title, "ms", f"share of {what}")
    axes.set_ylim(0.0, 1.02)
    if not curves:
        _say_empty(axes)
        return
    for curve, look in zip(curves, looks(len(curves)), strict=True):
        axes.step(
            curve.values,
            curve.shares,
            where="post",
            color=look.colour,
            linestyle=look.dashes,
            label=f"{curve.name}: p99 {_milliseconds(curve.p99)}",
        )
    wide, sparse = is_wide([curve.values for curve in curves])
    if wide:
        log_ticks(axes, "x", sparse=sparse)
    axes.axhline(0.99, color="#888888", linewidth=0.8, linestyle=":")
    if len(curves) <= 2:
        legend_below_title(axes)
        return
    middle = axes.transScale + axes.transLimits
    median = float(np.median(np.concatenate([curve.values for curve in curves])))
    is_left = middle.transform((median, 0.5))[0] < 0.5
    axes.legend(loc="lower right" if is_left else "upper left", bbox_to_anchor=(0, 0, 1, 0.98))


def draw_queues(result: RunResult, axes: Axes) -> None:
    """Running and waiting requests over time."""
    dress(axes, "Requests in the engine", "time (s)", "requests")
    _draw_steps(result, axes, "num_running", "running", COLOURS[0])
    _draw_steps(result, axes, "num_waiting", "waiting", COLOURS[1])
    _finish_steps(axes)


def draw_cache(result: RunResult, axes: Axes) -> None:
    """Share of KV blocks in use over time, and when somebody was preempted."""
    dress(axes, "KV cache in use", "time (s)", "share of blocks")
    most = 100 * per_step(result, "kv_cache_usage").max(initial=0.0)
    _draw_steps(result, axes, "kv_cache_usage", f"KV cache, {most:.1f} % at most", COLOURS[2])
    when = preemption_times(result)
    if len(when):
        level = np.full(len(when), 1.04)
        axes.plot(when, level, "|", color=COLOURS[1], markersize=7, label="preemption")
    _finish_steps(axes)
    axes.set_ylim(0.0, 1.09)


def draw_batches(result: RunResult, axes: Axes) -> None:
    """Decode and prefill tokens of a step, stacked: means over time, behind them the most."""
    dress(axes, "Tokens per step", "time (s)", "tokens")
    if result.steps_table.num_rows:
        signals = {
            name: over_time(result, name)
            for name in ("decode_tokens", "prefill_tokens", "num_tokens")
        }
        when, decodes, most = reach_of_batches(signals["decode_tokens"], signals["num_tokens"])
        shade: dict[str, Any] = {"step": "post", "alpha": 0.4, "lw": 0}
        axes.fill_between(when, 0.0, decodes, color=COLOURS[4], **shade)
        axes.fill_between(when, decodes, most, color=COLOURS[0], **shade)
        decode, prefill = (envelope(signals[f"{name}_tokens"]) for name in ("decode", "prefill"))
        when, top = decode.when_s, decode.mean + prefill.mean
        axes.fill_between(when, 0.0, decode.mean, step="post", color=COLOURS[4], lw=0)
        axes.fill_between(when, decode.mean, top, step="post", color=COLOURS[0], lw=0)
        for name, colour in ((decode_name(result), COLOURS[4]), ("prefill", COLOURS[0])):
            axes.fill_between([], [], color=colour, label=name)
    _finish_steps(axes)


def draw_decodes(result: RunResult, axes: Axes) -> None:
    """Decode tokens of a step alone, which a prefill beside them hides."""
    dress(axes, "Decode tokens per step", "time (s)", "tokens")
    _draw_steps(result, axes, "decode_tokens", decode_name(result), COLOURS[4])
    _finish_steps(axes)


def _draw_steps(result: RunResult, axes: Axes, name: str, label: str, colour: str) -> None:
    """A value over time: its range within each pixel, and its mean as a line."""
    if not result.steps_table.num_rows:
        return
    when, low, mean, high = envelope(over_time(result, name))
    axes.fill_between(when, low, high, step="post", color=colour, alpha=0.25, linewidth=0)
    axes.step(when, mean, where="post", color=colour, label=label)


def _finish_steps(axes: Axes) -> None:
    if not axes.collections:
        _say_empty(axes)
        return
    axes.set_ylim(bottom=0.0)
    legend_above(axes)


def _milliseconds(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def _say_empty(axes: Axes) -> None:
    axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center")
